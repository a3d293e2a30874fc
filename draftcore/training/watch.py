"""Signs of life between the ranks of a run, through the store that brought them together.

A rank that waits in a collective learns nothing of one that died: NCCL waits on, a frozen process
keeps its sockets open. So every rank counts up a beat of its own and watches its neighbour's; one
that fails, or finds its neighbour silent, posts that once for all. A rank whose main thread does
not come out of its wait by itself is ended from here.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

BROKEN = "the connection to it broke: it was killed, or its host is lost"
SILENT = "it gave no sign of life for {:g} s: it was killed or frozen, or its host is lost"
RESUME = "start the same command again: the run goes on from its last checkpoint"
GRACE = 5.0  # seconds for a main thread to end by itself once the run has failed


@dataclass(frozen=True)
class Failure:
    """Why the run ends: which rank failed, what it said, the exit status."""

    rank: int
    text: str
    code: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank} failed\n  " + "\n  ".join(self.text.splitlines())


class Watch(threading.Thread):
    """Beats for this rank and watches the next one; `timeout` is in seconds."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(name="draftcore-watch", daemon=True)
        self.rank, self.size, self.timeout = rank, size, timeout
        self.interval = min(0.5, timeout / 4)
        self.store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        self.ending = threading.Event()
        self.known: Failure | None = None  # once this thread has seen one
        self.mutex, self.reported = threading.Lock(), False
        self.beats = 0
        self.beat()

    def run(self) -> None:
        peer, seen, since = (self.rank + 1) % self.size, "", time.monotonic()
        while not self.ending.wait(self.interval):
            try:
                self.beat()
                now = self.beat_of(peer)
                if now != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > self.timeout:
                    self.post(f"{SILENT.format(self.timeout)}\n{RESUME}", rank=peer)
                failure = self.failure()
            except DistError as error:  # the store's host is gone, or this rank is cut off from it
                failure = Failure(0, f"the ranks' common store does not answer: {error}\n{RESUME}")
            if failure is not None:
                self.end(failure)

    def end(self, failure: Failure) -> None:
        """End this process where its main thread does not: it may wait for the rank that failed."""
        self.known = failure
        if failure.rank != self.rank:
            self.report(failure)
        if not self.ending.wait(GRACE):
            os._exit(failure.code)

    def report(self, failure: Failure) -> None:
        """Print why the run ends, once: of the ranks that did not fail one does, or all would."""
        with self.mutex:
            if self.rank == (1 if failure.rank == 0 else 0) and not self.reported:
                print(f"error: {failure}", file=sys.stderr, flush=True)
            self.reported = True

    # ------------------------------------------------------------ the store

    def beat(self) -> None:
        self.beats += 1
        self.store.set(f"beat/{self.rank}", str(self.beats))

    def beat_of(self, rank: int) -> str:
        return str(self.store.get(f"beat/{rank}").decode())

    def post(self, text: str, code: int = 1, rank: int | None = None) -> Failure:
        """Say that this rank failed, or another; returns the failure that was posted first."""
        failure = Failure(self.rank if rank is None else rank, text, code)
        return _parse(self.store.compare_set("failure", "", json.dumps(asdict(failure))))

    def failure(self) -> Failure | None:
        return _parse(self.store.get("failure")) if self.store.check(["failure"]) else None

    def culprit(self) -> Failure | None:
        """Who else failed, now that a collective broke: one that said so, or one that is silent."""
        before = {rank: self.beat_of(rank) for rank in range(self.size)}
        deadline = time.monotonic() + 3 * self.interval
        while time.monotonic() < deadline:
            if failure := self.failure():
                return failure
            time.sleep(self.interval / 4)
        gone = [r for r in before if r != self.rank and self.beat_of(r) == before[r]]
        return self.post(f"{BROKEN}\n{RESUME}", rank=gone[0]) if gone else None


def _parse(data: bytes) -> Failure:
    return Failure(**json.loads(data))
