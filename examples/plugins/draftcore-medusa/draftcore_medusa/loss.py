"""The objective: cross entropy of every head with the token it looks ahead to, as one ratio.

Head i at position t predicts token t+2+i (the target's own head has t+1), and counts where the loss
mask has that token:

    loss = sum_i decay^i sum_t m[t+2+i] CE_i,t  /  sum_i decay^i sum_t m[t+2+i]

Logits (rows x vocabulary) would not fit in memory for all rows of all heads. They exist for a
slice of rows at a time, and are computed again in the backward instead of being kept.

Shape letters: B batch, T tokens, S = T - (2+i) positions that have such a token, R rows that
count, r a slice of them, H hidden, V vocabulary, K heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from draftcore.contracts.algorithm import DraftBatch, StepOutput

if TYPE_CHECKING:
    from draftcore_medusa.model import MedusaDraft

# Logits exist for this many elements at a time: 256 MiB in fp32.
LOGIT_ELEMENTS = 1 << 26


def medusa_loss(draft: MedusaDraft, batch: DraftBatch) -> StepOutput:
    """Return the loss. Metrics: `accuracy_i` of head i, and `acceptance_length`.

    The latter is the mean, over positions that head 0 learns from, of 1 + the number of leading
    heads that are right: a round of decoding, where the data is what the target writes.
    """
    exact = torch.promote_types(draft.compute_dtype, torch.float32)
    hits_KBT = batch.loss_mask_BT.new_zeros(draft.config.num_heads, *batch.loss_mask_BT.shape)
    numerator = denominator = torch.zeros((), dtype=exact, device=batch.token_ids_BT.device)
    counts = {}
    for index, block in enumerate(draft.blocks):
        mask_BS = batch.loss_mask_BT[:, index + 2 :]
        label_R = batch.token_ids_BT[:, index + 2 :][mask_BS]
        hidden_RH = batch.features["last_hidden"][:, : mask_BS.shape[1]][mask_BS]
        hidden_RH = block(hidden_RH.to(draft.compute_dtype))
        loss, best_R = cross_entropy(hidden_RH, draft.head, label_R)
        hits_R, rows = best_R == label_R, mask_BS.sum().to(exact)
        hits_KBT[index, :, : mask_BS.shape[1]][mask_BS] = hits_R
        numerator = numerator + draft.decay**index * loss
        denominator = denominator + draft.decay**index * rows
        counts[f"accuracy_{index}"] = (hits_R.sum().to(exact), rows)
    starts_BS = batch.loss_mask_BT[:, 2:]
    leading_BT = hits_KBT.long().cumprod(0).sum(0)
    length = (leading_BT[:, : starts_BS.shape[1]] + 1)[starts_BS].sum()
    counts["acceptance_length"] = (length.to(exact), starts_BS.sum().to(exact))
    return StepOutput(numerator, denominator, counts)


def cross_entropy(hidden_RH: Tensor, head_VH: Tensor, label_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy (fp32 or fp64) and each row's most probable token.

    Without rows the sum is a zero that still has a gradient.
    """
    size = max(1, LOGIT_ELEMENTS // len(head_VH))
    slices = zip(torch.split(hidden_RH, size), torch.split(label_R, size), strict=True)
    parts = [
        checkpoint(_slice, rows, head_VH, labels, use_reentrant=False, preserve_rng_state=False)
        for rows, labels in slices
    ]
    return torch.stack([loss for loss, _ in parts]).sum(), torch.cat([best for _, best in parts])


def _slice(hidden_rH: Tensor, head_VH: Tensor, label_r: Tensor) -> tuple[Tensor, Tensor]:
    logits_rV = hidden_rH @ head_VH.T
    exact_rV = logits_rV.to(torch.promote_types(logits_rV.dtype, torch.float32))
    return functional.cross_entropy(exact_rV, label_r, reduction="sum"), logits_rV.argmax(-1)
