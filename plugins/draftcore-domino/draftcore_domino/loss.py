"""How the final loss is blended with the base loss, whose share falls to 0 during the run.

The base loss anchors the backbone while the head learns. Its share depends on how far the run is, so
a run of unknown length is an error. `DominoDraft.loss` applies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftcore.contracts.algorithm import StepContext
from draftcore.errors import UsageError

if TYPE_CHECKING:
    from draftcore_domino.options import DominoOptions


def base_share(options: DominoOptions, context: StepContext) -> float:
    """Return lambda at a step: from `lambda_start` linearly to 0 over `lambda_ratio` of the run.

    Raises UsageError where the number of steps is not known.
    """
    if (context.total_steps or 0) < 1:
        raise UsageError(
            "domino blends two losses by how far the run is, and its number of steps is unknown\n"
            "  set train.max_steps, or train.epochs over data whose size is known"
        )
    steps = max(1, int(context.total_steps * options.lambda_ratio))
    return options.lambda_start * max(0.0, 1.0 - (context.step - 1) / steps)
