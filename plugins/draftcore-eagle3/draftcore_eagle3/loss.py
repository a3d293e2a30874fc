"""The rows and the loss of a step of the training-time test.

The test itself is `Eagle3Draft.forward`: K draft steps on every row at once, each fed by the one
before.

Row t of a sample holds the target's features of token t and token t+1, and predicts token t+2,
for which the teacher is the target's head on its last hidden state at t+1. At step k row t has
moved on by k: token t+1+k, position t+k, teacher of row u = t+k. So step k meets the supervised
teacher row u at draft row u-k, and only the rows that this takes are computed:

- the teacher and the LM head run on supervised rows u. At step k the head reads draft row u-k.
  Where u < k there is none: any row stands in with weight 0;
- queries, MLP and later steps run on *active* rows, those that meet a supervised row at any step;
- step-0 keys and values need all rows, and nothing else does.

Rows are found on the CPU, flat indices b*T + t. Padding is on the right, so causality alone hides it.

A step's logits exist in the compute dtype, and for few steps at a time: what a row's loss weighs is
known beforehand, so the forward computes the gradients with the loss, and the backward only scales
them, as in `draftcore_nn.losses`.

Shape letters: B batch, T tokens, N active rows, M supervised rows, K steps, S steps at a time, H hidden,
V target and U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from draftcore_nn import heads
from draftcore_nn.layers import cast, full_precision
from draftcore_nn.losses import Teacher, padded
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from draftcore.contracts.algorithm import OnDevice

if TYPE_CHECKING:
    from draftcore_eagle3.options import Eagle3Options

STEPS_AT_A_TIME = 2  # logits of these exist together; fewer add up more gradients of the LM head


@dataclass(frozen=True)
class Rows(OnDevice):
    """The active rows, the supervised rows, and where a row stands among the active.

    Rows that are not `real_M` fill the supervised ones up to a number that a compiled loss can cut.
    """

    active_N: Tensor
    supervised_M: Tensor
    real_M: Tensor
    slot_BT: Tensor
    time_BT: Tensor

    @classmethod
    def of(cls, mask_BT: Tensor, steps: int) -> Rows:
        """Find the rows of a batch, by its mask on the CPU. There is always one that is active."""
        reach_BT = functional.pad(mask_BT, (0, steps - 1)).unfold(1, steps, 1).any(-1)
        active_N, supervised_M = (x.flatten().nonzero()[:, 0] for x in (reach_BT, mask_BT))
        if len(active_N) == 0:
            active_N = active_N.new_zeros(1)
        missing = padded(len(supervised_M)) - len(supervised_M)
        real_M = functional.pad(torch.ones_like(supervised_M, dtype=torch.bool), (0, missing))
        supervised_M = functional.pad(supervised_M, (0, missing), value=int(active_N[0]))
        slot_BT = torch.zeros(mask_BT.numel(), dtype=torch.long)
        slot_BT[active_N] = torch.arange(len(active_N))
        times = torch.arange(mask_BT.shape[1]).repeat(mask_BT.shape[0])
        return cls(active_N, supervised_M, real_M, slot_BT, times)

    def taught(self, last_hidden_BTH: Tensor) -> Tensor:
        """Return the target's last hidden states from which it says what supervised rows predict."""
        hidden_NH = last_hidden_BTH.flatten(0, 1)
        return hidden_NH.index_select(0, (self.supervised_M + 1).clamp_max(len(hidden_NH) - 1))

    def drafted(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return for each step k and row u the active slot of row u-k, [K, M], and if there is one."""
        steps_K1 = torch.arange(steps, device=self.slot_BT.device)[:, None]
        there_KM = (self.time_BT[self.supervised_M] >= steps_K1) & self.real_M
        return self.slot_BT[(self.supervised_M - steps_K1).clamp_min(0)], there_KM


def distill(
    options: Eagle3Options, hidden_KMH: Tensor, head_UH: Tensor, teacher: Teacher,
    weight_KM: Tensor, num_rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum of the steps' losses, decayed, each step's loss [K], overlap [K, M] and best token.

    The loss of a step is a sum for `kl`, for the others the mean of the micro-batch; its gradient
    reaches the hidden states and the head. Arithmetic is in fp32 (fp64 for an fp64 draft).
    """
    wanted = torch.is_grad_enabled() and (hidden_KMH.requires_grad or head_UH.requires_grad)
    given = (teacher.logits_RU, teacher.own_R, teacher.all_R, weight_KM, num_rows)
    return _Distill.apply(hidden_KMH, head_UH, *given, options, wanted)  # type: ignore[no-any-return, no-untyped-call]


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_KMH: Tensor, head_UH: Tensor, teacher_MU: Tensor, own_M: Tensor,
        all_M: Tensor, weight_KM: Tensor, num_rows: Tensor, options: Eagle3Options, wanted: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        exact, half = own_M.dtype, hidden_KMH.dtype
        head = head_UH.to(half)
        steps_K = torch.arange(len(hidden_KMH), device=own_M.device, dtype=exact)
        decay_K = options.step_decay**steps_K
        losses, overlaps, bests, slopes = [], [], [], []
        if options.loss == "kl" and heads.suits(hidden_KMH):
            with full_precision(hidden_KMH.device):
                cross_KM, overlap_KM, best_KM, *found = fused(
                    hidden_KMH, head, teacher_MU, own_M, all_M, decay_K[:, None] * weight_KM, wanted
                )
                loss_K = (cross_KM * weight_KM).sum(-1)
            if wanted:
                ctx.save_for_backward(found[0], cast(found[1], head_UH.dtype))
            ctx.mark_non_differentiable(loss_K, overlap_KM, best_KM)
            return (decay_K * loss_K).sum(), loss_K, overlap_KM, best_KM
        head_slope_UH = torch.zeros_like(head_UH) if wanted else None
        with full_precision(hidden_KMH.device):
            exact_MU = teacher_MU.to(exact)
            probs_MU = (exact_MU - own_M[:, None]).exp()
            share_MU = probs_MU * (own_M - all_M).exp()[:, None]
            for start in range(0, len(hidden_KMH), STEPS_AT_A_TIME):
                steps = slice(start, start + STEPS_AT_A_TIME)
                hidden_SMH, weight_SM = hidden_KMH[steps], weight_KM[steps]
                logits_SMU = hidden_SMH @ head.T
                found_SMU = logits_SMU.softmax(-1, dtype=exact)
                top_SM, best_SM = logits_SMU.max(-1)
                # Their log-sum-exp, without another pass over the vocabulary.
                scale_SM = top_SM - found_SMU.gather(-1, best_SM[..., None])[..., 0].log()
                cross_SM = scale_SM - (probs_MU * logits_SMU).sum(-1)
                overlap_SM = torch.minimum(share_MU, found_SMU).sum(-1)
                loss_S, cross_slope_SM, overlap_slope_SM = _step_losses(
                    options, cross_SM, overlap_SM, weight_SM, num_rows
                )
                losses.append(loss_S)
                overlaps.append(overlap_SM)
                bests.append(best_SM)
                if head_slope_UH is None:
                    continue
                decay_S1 = decay_K[steps, None]
                slope_SMU = (found_SMU - probs_MU).mul_((decay_S1 * cross_slope_SM)[..., None])
                if options.loss != "kl":
                    below_SMU = found_SMU * (found_SMU < share_MU)
                    turn_SMU = below_SMU - found_SMU * below_SMU.sum(-1, keepdim=True)
                    slope_SMU = slope_SMU + (decay_S1 * overlap_slope_SM)[..., None] * turn_SMU
                slope_SMU = slope_SMU.to(half)
                slopes.append(slope_SMU @ head)
                flat = slope_SMU.flatten(0, 1).T @ hidden_SMH.flatten(0, 1)
                head_slope_UH = head_slope_UH + flat.to(head_UH.dtype)
            loss_K = torch.cat(losses)
            total = (decay_K * loss_K).sum()
        if head_slope_UH is not None:
            ctx.save_for_backward(torch.cat(slopes), head_slope_UH)
        overlap_KM, best_KM = torch.cat(overlaps), torch.cat(bests)
        ctx.mark_non_differentiable(loss_K, overlap_KM, best_KM)
        return total, loss_K, overlap_KM, best_KM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        slopes = [(slope * grad).to(slope.dtype) for slope in ctx.saved_tensors]
        return (*slopes, *[None] * 7)


def _step_losses(
    options: Eagle3Options, cross_SM: Tensor, overlap_SM: Tensor, weight_SM: Tensor,
    num_rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return each step's loss [S], and its slopes by the rows' cross entropy and overlap, [S, M]."""
    if options.loss == "kl":
        return (cross_SM * weight_SM).sum(-1), weight_SM, torch.zeros_like(weight_SM)
    weight_SM = weight_SM / weight_SM.sum(-1, keepdim=True).clamp_min(1)
    if options.loss == "lk_alpha":
        # A row without overlap would be infinite; it is as good as impossible in fp32.
        tiny = torch.finfo(overlap_SM.dtype).tiny
        slope_SM = -(weight_SM * (overlap_SM > tiny)) / overlap_SM.clamp_min(tiny)
        log_SM = overlap_SM.clamp_min(tiny).log()
        return -(log_SM * weight_SM).sum(-1), torch.zeros_like(weight_SM), slope_SM
    rate_S1 = (overlap_SM * weight_SM).sum(-1, keepdim=True)
    blend_S1 = options.kl_scale * torch.exp(-options.kl_decay * rate_S1)
    given_SM = (weight_SM > 0).to(weight_SM.dtype) / num_rows.clamp_min(1)
    some_S1 = given_SM.any(-1, keepdim=True)
    loss_S1 = blend_S1 * (cross_SM * given_SM).sum(-1, keepdim=True) + (1 - blend_S1) * (
        1 - rate_S1
    )
    return (loss_S1 * some_S1)[:, 0], blend_S1 * given_SM, (blend_S1 - 1) * weight_SM


@torch.library.custom_op("draftcore::distill", mutates_args=())
def fused(
    hidden_KMH: Tensor, head_UH: Tensor, teacher_MU: Tensor, own_M: Tensor, all_M: Tensor,
    slope_KM: Tensor, wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return each row's cross entropy, overlap and best token [K, M], and the gradients if they are wanted.

    Of the hidden states and of the head, of the sum of slope * cross entropy; by Triton's kernel.
    """
    from draftcore_eagle3 import kernels

    cross_KM, overlap_KM, best_KM, grad_KMH, head_grad_UH = _fused_like(
        hidden_KMH, head_UH, teacher_MU, own_M, all_M, slope_KM, wanted
    )
    (steps, rows, _), size = hidden_KMH.shape, len(head_UH)
    at_once = max(1, min(steps, heads.SLICE_ELEMENTS // max(1, rows * size)))
    memory = hidden_KMH.new_empty(at_once * rows, size)
    head_grad_UH.zero_()
    for start in range(0, steps, at_once):
        part = slice(start, min(start + at_once, steps))
        hidden = hidden_KMH[part].flatten(0, 1)
        logits = torch.mm(hidden, head_UH.T, out=memory[: len(hidden)])
        kernels.distill(
            logits, teacher_MU, own_M, all_M, slope_KM[part],
            cross_KM[part], overlap_KM[part], best_KM[part], wanted,
        )  # fmt: skip
        if wanted:
            torch.mm(logits, head_UH, out=grad_KMH[part].flatten(0, 1))
            heads.add_product(head_grad_UH, logits.T, hidden)
    return cross_KM, overlap_KM, best_KM, grad_KMH, head_grad_UH


@fused.register_fake
def _fused_like(
    hidden_KMH: Tensor, head_UH: Tensor, teacher_MU: Tensor, own_M: Tensor, all_M: Tensor,
    slope_KM: Tensor, wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    best_KM = slope_KM.new_empty(slope_KM.shape, dtype=torch.long)
    by_row = slope_KM.new_empty(slope_KM.shape), slope_KM.new_empty(slope_KM.shape), best_KM
    grad_KMH = hidden_KMH.new_empty(hidden_KMH.shape)
    return *by_row, grad_KMH, head_UH.new_empty(head_UH.shape, dtype=torch.float32)
