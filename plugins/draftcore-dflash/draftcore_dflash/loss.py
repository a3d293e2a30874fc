"""The objectives, decayed cross entropy and D-PACE (arXiv 2605.18810), and the metrics.

Both are one ratio. Decayed cross entropy is sum(w CE) / sum(w) over all rows of all blocks. D-PACE
weighs a row by how likely the draft itself is to get that far and beyond, and divides by the number
of samples that have something to learn. `DFlashDraft.loss` applies them.

Shape letters: M kept blocks, S rows of a block, R rows with weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftcore_dflash.options import DFlashOptions

Counts = Mapping[str, tuple[Tensor, Tensor]]


def dpace_weights(options: DFlashOptions, nll_MS: Tensor, valid_MS: Tensor) -> Tensor:
    """Return weights [M, S] from the draft's confidence s = (1 - alpha) p + alpha in each label.

    P_k is the product of s up to row k (rows that do not count have s = 1) and w_k = sum of P_j
    over rows j >= k that count: how far a correct row k carries. Its two factors alone are P_k,
    the confidence so far, and w_k / P_k, the value of what follows.
    """
    alpha = options.dpace_alpha
    confidence_MS = (1 - alpha) * torch.exp(-nll_MS) + alpha
    prefix_MS = confidence_MS.masked_fill(~valid_MS, 1.0).cumprod(-1)
    if options.loss == "dpace_cumulative_confidence_only":
        return prefix_MS
    weight_MS = (prefix_MS * valid_MS).flip(-1).cumsum(-1).flip(-1)
    if options.loss == "dpace_continuation_value_only":
        return weight_MS / prefix_MS
    return weight_MS


def metrics(hits_MS: Tensor, valid_MS: Tensor, dtype: torch.dtype, prefix: str = "") -> Counts:
    """Return accuracy over rows that count, and acceptance length over blocks that have any.

    A block's acceptance length is 1 + the number of its leading hits: what a round of decoding
    would yield where the data is what the target writes.
    """
    # A row before the first that counts (the anchor's own) does not end the run of hits.
    missed_MS = (valid_MS.int().cumsum(-1) > 0) & ~hits_MS
    leading_M = ((missed_MS.int().cumsum(-1) == 0) & valid_MS).sum(-1)
    some_M = valid_MS.any(-1)
    length = ((leading_M + 1) * some_M).sum().to(dtype)
    return {
        f"{prefix}accuracy": ((hits_MS & valid_MS).sum().to(dtype), valid_MS.sum().to(dtype)),
        f"{prefix}acceptance_length": (length, some_M.sum().to(dtype)),
    }
