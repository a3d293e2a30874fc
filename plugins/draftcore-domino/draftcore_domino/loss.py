"""The objective: final loss blended with the base loss, whose share falls to 0 during the run.

Both losses weigh rows as DFlash does and divide by the same sum of weights, so their blend is one
ratio. The base loss anchors the backbone while the head learns; its share depends on how far the
run is, so a run of unknown length is an error.

Shape letters: M kept blocks, S rows of a block, R rows with weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from draftcore_dflash.blocks import Blocks, Targets
from draftcore_dflash.loss import metrics, scatter

from draftcore.contracts.algorithm import DraftBatch, StepContext, StepOutput
from draftcore.errors import UsageError
from draftcore_domino.head import corrected_cross_entropy

if TYPE_CHECKING:
    from draftcore_domino.model import DominoDraft
    from draftcore_domino.options import DominoOptions


@dataclass(frozen=True)
class Schedule:
    """How the base loss's share falls: from `start` linearly to 0 over `ratio` of the run."""

    start: float = 1.0
    ratio: float = 0.5

    @classmethod
    def of(cls, options: DominoOptions) -> Schedule:
        return cls(options.lambda_start, options.lambda_ratio)

    def base_share(self, context: StepContext) -> float:
        """Lambda at a step; raises UsageError where the number of steps is not known."""
        if (context.total_steps or 0) < 1:
            raise UsageError(
                "domino blends two losses by how far the run is, and its number of steps is unknown\n"
                "  set train.max_steps, or train.epochs over data whose size is known"
            )
        steps = max(1, int(context.total_steps * self.ratio))
        return self.start * max(0.0, 1.0 - context.step / steps)


def domino_loss(
    draft: DominoDraft, batch: DraftBatch, blocks: Blocks, base_share: float
) -> StepOutput:
    """Return the loss of given blocks: sum(w ((1 - share) CE_final + share CE_base)) / sum(w).

    Metrics: `final_loss`, `accuracy`, `acceptance_length`, the same with `base_`, and `lambda`.
    """
    config = draft.domino
    hidden_MSH, states_MSG = draft.block_hidden(batch, blocks), draft.prefix_states(batch, blocks)
    exact = torch.promote_types(hidden_MSH.dtype, torch.float32)
    targets = Targets.of(
        batch, blocks, config.block_size, draft.sampling.gamma, exact, shifted=config.shift_label
    )
    index_R = targets.valid_MS.flatten().nonzero()[:, 0]
    weight_R, label_R = targets.weight_MS.flatten()[index_R], targets.token_MS.flatten()[index_R]
    hidden_RH = hidden_MSH.flatten(0, 1).index_select(0, index_R)
    low_RE = draft.low_rank(hidden_RH, states_MSG.flatten(0, 1).index_select(0, index_R))
    corrected_R = index_R % config.block_size >= config.first_corrected_row
    losses = corrected_cross_entropy(
        hidden_RH, low_RE * corrected_R[:, None].to(low_RE.dtype), draft.head,
        draft.up.weight, label_R, weight_R, base_share,
    )  # fmt: skip
    denominator = weight_R.sum()
    final_MS, base_MS = (
        scatter(best_R == label_R, index_R, targets.valid_MS)
        for best_R in (losses.final_best_R, losses.base_best_R)
    )
    share = denominator.new_tensor(base_share)
    return StepOutput(
        losses.objective,
        denominator,
        {
            "final_loss": ((losses.final_R * weight_R).sum(), denominator),
            "base_loss": ((losses.base_R * weight_R).sum(), denominator),
            **metrics(final_MS, targets.valid_MS, exact),
            **metrics(base_MS, targets.valid_MS, exact, prefix="base_"),
            "lambda": (share, torch.ones_like(share)),
        },
    )
