"""The observer `curves`, which every run has: metrics.png in a draft's folder, as checkpoints are made.

A thread draws, so that training goes on; a run waits for its last plots. What goes wrong in drawing is
raised when the next plot is due, and costs the run its plots alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from concurrent.futures import Future

SHORT = 5.0  # seconds: a run that takes less is not drawn, as importing matplotlib takes two
PAUSE = 30.0  # seconds between plots at least, and
TIMES = 50  # times what the last one took of the processor, and so of Python's lock


class Curves:
    """The observer. `waiting` are folders of drafts whose plots are due."""

    @hookimpl
    def describe(self) -> Sequence[Offer]:
        return [Offer("observer", "curves")]

    @hookimpl
    def run_started(self) -> None:
        from concurrent.futures import ThreadPoolExecutor  # 6 ms, of each list-plugins

        self.thread, self.waiting = ThreadPoolExecutor(1), set[Path]()
        self.drawing: Future[None] | None = None
        self.began = self.drawn = time.monotonic()
        self.pause = PAUSE

    @hookimpl
    def checkpoint_saved(self, folder: Path) -> None:
        self.waiting.add(folder.parents[1])
        if time.monotonic() - self.drawn > self.pause:
            self.draw()

    @hookimpl
    def run_finished(self) -> None:
        if time.monotonic() - self.began > SHORT:
            self.draw()
        self.thread.shutdown()
        if self.drawing is not None:
            self.drawing.result()

    def draw(self) -> None:
        """Have the thread draw what is due, once it has drawn; raises what went wrong before."""
        if self.drawing is not None and self.drawing.done():
            self.drawing.result()
        self.drawn = time.monotonic()
        self.drawing = self.thread.submit(self.draw_waiting)

    def draw_waiting(self) -> None:
        from draftcore_eval.plots import plot_metrics  # numpy, and matplotlib in this thread

        began = time.thread_time()
        while self.waiting:
            plot_metrics(self.waiting.pop())
        self.pause = max(PAUSE, TIMES * (time.thread_time() - began))


plugin = Curves()
