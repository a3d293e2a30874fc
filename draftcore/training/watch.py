"""Signs of life between the ranks of a run, through the store that brought them together.

A rank that waits in a collective learns nothing of one that died: NCCL waits on, a frozen process
keeps its sockets open, and what starts ranks on several machines watches each machine alone. So every
rank counts up a beat of its own and looks at the others'; one that fails, or finds another silent,
posts that once for all. A rank whose main thread does not come out of its wait is ended from here.
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

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

SILENT = (
    "it gave no sign of life for {:g} s: it was killed or frozen, or its host is lost\n"
    "start the same command again: the run goes on from its last checkpoint"
)
GRACE = 5.0  # seconds for a main thread to end by itself once the run has failed


class Failure(NamedTuple):
    """Why the run ends: which rank failed, what it said, the exit status."""

    rank: int
    text: str
    code: int = 1


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
        count, seen, since = 0, [b""] * len(self.names), [0.0] * len(self.names)
        while not self.ending.wait(self.interval):
            count += 1
            try:
                self.store.set(self.names[self.rank], str(count))
                now = time.monotonic()
                for rank, beat in enumerate(self.store.multi_get(self.names)):
                    if beat != seen[rank]:
                        seen[rank], since[rank] = beat, now
                    elif now - since[rank] > self.patience:
                        self.post(rank, SILENT.format(self.patience))
                if self.store.check(["failure"]):
                    return self.end(Failure(*json.loads(self.store.get("failure"))))
            except DistError as error:  # the store's host is gone, or this rank is cut off from it
                return self.end(Failure(0, f"the ranks' common store does not answer: {error}"))

    def post(self, rank: int, text: str, code: int = 1) -> None:
        """Say that a rank failed, unless the run has a failure already."""
        self.store.compare_set("failure", "", json.dumps([rank, text, code]))

    def wait_for_others(self) -> None:
        """Wait until the others know of the failure: the store may end with this process."""
        others = [f"told/{rank}" for rank in range(len(self.names)) if rank != self.rank]
        with suppress(DistError):  # who is dead says nothing
            self.store.wait(others, timedelta(seconds=2 * GRACE))

    def end(self, failure: Failure) -> None:
        """Say why the run ends, and end this process where its main thread does not.

        Of the ranks that did not fail one says it, or all would.
        """
        self.failure = failure
        with suppress(DistError):
            self.store.set(f"told/{self.rank}", "")
        if self.rank == (1 if failure.rank == 0 else 0):
            text = failure.text.replace("\n", "\n  ")
            print(f"error: rank {failure.rank} failed\n  {text}", file=sys.stderr, flush=True)
        self.known.set()
        if not self.ending.wait(GRACE):
            os._exit(failure.code)
