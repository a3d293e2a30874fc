"""The backends `full` and `breakable`: one recorded segment per shape, or several with breaks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from draftcore.contracts.runner import GraphBackend, Outputs, ShapeKey
from draftcore.errors import DraftcoreError
from draftcore_graphs.segments import Recording, Segments, leaves, record, record_eager


class SegmentBackend(GraphBackend):
    """Records the work of a key as segments, and replays them.

    `open_segments` gets the device of the first outputs, None where a function returns no tensor.
    """

    def __init__(
        self,
        open_segments: Callable[[torch.device | None], Segments],
        *,
        breaks: bool = False,
        debug: bool = False,
    ) -> None:
        self.open_segments, self.breaks, self.debug = open_segments, breaks, debug
        self._segments: Segments | None = None
        self._recordings: dict[ShapeKey, Recording] = {}

    def capture_session(self) -> AbstractContextManager[None]:
        return without_collection()

    def capture_one(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
        """Record `fn` on the device of its outputs. Raises UsageError for a device without graphs."""
        self._recordings.pop(key, None)
        with torch.no_grad():
            segments = self._segments_for(fn())
            with segments.isolated():
                fn()
                self._recordings[key] = (
                    record_eager(fn) if self.debug else record(fn, segments, breaks=self.breaks)
                )

    def can_run(self, batch: Mapping[str, Tensor], key: ShapeKey) -> bool:
        return key in self._recordings

    def replay_session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def replay(self, key: ShapeKey) -> Outputs:
        return recorded(self._recordings, key).replay()

    def cleanup(self) -> None:
        if self._segments is not None:
            with self._segments.closing():
                self._recordings.clear()
            self._segments = None

    def _segments_for(self, outputs: Outputs) -> Segments:
        """Return the segments of the outputs' device; the caller must not keep the outputs alive."""
        if self._segments is None:
            device = next((tensor.device for tensor in leaves(outputs)), None)
            self._segments = self.open_segments(device)
        return self._segments


T = TypeVar("T")


def recorded(recordings: Mapping[ShapeKey, T], key: ShapeKey) -> T:
    """Return what was recorded for a key. Raises DraftcoreError where nothing was."""
    if key not in recordings:
        known = ", ".join(f"{k.rows} x {k.length}" for k in sorted(recordings)) or "nothing"
        raise DraftcoreError(
            f"no graph is captured for {key}; there is {known}\n"
            "  ask can_run first; this is a bug in the runner: please report it"
        )
    return recordings[key]


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python from collecting garbage, as freeing a tensor or a graph would disturb a capture.

    The objects that exist now are frozen, so that a collection that somebody asks for is quick. All
    are unfrozen at the end: Python 3.12 starts with frozen objects, so their number tells nothing.
    """
    gc.collect()
    if not gc.isenabled():  # by a session around this one
        yield
        return
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
