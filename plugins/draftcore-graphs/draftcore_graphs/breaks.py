"""Where a backend that records segments may leave a function out of them, to be run eagerly.

A backend of capability `breaks` records one graph up to a break, lets the function run as it is,
and records the next graph after it. The function's inputs lie in static memory, and what it
returns is copied into the static memory that the next graph reads. Nobody recording, `run_eager`
is the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from draftcore.contracts.runner import Outputs


class Recorder(Protocol):
    """What a backend gives in its `capture_one` to be told of breaks."""

    def eager(self, fn: Callable[..., Outputs], args: tuple[Any, ...]) -> Outputs:
        """End the segment, call the function once, and go on recording with its outputs."""
        ...


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def run_eager(fn: Callable[..., Outputs], *args: Any) -> Outputs:
    """Call `fn(*args)`: outside the graphs if one is being recorded, else as it is."""
    recorder = _recorder.get()
    return fn(*args) if recorder is None else recorder.eager(fn, args)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Tell this recorder of every break within the block."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
