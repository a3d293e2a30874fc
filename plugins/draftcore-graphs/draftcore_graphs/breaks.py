"""Breaks: functions that a backend leaves out of its graphs and runs eagerly between them.

A backend of capability `breaks` records one graph up to a break, runs the function eagerly, and records
the next graph after it. The function's inputs lie in static memory, and what it returns is copied into
static memory that the next graph reads. Where nobody records, `run_eager` calls the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from draftcore.contracts.runner import Outputs


class Recorder(Protocol):
    """What a backend passes to `recording` in its `capture_one`, to be called at breaks."""

    def eager(self, fn: Callable[..., Outputs], args: tuple[Any, ...]) -> Outputs:
        """End the graph, call the function once, and record the next graph from its outputs on."""


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def run_eager(fn: Callable[..., Outputs], *args: Any) -> Outputs:
    """Call `fn(*args)`, as a break where a backend records graphs with breaks."""
    recorder = _recorder.get()
    return fn(*args) if recorder is None else recorder.eager(fn, args)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Hand every break within the block to this recorder."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
