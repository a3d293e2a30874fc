"""Stop a draft whose held-out loss no longer falls; log the gradient norm of each of its parts.

    draftcore --plugin examples/plugins/early_stop.py train run.yaml train.eval_every=100

A run that was stopped goes on with the same command, and counts anew.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftcore import hookimpl
from draftcore.contracts.algorithm import Stop

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 3  # evaluations in a row that are no better than the best before them
losses: dict[str, list[float]] = defaultdict(list)  # of each draft by its label


@hookimpl
def run_started() -> None:
    losses.clear()


@hookimpl
def gradients_ready(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    squares: dict[str, Any] = defaultdict(float)
    for name, gradient in gradients.items():
        squares[name.partition(".")[0]] += gradient.square().sum()
    return {f"grad_norm.{part}": float(square) ** 0.5 for part, square in squares.items()}


@hookimpl
def eval_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    return {"perplexity": math.exp(report["loss"])} if "loss" in report else {}


@hookimpl
def evaluated(report: Mapping[str, Any], draft: str) -> Stop | None:
    if "loss" not in report:  # of `draftcore eval`
        return None
    losses[draft].append(report["loss"])
    if len(losses[draft]) - 1 - losses[draft].index(min(losses[draft])) < PATIENCE:
        return None
    best = min(losses[draft])
    return Stop(f"the held-out loss was {best:.4g} at best, {PATIENCE} evaluations ago")
