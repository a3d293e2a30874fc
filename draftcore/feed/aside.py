"""What is done while a step is trained on: by one thread, on a CUDA device on a stream of its own.

The rule of who owns what on the device is one sentence: work is done when its stream is, so what
comes out of it may be used on any stream, and nobody waits for the whole device. Stores hand over
features in host memory, so a step's own tensors never change streams at all.

Odd: the thread is a daemon. Who stops a run by a second Ctrl-C waits for nothing, not even for a
capture that hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Aside:
    """A thread that does one piece of work after the other, for `device` where that is CUDA."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device is not None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._work = SimpleQueue[Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name="aside", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Begin work; on the device it follows what the caller's stream was asked to do so far."""
        found = Future[T]()
        placed = self._placed(work)

        def answer() -> None:
            try:
                found.set_result(placed())
            except BaseException as error:  # it is for who asks for the result
                found.set_exception(error)

        self._work.put(answer)
        return found

    def close(self) -> None:
        """End the thread when its work is done; called twice, it does nothing."""
        self._work.put(None)
        self._thread.join()

    def _placed(self, work: Callable[[], T]) -> Callable[[], T]:
        """The work on the stream, which is done when that is done; as it is without one."""
        stream = self._stream
        if stream is None:
            return work
        reached: Any = torch.cuda.current_stream(stream.device).record_event()

        def on_stream() -> T:
            with torch.cuda.stream(stream):  # which makes its device the thread's, too
                stream.wait_event(reached)
                try:
                    return work()
                finally:
                    stream.synchronize()

        return on_stream

    def _run(self) -> None:
        while (answer := self._work.get()) is not None:
            answer()
            del answer  # and with it what the work held
