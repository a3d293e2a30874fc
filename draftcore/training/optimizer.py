"""The default optimizer, AdamW over fp32 masters, gradient clipping and the learning-rate schedule.

Source of the formulas: SpecForge's optimizer, whose 20-step traces the tests hold. Its cosine is
normalised to pass through the peak one step after the warm-up, so at step w (0-based, w > 0) the
rate is a little above the peak; we keep that, since published recipes were tuned with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Schedule = Literal["cosine", "constant"]


def learning_rate(
    step: int, total_steps: int, *, peak: float, warmup_ratio: float, schedule: Schedule
) -> float:
    """Return the rate of 0-based `step`: linear warm-up, then cosine to 0 or constant."""
    warmup = int(warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    span = total_steps - warmup
    if schedule == "constant" or span <= 1:
        return peak
    return peak * (1 + math.cos(math.pi * (step - warmup) / span)) / (1 + math.cos(math.pi / span))


def build_optimizer(
    groups: Sequence[Mapping[str, Any]], *, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """Make an AdamW with eps 1e-8; the trainer sets its rate at every step."""
    given = [dict(group) for group in groups]
    return torch.optim.AdamW(given, 0.0, betas, weight_decay=weight_decay, fused=True)


@torch.no_grad()
def scale_and_clip(parameters: Iterable[Tensor], denominator: Tensor, max_norm: float) -> Tensor:
    """Divide summed gradients by `denominator`, clip by global norm, return the norm before clipping.

    Factor min(1, max / (norm + 1e-6)), one pass over the gradients for both. Of sharded gradients
    each rank scales its own part, and the norm is that of the whole.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm: Tensor = full(torch.nn.utils.get_total_norm(grads)) / denominator
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / denominator
    if grads:  # none where all rows of a step are skipped
        torch._foreach_mul_([local(grad) for grad in grads], factor)
    return norm


def full(tensor: Any) -> Any:
    """Return a sharded tensor whole, which all ranks take part in; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Any) -> Any:
    """Return this rank's part of a sharded tensor, in place; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_like(weight: Any, value: Any) -> Any:
    """Return a whole tensor sharded as the weight whose shape it has; anything else as it is."""
    if not hasattr(weight, "placements") or getattr(value, "shape", None) != weight.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
