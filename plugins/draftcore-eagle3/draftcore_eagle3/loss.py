"""The rows, the teacher and the loss of a step of the training-time test.

The test itself is `Eagle3Draft.forward`: K draft steps on every row at once, each fed by the one
before.

Row t of a sample holds the target's features of token t and token t+1, and predicts token t+2,
for which the teacher is the target's head on its last hidden state at t+1. At step k row t has
moved on by k: token t+1+k, position t+k, teacher of row u = t+k. So step k meets the supervised
teacher row u at draft row u-k, and only the rows that this takes are computed:

- the teacher and the LM head run on supervised rows u. At step k the head reads draft row u-k.
  Where u < k there is none: any row stands in with weight 0, which saves a host sync;
- queries, MLP and later steps run on *active* rows, those that meet a supervised row at any step;
- step-0 keys and values need all rows, and nothing else does.

Rows are flat indices b*T + t. Padding is on the right, so causality alone hides it.

Shape letters: B batch, T tokens, N active rows, M supervised rows, H hidden, V target and U draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from draftcore_nn.layers import full_precision
from draftcore_nn.losses import row_slices
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from draftcore_eagle3.options import Eagle3Options


@dataclass(frozen=True)
class Rows:
    """The active rows, the supervised rows, and where a row stands among the active."""

    active_N: Tensor
    supervised_M: Tensor
    slot_BT: Tensor
    time_BT: Tensor

    @classmethod
    def of(cls, mask_BT: Tensor, steps: int) -> Rows:
        """Find the rows of a batch; counting them is all that the loss waits for on a GPU."""
        reach_BT = functional.pad(mask_BT, (0, steps - 1)).unfold(1, steps, 1).any(-1)
        active_N = reach_BT.flatten().nonzero()[:, 0]
        slot_BT = torch.zeros(mask_BT.numel(), dtype=torch.long, device=mask_BT.device)
        slot_BT[active_N] = torch.arange(len(active_N), device=mask_BT.device)
        times = torch.arange(mask_BT.shape[1], device=mask_BT.device).repeat(mask_BT.shape[0])
        return cls(active_N, mask_BT.flatten().nonzero()[:, 0], slot_BT, times)

    def drafted(self, step: int) -> tuple[Tensor, Tensor]:
        """Return, per supervised row u, the active slot of row u-step and whether there is one."""
        there_M = self.time_BT[self.supervised_M] >= step
        return self.slot_BT[(self.supervised_M - step).clamp_min(0)], there_M


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at supervised rows.

    probs_MU: softmax restricted to draft tokens and renormalised; share_MU: the same, not
    renormalised; label_M: the draft index of the target's most probable token, -1 if it has none.
    """

    probs_MU: Tensor
    share_MU: Tensor
    label_M: Tensor


@torch.no_grad()
def teach(
    head_VH: Tensor, ids_U: Tensor | None, last_hidden_BTH: Tensor, supervised_M: Tensor
) -> Teacher:
    """Run the target's head at the supervised rows, a slice at a time.

    `ids_U` are the target ids of the draft vocabulary; None for the full one.
    """
    hidden_MH = last_hidden_BTH.flatten(0, 1).index_select(0, supervised_M + 1).to(head_VH.dtype)
    index_V = torch.arange(len(head_VH), device=head_VH.device)
    if ids_U is not None:
        index_V = torch.full_like(index_V, -1).index_copy(0, ids_U, index_V[: len(ids_U)])
    # Slices are counted from the batch's shape, which torch.compile knows; late ones may be empty.
    num_rows = last_hidden_BTH.shape[0] * last_hidden_BTH.shape[1]
    parts = [
        _teach_rows(functional.linear(hidden_MH[rows], head_VH), ids_U, index_V)
        for rows in row_slices(num_rows, len(head_VH))
    ]
    share_MU, label_M, *probs = (torch.cat(part) for part in zip(*parts, strict=True))
    return Teacher(probs[0] if probs else share_MU, share_MU, label_M)


def _teach_rows(logits_mV: Tensor, ids_U: Tensor | None, index_V: Tensor) -> tuple[Tensor, ...]:
    """Return shares and labels, and where the vocabulary is not full renormalised shares."""
    with full_precision(logits_mV.device):
        label_m = index_V[logits_mV.argmax(-1)]
        share_mV = logits_mV.softmax(-1, dtype=torch.promote_types(logits_mV.dtype, torch.float32))
        if ids_U is None:
            return share_mV, label_m
        # Not the share divided by its sum: that may be 0/0 where the draft knows no likely token.
        probs_mU = logits_mV.index_select(1, ids_U).softmax(-1, dtype=share_mV.dtype)
        return share_mV.index_select(1, ids_U), label_m, probs_mU


def step_loss(
    options: Eagle3Options, logits_MU: Tensor, teacher: Teacher, weight_M: Tensor, num_rows: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return one step's loss and its acceptance rate, each as numerator and denominator.

    Arithmetic is in fp32 (fp64 for an fp64 draft).
    """
    log_probs_MU = logits_MU.log_softmax(-1, dtype=weight_M.dtype)
    cross_entropy = -((teacher.probs_MU * log_probs_MU).sum(-1) * weight_M).sum()
    with torch.set_grad_enabled(torch.is_grad_enabled() and options.loss != "kl"):
        overlap_M = torch.minimum(teacher.share_MU, log_probs_MU.exp()).sum(-1)
    acceptance, count = (overlap_M * weight_M).sum(), weight_M.sum()
    shares = (acceptance.detach(), count)
    if options.loss == "kl":
        return (cross_entropy, num_rows), shares
    some = (count > 0).to(count.dtype)
    count = count.clamp_min(1)
    rate = acceptance / count
    if options.loss == "lk_alpha":
        # A row without overlap would be infinite; it is as good as impossible in fp32.
        log_M = overlap_M.clamp_min(torch.finfo(overlap_M.dtype).tiny).log()
        return (-(log_M * weight_M).sum() / count, some), shares
    blend = options.kl_scale * torch.exp(-options.kl_decay * rate.detach())
    loss = blend * cross_entropy / num_rows.clamp_min(1) + (1 - blend) * (1 - rate)
    return (loss * some, some), shares
