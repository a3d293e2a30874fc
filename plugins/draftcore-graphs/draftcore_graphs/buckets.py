"""Buckets: the sizes that graphs are captured for, and which of them a batch is padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from draftcore.contracts.runner import ShapeKey


def pad_to(size: int, table: Sequence[int], *, padding: bool = True) -> int | None:
    """Return the smallest bucket of an ascending table that holds `size`, None if none does.

    Without padding that is `size` itself, or none.
    """
    at = bisect_left(table, size)
    if at == len(table) or (table[at] != size and not padding):
        return None
    return table[at]


def doubling(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `most` itself."""
    sizes = {1 << power for power in range(most.bit_length()) if 1 << power < most}
    return (*sorted(sizes), most)


def multiples(step: int, most: int) -> tuple[int, ...]:
    """Return the multiples of `step` up to the first that holds `most`."""
    return tuple(range(step, most + step, step))


def largest_first(keys: Iterable[ShapeKey]) -> list[ShapeKey]:
    """Order keys so that the memory pool of the first capture serves all others."""
    return sorted(set(keys), key=lambda key: (key.rows * key.length, key), reverse=True)
