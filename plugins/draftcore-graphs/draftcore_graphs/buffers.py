"""The static buffers that graphs read: one slot per attribute of a batch, one storage per slot.

A graph reads fixed addresses. So the live batch is copied into storage that was allocated once, in
the shape of the bucket that it is padded to. Storage has the size of the largest bucket, and every
bucket views its beginning. Buckets overwrite each other, so every call of `fill` pads anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftcore.contracts.runner import ShapeKey

# By axis, how many leading dimensions of the live values may be smaller than the bucket's.
FREE = {"none": 0, "rows": 1, "tokens": 2}


@dataclass(frozen=True)
class Slot:
    """One attribute of a batch: its shape by bucket and its dtype.

    `axis` says along which dimensions live values may be smaller than the bucket: `rows`, rows and
    `tokens`, or `none`. The rest is padded with zeros, or repeats what the first row holds.
    """

    name: str
    shape: Callable[[ShapeKey], tuple[int, ...]]
    dtype: torch.dtype
    axis: Literal["rows", "tokens", "none"]
    repeat: bool = False


class StaticBuffers:
    """Keeps the slots of one runner, allocated for the largest of these buckets."""

    def __init__(
        self, slots: Sequence[Slot], keys: Iterable[ShapeKey], device: torch.device | str
    ) -> None:
        keys = list(keys)
        self.slots = {slot.name: slot for slot in slots}
        self.storage = {
            slot.name: torch.zeros(
                max(math.prod(slot.shape(key)) for key in keys), dtype=slot.dtype, device=device
            )
            for slot in slots
        }

    def view(self, key: ShapeKey) -> dict[str, Tensor]:
        """Return the slots in the bucket's shape, contiguous, as they were filled last."""
        views = {}
        for name, slot in self.slots.items():
            shape = slot.shape(key)
            views[name] = self.storage[name][: math.prod(shape)].view(shape)
        return views

    def fill(self, key: ShapeKey, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy live values into the bucket's slots and pad the rest; slots that are not named stay.

        Raises ValueError for values that do not fit into the bucket, which is a bug in the runner.
        """
        views = self.view(key)
        for name, value in live.items():
            _fill(self.slots[name], views[name], value)
        return views


def _fill(slot: Slot, static: Tensor, live: Tensor) -> None:
    free = FREE[slot.axis]
    fits = live.ndim == static.ndim and all(
        a <= b if dim < free else a == b
        for dim, (a, b) in enumerate(zip(live.shape, static.shape, strict=True))
    )
    if not fits:
        shapes = f"{tuple(live.shape)} into {tuple(static.shape)}"
        raise ValueError(f"slot {slot.name!r}: cannot fill {shapes} along {slot.axis}")
    inside = static[tuple(slice(size) for size in live.shape)]
    if live.shape != static.shape:
        static.zero_()
    inside.copy_(live)
    if slot.repeat:
        static[len(live) :].copy_(static[:1].expand_as(static[len(live) :]))
