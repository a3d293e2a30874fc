"""The objectives: decayed cross entropy, and D-PACE (arXiv 2605.18810).

Both are one ratio. Decayed cross entropy is sum(w CE) / sum(w) over all rows of all blocks. D-PACE
weighs a row by how likely the draft itself is to get that far and beyond, and divides by samples;
a sample without anything to learn counts as none.

Shape letters: B batch, M kept blocks, S rows of a block, R rows with weight, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftcore.contracts.algorithm import DraftBatch, StepOutput
from draftcore_dflash.attention import full_precision
from draftcore_dflash.blocks import Blocks, Targets
from draftcore_dflash.head import cross_entropy

if TYPE_CHECKING:
    from draftcore_dflash.model import DFlashDraft
    from draftcore_dflash.options import BackboneOptions, DFlashOptions, Loss

Counts = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sampling:
    """Which blocks a step trains on and how their rows weigh: what every objective shares."""

    num_anchors: int = 512
    gamma: float | None = 7.0

    @classmethod
    def of(cls, options: BackboneOptions) -> Sampling:
        return cls(options.num_anchors, options.loss_decay_gamma)


@dataclass(frozen=True)
class Objective:
    """What is minimised."""

    loss: Loss = "ce"
    dpace_alpha: float = 0.5

    @classmethod
    def of(cls, options: DFlashOptions) -> Objective:
        return cls(options.loss, options.dpace_alpha)


def block_loss(draft: DFlashDraft, batch: DraftBatch, blocks: Blocks) -> StepOutput:
    """Return the loss of given blocks. Metrics: `accuracy` and `acceptance_length`.

    `ce`: numerator sum(w CE), denominator sum(w). D-PACE: numerator sum(w CE), denominator the
    number of samples that have a row to learn.
    """
    hidden_MSH = draft.block_hidden(batch, blocks)
    exact = torch.promote_types(hidden_MSH.dtype, torch.float32)
    block_size, gamma = draft.config.block_size, draft.sampling.gamma
    targets = Targets.of(batch, blocks, block_size, gamma, exact)
    index_R = targets.valid_MS.flatten().nonzero()[:, 0]
    loss_R, best_R = cross_entropy(
        hidden_MSH.flatten(0, 1).index_select(0, index_R),
        draft.head,
        targets.token_MS.flatten()[index_R],
    )
    with full_precision(loss_R.device):
        weight_MS, denominator = targets.weight_MS, targets.weight_MS.sum()
        if draft.objective.loss != "ce":
            nll_MS = scatter(loss_R.detach(), index_R, targets.valid_MS)
            weight_MS = dpace_weights(draft.objective, nll_MS, targets.valid_MS)
            learning_B = torch.zeros(len(batch.token_ids_BT), device=loss_R.device, dtype=exact)
            learning_B[blocks.sample_M[targets.valid_MS.any(-1)]] = 1.0
            denominator = learning_B.sum()
        numerator = (loss_R * weight_MS.flatten()[index_R]).sum()
    hits_R = best_R == targets.token_MS.flatten()[index_R]
    hits_MS = scatter(hits_R, index_R, targets.valid_MS)
    return StepOutput(numerator, denominator, metrics(hits_MS, targets.valid_MS, exact))


def scatter(values_R: Tensor, index_R: Tensor, like_MS: Tensor) -> Tensor:
    """Lay rows out as [M, S], zeros elsewhere."""
    flat = values_R.new_zeros(like_MS.numel())
    return flat.index_copy(0, index_R, values_R).view(like_MS.shape)


def dpace_weights(objective: Objective, nll_MS: Tensor, valid_MS: Tensor) -> Tensor:
    """Weights from the draft's confidence s = (1 - alpha) p + alpha in each label, [M, S].

    P_k is the product of s up to row k (rows that do not count have s = 1) and w_k = sum of P_j
    over rows j >= k that count: how far a correct row k carries. Its two factors alone are P_k,
    the confidence so far, and w_k / P_k, the value of what follows.
    """
    alpha = objective.dpace_alpha
    confidence_MS = (1 - alpha) * torch.exp(-nll_MS) + alpha
    prefix_MS = confidence_MS.masked_fill(~valid_MS, 1.0).cumprod(-1)
    if objective.loss == "dpace_cumulative_confidence_only":
        return prefix_MS
    weight_MS = (prefix_MS * valid_MS).flip(-1).cumsum(-1).flip(-1)
    if objective.loss == "dpace_continuation_value_only":
        return weight_MS / prefix_MS
    return weight_MS


def metrics(hits_MS: Tensor, valid_MS: Tensor, dtype: torch.dtype, prefix: str = "") -> Counts:
    """Return accuracy over rows that count, and acceptance length over blocks that have any.

    A block's acceptance length is 1 + the number of its leading hits: what a round of decoding
    would yield where the data is what the target writes.
    """
    # A row before the first that counts (the anchor's own) does not end the run of hits.
    started_MS = valid_MS.cummax(-1).values
    leading_M = (hits_MS | ~started_MS).cumprod(-1).mul(valid_MS).sum(-1)
    some_M = valid_MS.any(-1)
    length = ((leading_M + 1) * some_M).sum().to(dtype)
    return {
        f"{prefix}accuracy": ((hits_MS & valid_MS).sum().to(dtype), valid_MS.sum().to(dtype)),
        f"{prefix}acceptance_length": (length, some_M.sum().to(dtype)),
    }
