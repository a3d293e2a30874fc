"""A random state of its own for each draft: whoever trains or captures beside it does not move it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class RandomState:
    """torch's random state on the CPU and on a draft's device, current inside `with`.

    `tensors` is what a checkpoint keeps; a state that lacks the device's takes over its present one.
    """

    def __init__(self, device: torch.device, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.cuda = device.type == "cuda"
        self.tensors: Mapping[str, Tensor] = {**self._current(), **(tensors or {})}

    def __enter__(self) -> None:
        torch.set_rng_state(self.tensors["rng.cpu"])
        if self.cuda:
            torch.cuda.set_rng_state(self.tensors["rng.cuda"])

    def __exit__(self, *exc: object) -> None:
        self.tensors = self._current()

    def _current(self) -> dict[str, Tensor]:
        cuda = {"rng.cuda": torch.cuda.get_rng_state()} if self.cuda else {}
        return {"rng.cpu": torch.get_rng_state(), **cuda}
