"""Signs of life between the ranks of a run, through the store that brought them together.

A rank that waits in a collective learns nothing of one that died: NCCL waits on, a frozen process
keeps its sockets open, and what starts ranks on several machines watches each machine alone. So every
rank counts up a beat of its own and looks at the others'; one that fails, or finds another silent,
posts that once for all. A rank whose main thread does not come out of its wait is ended from here.

Beats are few, as a store in a file grows with each, until a rank has a reason to ask who is there.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from draftcore.errors import ExitStatus

SILENT = (
    "it gave no sign of life for {:g} s: it was killed or frozen, or its host is lost\n"
    "start the same command again: the run goes on from its last checkpoint"
)
SOON = 2.0  # seconds of silence of a rank whose end may have broken a collective
GRACE = 5.0  # seconds for a main thread to end by itself once the run has failed


class Failure(NamedTuple):
    """Why the run ends: which rank failed, what it said, the exit status."""

    rank: int
    text: str
    code: int = ExitStatus.FAILED


class Watch(threading.Thread):
    """Beats for this rank and looks at the others; `patience` is the silence, in s, of a dead one."""

    def __init__(self, store: Store, rank: int, size: int, patience: float) -> None:
        super().__init__(name="draftcore-watch", daemon=True)
        self.rank, self.patience, self.interval = rank, patience, min(0.5, patience / 4)
        self.store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        self.names = [f"beat/{rank}" for rank in range(size)]
        self.ending, self.known = threading.Event(), threading.Event()
        self.failure: Failure | None = None  # once it is known
        self.store.set(self.names[rank], "0")

    def run(self) -> None:
        count, beaten, patience, shortened = 0, 0.0, self.patience, False
        seen, since = [b""] * len(self.names), [0.0] * len(self.names)
        while not self.ending.wait(self.interval):
            now = time.monotonic()
            try:
                if not shortened and self.store.check(["short"]):
                    shortened, patience, since = True, min(patience, SOON), [now] * len(since)
                if shortened or now - beaten > patience / 8:
                    count, beaten = count + 1, now
                    self.store.set(self.names[self.rank], str(count))
                for rank, beat in enumerate(self.store.multi_get(self.names)):
                    if beat != seen[rank]:
                        seen[rank], since[rank] = beat, now
                    elif now - since[rank] > patience:
                        self.post(rank, SILENT.format(patience), ExitStatus.RANK_LOST)
                if self.store.check(["failure"]):
                    who, text, code = json.loads(self.store.get("failure"))
                    return self.end(Failure(int(who), str(text), int(code) or ExitStatus.FAILED))
            except (
                RuntimeError,
                ValueError,
                TypeError,
            ) as error:  # its host is gone, or it was altered
                text = f"the ranks' common store cannot be read: {error}"
                return self.end(Failure(0, text, ExitStatus.RANK_LOST))

    def shorten(self) -> None:
        """Have all ranks beat at each look from now on, so that a dead one is known soon."""
        with suppress(RuntimeError):
            self.store.set("short", "")

    def post(self, rank: int, text: str, code: int = ExitStatus.FAILED) -> None:
        """Say that a rank failed, unless the run has a failure already."""
        self.store.compare_set("failure", "", json.dumps([rank, text, code]))

    def wait_for_others(self) -> None:
        """Wait until the others know of the failure: the store may end with this process."""
        others = [f"told/{rank}" for rank in range(len(self.names)) if rank != self.rank]
        with suppress(RuntimeError):  # who is dead says nothing
            self.store.wait(others, timedelta(seconds=2 * GRACE))

    def end(self, failure: Failure) -> None:
        """Say why the run ends, and end this process where its main thread does not.

        Of the ranks that did not fail one says it, or all would.
        """
        self.failure = failure
        with suppress(RuntimeError):
            self.store.set(f"told/{self.rank}", "")
        if self.rank == (1 if failure.rank == 0 else 0):
            text = failure.text.replace("\n", "\n  ")
            print(f"error: rank {failure.rank} failed\n  {text}", file=sys.stderr, flush=True)
        self.known.set()
        if not self.ending.wait(GRACE):
            os._exit(failure.code)
