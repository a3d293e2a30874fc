"""What the graph runners of both phases share: capture at first use, replay, capture anew.

A runner owns its backend and the static buffers. All its buckets are captured in one session when
the first batch comes, the largest first, so that they share the memory of the first. A graph reads
weights where they lay: weights that are updated in place replay as they are now, and where one has
moved everything is captured anew. A bucket that is not there runs as it is, and is counted.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draftcore.contracts.runner import GraphBackend, GraphPlugin, Outputs, ShapeKey, Work
from draftcore_graphs.buckets import largest_first, pad_to
from draftcore_graphs.buffers import StaticBuffers
from draftcore_graphs.resolve import Phase


@dataclass
class Tally:
    """How often a runner captured, and what became of its batches: `replayed`, or why not."""

    captures: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class GraphRunner(ABC):
    """The base of the runners of the two phases; a subclass says what is done for a bucket."""

    def __init__(self, phase: Phase, backend: GraphBackend, plugins: Sequence[GraphPlugin]) -> None:
        self.phase, self.backend, self.plugins = phase, backend, plugins
        self.captured: set[ShapeKey] = set()
        self.tally = Tally()
        self._addresses: tuple[int, ...] = ()
        self.buffers: StaticBuffers

    @abstractmethod
    def work(self, key: ShapeKey) -> Work:
        """The function of a bucket. It reads and writes static buffers only."""

    @abstractmethod
    def weights(self) -> Iterable[Tensor]:
        """Every parameter and buffer that the graphs read."""

    @abstractmethod
    def before_capture(self, key: ShapeKey) -> None:
        """Put something that can be computed with into the static buffers of a bucket."""

    @property
    def captures(self) -> int:
        return self.tally.captures

    @property
    def counts(self) -> Counter[str]:
        return self.tally.counts

    def rows(self, rows: int) -> int | None:
        """The bucket that holds so many rows."""
        return pad_to(rows, self.phase.rows, padding=self.phase.padding)

    def ready(self, keys: Iterable[ShapeKey]) -> None:
        """Capture these buckets, unless they are; all anew where weights have moved."""
        addresses = tuple(tensor.data_ptr() for tensor in self.weights())
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses
        if todo := largest_first(set(keys) - self.captured):
            self._capture(todo)

    def run(self, key: ShapeKey, live: Mapping[str, Tensor]) -> Outputs:
        """Fill the bucket's buffers and do its work; the outputs may alias those of the next call."""
        with self.backend.replay_session():
            batch = self.buffers.fill(key, live)
            if key not in self.captured or not self.backend.can_run(batch, key):
                self.tally.counts["not captured" if key not in self.captured else "refused"] += 1
                return self.work(key)(batch)
            for plugin in self.plugins:
                plugin.on_replay(key, batch)
            self.tally.counts["replayed"] += 1
            return self.backend.replay(key)

    def forget(self) -> None:
        """Drop all graphs; the next use captures them again."""
        if self.captured:
            self.backend.cleanup()
        self.captured.clear()

    def _capture(self, keys: Sequence[ShapeKey]) -> None:
        try:
            with self.backend.capture_session():
                for key in keys:
                    self.before_capture(key)
                    work, batch = self.work(key), self.buffers.view(key)
                    for plugin in self.plugins:
                        work = plugin.on_capture(key, batch, work)
                    self.backend.capture_one(key, functools.partial(work, batch))
                    self.captured.add(key)
                    self.tally.captures += 1
        except BaseException:
            self.backend.cleanup()
            self.captured.clear()
            raise
