"""The optimizer against 20-step traces of an independent implementation (goldens/misc.*)."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from draftcore.training.optimizer import build_optimizer, learning_rate, scale_and_clip

Schedule = Literal["cosine", "constant"]
GOLDENS = Path(__file__).parents[1] / "goldens"
TRACE = json.loads((GOLDENS / "misc.json").read_text())
TENSORS = load_file(GOLDENS / "misc.safetensors")


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_learning_rate_follows_the_golden_trace(schedule: Schedule) -> None:
    trace = TRACE[f"optimizer_{schedule}"]
    total = trace["total_steps"]
    shape: Any = {"peak": trace["lr"], "warmup_ratio": trace["warmup_ratio"]}
    ours = [learning_rate(s, total, schedule=schedule, **shape) for s in range(total)]
    assert ours == pytest.approx(trace["lr_used_at_step"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_clipping_and_the_update_follow_the_golden_trace(schedule: Schedule) -> None:
    """The gradient is given doubled with denominator 2, so the division is tested too."""
    trace = TRACE[f"optimizer_{schedule}"]

    def of(kind: str, step: int) -> torch.Tensor:
        tensor: torch.Tensor = TENSORS[f"optimizer.{schedule}.{kind}.{step}"]
        return tensor

    weight = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = build_optimizer(
        [{"params": [weight]}], weight_decay=trace["weight_decay"], betas=tuple(trace["betas"])
    )
    start = None
    for step in range(5):
        weight.grad = 2 * of("grad", step)
        norm = scale_and_clip([weight], torch.tensor(2.0), trace["max_grad_norm"])
        assert float(norm) == pytest.approx(trace["pre_clip_grad_norm"][step], rel=1e-6)
        optimizer.param_groups[0]["lr"] = trace["lr_used_at_step"][step]
        optimizer.step()
        # The trace starts from weights that it does not hold: compare the movement from step 0 on.
        start = of("weight_after", 0) - weight.detach() if start is None else start
        torch.testing.assert_close(
            weight.detach() + start, of("weight_after", step), rtol=1e-5, atol=1e-6
        )


def test_a_schedule_ends_near_zero_and_never_divides_by_zero() -> None:
    shape: Any = {"peak": 1.0, "warmup_ratio": 0.5, "schedule": "cosine"}
    for total in (1, 2, 3, 50):
        rates = [learning_rate(s, total, **shape) for s in range(total)]
        assert all(0 <= rate <= 2 for rate in rates)
