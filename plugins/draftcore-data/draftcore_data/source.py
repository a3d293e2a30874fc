"""Where training data comes from, and which keys of a row are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

# The shapes of rows: the key that each is known by, first which is looked for first, and those beside it.
BESIDE = ("system", "system_prompt", "tools", "category")
SHAPES: Mapping[str, tuple[str, ...]] = {
    "input_ids": ("loss_mask", "labels"),
    "messages": BESIDE,
    "conversations": BESIDE,
    "instruction": ("input", "output", *BESIDE),
    "prompt": ("completion", *BESIDE),
}
ROW_KEYS = tuple(dict.fromkeys((*SHAPES, *(key for keys in SHAPES.values() for key in keys))))


class Source(Protocol):
    """The rows of one place, as often as they are asked for, in the same order."""

    def key(self) -> str:
        """Return what changes when a row does: rendered rows are reused while it is the same."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield each row with its place, for messages: a mapping, or a line of JSON as bytes."""
