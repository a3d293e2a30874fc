"""The plan of a run: which samples each step trains on, and which groups are captured when.

A pure function of (feature ids, lengths, settings): any step of any epoch can be asked for
directly, so a checkpoint stores one number, and a restart or another producer sees the same plan.
A *capture group* depends on lengths and `capture_batch` alone, because padding and batch size
change the last bits of a forward pass.

The order of an epoch:

    groups shuffled → their rows in a stream → windows of `window` steps
      → in a window: samples shuffled, sorted by length, cut into steps, steps shuffled

A step holds samples of like length (little padding), steps come in random order, and a group is
needed within one window (or two neighbours), so capture looks ahead about one window.

A permutation is the argsort of a bit generator's raw output: numpy promises that raw stream for all
versions and machines, but not `Generator.permutation`'s.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.algorithm import SampleId
from draftcore.contracts.capture import CaptureGroup
from draftcore.contracts.channel import CaptureTask, PlannedStep
from draftcore.errors import UsageError

Rows = NDArray[np.int64]


class Plan:
    """Steps and capture groups for rows 0..n-1 of a dataset.

    `lengths` are in tokens, `batch` counts samples per optimizer step over all ranks, and `window`
    counts steps. The run has `epochs` epochs, or `max_steps` steps where that is less.
    """

    def __init__(
        self,
        feature_ids: Sequence[str],
        lengths: Sequence[int],
        *,
        capture_batch: int,
        batch: int,
        seed: int,
        epochs: int = 1,
        max_steps: int | None = None,
        window: int = 128,
    ) -> None:
        assert len(feature_ids) == len(lengths)
        assert len(set(feature_ids)) == len(feature_ids)
        assert min(capture_batch, batch, epochs, window) >= 1
        assert seed >= 0
        if not feature_ids:
            raise UsageError(
                "nothing to train on: the dataset has no samples left\n"
                "  check the data path and the filters on length and loss tokens"
            )
        self.feature_ids = tuple(feature_ids)
        self.batch = batch
        self.seed = seed
        self.window = window
        self.steps_per_epoch = -(-len(feature_ids) // batch)
        steps = epochs * self.steps_per_epoch
        self.total_steps = steps if max_steps is None else min(steps, max_steps)

        self._lengths = np.asarray(lengths, dtype=np.int64)
        by_length = np.argsort(self._lengths, kind="stable")
        self._group_rows = [
            by_length[start : start + capture_batch]
            for start in range(0, len(by_length), capture_batch)
        ]
        self.groups = tuple(map(self._group, range(len(self._group_rows))))
        self._group_of = np.empty(len(feature_ids), dtype=np.int64)
        for index, rows in enumerate(self._group_rows):
            self._group_of[rows] = index

        # What the order depends on. `epochs` and `max_steps` only say where it stops: a run may
        # be resumed with more of them.
        ordering = ["draftcore-plan-1", self.feature_ids, self._lengths.tolist()]
        ordering += [capture_batch, batch, seed, window]
        self.key = hashlib.sha256(json.dumps(ordering).encode()).hexdigest()

        # Two, since the trainer may still be in one epoch while capture is in the next.
        self._epoch = functools.lru_cache(maxsize=2)(self._order_epoch)

    def step(self, index: int) -> PlannedStep:
        """Return the step with this index, counted over all epochs. Raises IndexError outside."""
        if not 0 <= index < self.total_steps:
            raise IndexError(f"step {index} is outside of a plan of {self.total_steps} steps")
        epoch, position = divmod(index, self.steps_per_epoch)
        rows = tuple(self._epoch(epoch)[position].tolist())
        samples = tuple(SampleId(self.feature_ids[row], epoch) for row in rows)
        return PlannedStep(index, epoch, samples, rows)

    def length(self, row: int) -> int:
        """Return the tokens of a row."""
        return int(self._lengths[row])

    def samples_before(self, index: int) -> int:
        """Return how many sample uses the steps before this one have."""
        epoch, position = divmod(index, self.steps_per_epoch)
        uses = epoch * len(self.feature_ids)
        return uses + sum(map(len, self._epoch(epoch)[:position])) if position else uses

    def captures(self, from_step: int) -> Iterator[CaptureTask]:
        """Yield the groups that the steps from `from_step` on need, in order of first need.

        A group comes once per epoch that needs it; whether it is still held is for others to know.
        """
        seen: set[int] = set()
        epoch = -1
        for index in range(from_step, self.total_steps):
            step = self.step(index)
            if step.epoch != epoch:
                seen.clear()
            epoch = step.epoch
            for row in step.rows:
                group = int(self._group_of[row])
                if group not in seen:
                    seen.add(group)
                    yield CaptureTask(epoch, self.groups[group])

    def _group(self, index: int) -> CaptureGroup:
        rows = self._group_rows[index]
        members = tuple(rows.tolist())
        ids = tuple(self.feature_ids[row] for row in members)
        return CaptureGroup(index, members, ids, int(self._lengths[rows].max()))

    def _order_epoch(self, epoch: int) -> list[Rows]:
        """Return the rows of each step of an epoch; depends on (seed, epoch) only."""
        bits = np.random.PCG64([self.seed, epoch])
        shuffled = [self._group_rows[group] for group in _permutation(bits, len(self._group_rows))]
        stream = np.concatenate(shuffled)
        steps: list[Rows] = []
        span = self.window * self.batch
        for start in range(0, len(stream), span):
            rows = stream[start : start + span]
            rows = rows[_permutation(bits, len(rows))]  # or like lengths would keep their order
            rows = rows[np.argsort(self._lengths[rows], kind="stable")]
            cut = [rows[at : at + self.batch] for at in range(0, len(rows), self.batch)]
            steps += [cut[at] for at in _permutation(bits, len(cut))]
        return steps


def _permutation(bits: np.random.PCG64, size: int) -> Rows:
    """Return a random order of range(size) that is the same with every numpy."""
    return np.argsort(bits.random_raw(size), kind="stable").astype(np.int64)
