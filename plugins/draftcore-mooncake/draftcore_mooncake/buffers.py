"""Buffers for samples on their way in and out: allocated, touched and registered once, then reused.

Fresh memory is filled at a twelfth of the speed of used memory, and registering it for RDMA pins
its pages, so in steady state a put or get allocates nothing. A buffer of a transfer that failed
is set aside for a minute, as a late write may still reach it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

SMALLEST = 64 << 10
SET_ASIDE_SECONDS = 60.0


class BufferPool:
    """Keep uint8 tensors for reuse, at most `keep_bytes` of unused ones. Thread-safe.

    `allocate(nbytes)` makes one, `release(buffer)` lets go of it.
    """

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        release: Callable[[Tensor], object],
        *,
        keep_bytes: int,
    ) -> None:
        self._allocate, self._release = allocate, release
        self.keep_bytes = keep_bytes
        self.allocated = 0  # buffers, ever
        self._free: list[Tensor] = []
        self._set_aside: list[tuple[float, Tensor]] = []  # and when
        self._mutex = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Return a buffer of at least `nbytes`: the smallest that fits and is not far too large."""
        size = _rounded(nbytes)
        with self._mutex:
            old = time.monotonic() - SET_ASIDE_SECONDS
            while self._set_aside and self._set_aside[0][0] < old:
                self._free.append(self._set_aside.pop(0)[1])
            fitting = [b for b in self._free if size <= b.numel() <= 4 * size]
            if fitting:
                best = min(fitting, key=Tensor.numel)
                self._free = [buffer for buffer in self._free if buffer is not best]
                return best
            self.allocated += 1
        return self._allocate(size)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. Nothing may use it any more."""
        with self._mutex:
            kept = sum(other.numel() for other in self._free)
            if kept + buffer.numel() <= self.keep_bytes:
                self._free.append(buffer)
            else:
                self._release(buffer)

    def set_aside(self, buffer: Tensor) -> None:
        """Take back a buffer that a failed transfer may still write to."""
        with self._mutex:
            self._set_aside.append((time.monotonic(), buffer))

    def clear(self) -> None:
        """Release all buffers that are not in use."""
        with self._mutex:
            for buffer in [*self._free, *(buffer for _, buffer in self._set_aside)]:
                self._release(buffer)
            self._free, self._set_aside = [], []


def _rounded(nbytes: int) -> int:
    """Return the next size of the form 2^k or 3 * 2^k, so that samples of like size share buffers."""
    size = SMALLEST
    while size < nbytes:
        if size * 3 // 2 >= nbytes:
            return size * 3 // 2
        size *= 2
    return size
