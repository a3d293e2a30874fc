"""What the graph runners of both phases share: when they capture, replay and capture anew.

A runner owns its backend and the static buffers. It captures all its buckets in one session when the
first batch comes, the largest first, so that the others share the memory of the first. A graph reads
weights at the addresses that they had: weights that are updated in place replay as they are now, and
where one has moved, all buckets are captured anew. What cannot be replayed runs eagerly and is counted.
So does a bucket that memory does not hold, unless the user chose the buckets: then that is an error.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftcore.contracts.runner import GraphBackend, Outputs, ShapeKey
from draftcore.errors import DraftcoreError
from draftcore_graphs.buckets import largest_first, pad_to
from draftcore_graphs.buffers import StaticBuffers
from draftcore_graphs.graph_plugin import GraphPlugin, Work
from draftcore_graphs.resolve import Phase


@dataclass
class Tally:
    """Counts what a runner captured, and its calls: `replayed`, or why they were not."""

    captures: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class GraphRunner(ABC):
    """Captures and replays buckets; a subclass says what is done for one, and on which buffers."""

    def __init__(self, phase: Phase, backend: GraphBackend, plugins: Sequence[GraphPlugin]) -> None:
        self.phase, self.backend, self.plugins = phase, backend, plugins
        self.captured, self.too_large = set[ShapeKey](), set[ShapeKey]()
        self.tally = Tally()
        self.counts = self.tally.counts
        self._addresses: tuple[int, ...] = ()
        self.buffers: StaticBuffers

    @abstractmethod
    def work(self, key: ShapeKey) -> Work:
        """Return the function of a bucket. It reads and writes static buffers only."""

    @abstractmethod
    def weights(self) -> Iterable[Tensor]:
        """Return every parameter and buffer that the graphs read."""

    @abstractmethod
    def before_capture(self, key: ShapeKey) -> None:
        """Fill the static buffers of a bucket with values that its work can run on."""

    @property
    def captures(self) -> int:
        return self.tally.captures

    def rows(self, rows: int) -> int | None:
        """Return the bucket that holds so many rows, None where none does."""
        return pad_to(rows, self.phase.rows, padding=self.phase.padding)

    def ready(self, keys: Iterable[ShapeKey]) -> None:
        """Capture those of these buckets that are not captured; all of them if weights moved."""
        addresses = tuple(tensor.data_ptr() for tensor in self.weights())
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses
        if todo := largest_first(set(keys) - self.captured - self.too_large):
            self._capture(todo)

    def run(self, key: ShapeKey, live: Mapping[str, Tensor]) -> Outputs:
        """Fill the bucket's buffers and do its work; the next call may overwrite the outputs."""
        with self.backend.replay_session():
            batch = self.buffers.fill(key, live)
            if key not in self.captured or not self.backend.can_run(batch, key):
                why = "out of memory" if key in self.too_large else "not captured"
                self.counts[why if key not in self.captured else "refused"] += 1
                return self.work(key)(batch)
            for plugin in self.plugins:
                plugin.on_replay(key, batch)
            self.counts["replayed"] += 1
            return self.backend.replay(key)

    def forget(self) -> None:
        """Drop all graphs; the next use captures them again."""
        if self.captured:
            self.backend.cleanup()
        self.captured.clear()
        self.too_large.clear()

    def no_memory(self, what: str, error: torch.OutOfMemoryError) -> DraftcoreError:
        """Return the error for what a device has no room for: what was asked, what is free."""
        said, key = re.split(r"(?<=is free\.) ", str(error))[0], f"runner.{self.phase.name}"
        return DraftcoreError(
            f"{key}: no memory for {what}: {said}\n"
            f"  lower {key}.options.max_bs (it is {self.phase.rows[-1]}) or the largest of "
            f"{key}.options.lengths (it is {self.phase.lengths[-1]}), or set {key}.name=eager"
        )

    def _capture(self, keys: Sequence[ShapeKey]) -> None:
        try:
            with self.backend.capture_session():
                for key in keys:
                    try:
                        self._capture_one(key)
                    except torch.OutOfMemoryError as error:
                        if "you" in map(self.phase.decided.get, ("rows", "lengths", "max_bs")):
                            what = f"a graph of {key.rows} rows x {key.length}"
                            raise self.no_memory(what, error) from None
                        self.too_large.add(key)
        except BaseException:
            self.backend.cleanup()
            self.captured.clear()
            raise

    def _capture_one(self, key: ShapeKey) -> None:
        self.before_capture(key)
        work, batch = self.work(key), self.buffers.view(key)
        for plugin in self.plugins:
            work = plugin.on_capture(key, batch, work)
        self.backend.capture_one(key, functools.partial(work, batch))
        self.captured.add(key)
        self.tally.captures += 1
