"""What is done while a step is trained on: a stream of the device, and a thread that waits for it.

The thread that trains launches the captures for the next step on the stream, and then its own step;
the other one waits for what was captured, checks it and puts it, or opens what was there. Captures
are not launched by a thread of their own: it would share the interpreter's lock with training, launch
by launch, and slow both (docs/performance.md, 2026-11-22).

The rule of who owns what on the device is one sentence: work is done when the stream is, so what
comes out of it may be used on any stream, and nobody waits for the whole device. Stores hand over
features in host memory, so a step's own tensors never change streams at all.

Odd: the thread is a daemon. Who stops a run by a second Ctrl-C waits for nothing, not even for a
capture that hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import torch

T = TypeVar("T")


class Aside:
    """A thread that does one piece of work after the other, and a stream where `device` is CUDA."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device is not None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._work = SimpleQueue[Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name="aside", daemon=True)
        self._thread.start()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launch on the stream, after what the caller's own was asked so far."""
        if self._stream is None:
            yield
            return
        reached = torch.cuda.current_stream(self._stream.device).record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(reached)
            yield

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Have the thread do work that waits for what was launched."""
        found = Future[T]()

        def answer() -> None:
            try:
                found.set_result(self.finish(work))
            except BaseException as error:  # it is for who asks for the result
                found.set_exception(error)

        self._work.put(answer)
        return found

    def finish(self, work: Callable[[], T]) -> T:
        """Do work in this thread, on the stream, and wait for that."""
        if self._stream is None:
            return work()
        with torch.cuda.stream(self._stream):  # which makes its device the thread's, too
            try:
                return work()
            finally:
                self._stream.synchronize()

    def close(self) -> None:
        """End the thread when its work is done; called twice, it does nothing."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (answer := self._work.get()) is not None:
            answer()
            del answer  # and with it what the work held
