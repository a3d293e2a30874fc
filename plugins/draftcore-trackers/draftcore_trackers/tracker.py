"""What trackers have in common: an observer that sends what a run tells, by a thread of its own.

So neither a network nor a disk holds up training. What goes wrong there is raised by the next hook, and
the core says so once and goes on without the observer.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, ClassVar

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.files import read_sealed, regular

PROJECT = "draftcore"  # where the environment names no project, or experiment
PATIENCE = 120.0  # seconds in which a tracker may still send at a run's end


class Tracker(ABC):
    """An observer. What its library does is done by the methods below the hooks, on its thread.

    `steps` has by draft the last step that metrics.jsonl had at the start; what is tracked of steps up to
    `known` is there from an earlier start, and is not sent again.
    """

    name: ClassVar[str]
    module: ClassVar[str]  # of the library
    steps: Mapping[str, int]

    def __init__(self) -> None:
        self.thread: Thread | None = None  # none outside of training

    # ------------------------------------------------------------ hooks

    @hookimpl
    def describe(self) -> Sequence[Offer]:
        install = f"pip install 'draftcore-trackers[{self.name}]'"
        return [Offer("observer", self.name, needs={self.module: install})]

    @hookimpl
    def run_started(self, run: Path, config: Mapping[str, Any]) -> None:
        self.steps = {draft: last_step(run / draft) for draft in config.get("drafts") or [""]}
        self.every = config["train"].get("log_every", 1)
        self.step, self.known = 0, -1
        self.calls, self.error = SimpleQueue[Callable[[], None] | None](), list[BaseException]()
        self.thread = Thread(target=self.work, daemon=True)  # which no process waits for
        self.thread.start()
        file = run / "run.json"
        run_id = read_sealed(file)["run_id"] if file.exists() else run.name
        self.send(self.open, run.resolve(), run_id, config)

    @hookimpl
    def step_finished(self, step: int, metrics: Mapping[str, float], draft: str) -> None:
        self.step = max(self.step, step)
        if step % self.every == 0 or step == 1:
            self.send_figures("train", step, metrics, draft)

    @hookimpl
    def evaluated(self, step: int, report: Mapping[str, Any], draft: str) -> None:
        self.send_figures("eval", step, report, draft)

    @hookimpl
    def checkpoint_saved(self, step: int, draft: str) -> None:
        """Tell the newest durable checkpoint's step: by now training is some steps further."""
        self.send_figures("", self.step, {"checkpoint": step}, draft)

    @hookimpl(trylast=True)  # once the plots are drawn
    def run_finished(self, run: Path, reason: str) -> None:
        for draft in self.steps:
            if (file := run / draft / "metrics.png").is_file():
                self.send(self.picture, file, draft)
        self.send(self.close, reason)
        self.calls.put(None)
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.join(PATIENCE)
            if thread.is_alive():
                raise TimeoutError(f"what was told last was not sent in {PATIENCE:.0f} s")
        self.raise_error()

    # ------------------------------------------------------------ the thread

    def send_figures(self, kind: str, step: int, figures: Mapping[str, Any], draft: str) -> None:
        """Have those figures sent that are numbers, under the names KIND/NAME."""
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        good = {
            f"{kind}/{name}".lstrip("/"): float(n)
            for name, n in numbers.items()
            if math.isfinite(n)
        }
        if self.thread is not None and good:
            self.send(self.log, step, good, draft)

    def send(self, call: Callable[..., None], *arguments: Any) -> None:
        self.raise_error()
        self.calls.put(partial(call, *arguments))

    def raise_error(self) -> None:
        if self.error:
            raise self.error.pop()

    def work(self) -> None:
        try:
            while (call := self.calls.get()) is not None:
                call()
        except BaseException as error:
            self.error.append(error)

    # ------------------------------------------------------------ of each library

    @abstractmethod
    def open(self, run: Path, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin the tracked run of a folder, or go on in that of the same id."""

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float], draft: str) -> None:
        """Send figures of a step."""

    @abstractmethod
    def picture(self, file: Path, draft: str) -> None:
        """Send a draft's plot."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """End the tracked run, when all is sent."""


class RunTracker(Tracker):
    """A tracker whose library hands out a run, `tracked`, and makes of a file what `picture_of` is."""

    tracked: Any
    picture_of: Callable[[str], Any]

    def log(self, step: int, figures: Mapping[str, Any], draft: str) -> None:
        if step > self.known:
            self.tracked.log(labelled(figures, draft), step=step)

    def picture(self, file: Path, draft: str) -> None:
        self.log(self.step, {"curves": self.picture_of(str(file))}, draft)


def labelled(figures: Mapping[str, float], draft: str) -> dict[str, float]:
    """Return figures by names that begin with the draft's label, where there are several."""
    return {f"{draft}/{name}".lstrip("/"): value for name, value in figures.items()}


def last_step(folder: Path) -> int:
    """Return the last step of a draft's metrics.jsonl; 0 at its beginning."""
    file = folder / "metrics.jsonl"
    lines = regular(file).read_text().splitlines() if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0
