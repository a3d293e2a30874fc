"""Cross entropy with the tokens that the heads look ahead to, a slice of rows at a time.

Logits (rows x vocabulary) would not fit in memory for all rows of all heads. They exist for a
slice of rows at a time, and are computed again in the backward instead of being kept.

Shape letters: R rows that count, r a slice of them, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Logits exist for this many elements at a time: 256 MiB in fp32.
LOGIT_ELEMENTS = 1 << 26


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
