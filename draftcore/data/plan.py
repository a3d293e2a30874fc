"""The plan of a run: which rows make a batch, and which batches each step trains on.

A pure function of (rows, lengths, settings): any step of any epoch can be asked for directly, so a
checkpoint stores one number, and a restart or another rank sees the same plan.

The *cut* makes batches once: rows shuffled by the dataset's fingerprint, sorted by length within
windows, cut after `batch` rows, or before a batch would have more than `batch_tokens` tokens. It depends
on the dataset and these two alone, because padding and batch size change the last bits of a forward
pass. The *order* of an epoch:

    batches shuffled by the seed -> sorted by padded tokens within windows of 64 steps
      -> cut into steps -> steps shuffled

so a step's batches are of like length, and ranks that share a step finish together.

A permutation is the argsort of a bit generator's raw output: numpy promises that raw stream for all
versions and machines, but not `Generator.permutation`'s.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.run import PlannedBatch

Indices = NDArray[np.int64]
VERSION = 2
CUT_WINDOW = 512  # batches whose rows are sorted by length together
STEP_WINDOW = 64  # steps whose batches are sorted by padded tokens together


class Plan:
    """Batches and steps for rows 0..n-1 of a dataset.

    `lengths` are in tokens. A batch has `batch` rows, fewer where these would have more than `batch_tokens`
    tokens with padding, and one at least; a step has `accumulate` batches. The run has `epochs` epochs, or
    `max_steps` steps where that is less. `tokens` are those of each batch, padded.
    """

    def __init__(
        self, feature_ids: Sequence[str], lengths: Sequence[int], *, batch: int, accumulate: int,
        seed: int, epochs: int = 1, max_steps: int | None = None, batch_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.feature_ids, self.lengths = tuple(feature_ids), np.asarray(lengths, dtype=np.int64)
        self.batch, self.batch_tokens = batch, batch_tokens
        self.accumulate, self.seed = accumulate, seed
        rows = ["draftcore-plan", VERSION, self.feature_ids, self.lengths.tolist(), batch]
        rows += [batch_tokens] if batch_tokens else []
        self.cut = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        # What the order depends on. `epochs` and `max_steps` only say where it stops.
        self.key = hashlib.sha256(f"{self.cut} {accumulate} {seed}".encode()).hexdigest()
        self.batches = self._cut_rows(batch_tokens or 10**18)
        self.steps_per_epoch = -(-len(self.batches) // accumulate)
        steps = epochs * self.steps_per_epoch
        self.total_steps = steps if max_steps is None else min(steps, max_steps)
        self.tokens = np.array([len(rows) * self.padded(rows) for rows in self.batches])
        # Two, since loaders may be in the next epoch while a step of this one is trained on.
        self._epoch = functools.lru_cache(maxsize=2)(self._order_epoch)

    def step(self, index: int) -> tuple[PlannedBatch, ...]:
        """Return the batches of a step, counted over all epochs. Raises IndexError outside."""
        if not 0 <= index < self.total_steps:
            raise IndexError(f"step {index} is outside of a plan of {self.total_steps} steps")
        epoch, at = divmod(index, self.steps_per_epoch)
        first = epoch * len(self.batches) + at * self.accumulate
        return tuple(
            PlannedBatch(first + place, index, place, epoch + 1, int(chosen), self.batches[chosen])
            for place, chosen in enumerate(self._epoch(epoch)[at])
        )

    def uses(self, from_step: int, rank: int = 0, ranks: int = 1) -> Iterator[PlannedBatch]:
        """Yield the batches that a rank trains on from a step to the end of the run, in order."""
        for index in range(from_step, self.total_steps):
            yield from self.step(index)[rank::ranks]

    def rows_before(self, index: int) -> int:
        """Return how many uses of rows the steps before this one have."""
        epoch, at = divmod(index, self.steps_per_epoch)
        steps = self._epoch(epoch)[:at]
        return epoch * len(self.feature_ids) + sum(len(self.batches[i]) for s in steps for i in s)

    def padded(self, rows: Sequence[int]) -> int:
        """Return the tokens of the longest of these rows."""
        return int(self.lengths[list(rows)].max())

    def largest(self, count: int) -> int:
        """Return the tokens of the `count` largest batches together, without padding."""
        sizes = sorted(int(self.lengths[list(rows)].sum()) for rows in self.batches)
        return sum(sizes[-count:])

    def _cut_rows(self, most: int) -> tuple[tuple[int, ...], ...]:
        """Cut rows into batches of `most` tokens at most, with padding; a longer row has one of its own."""
        count, batches = len(self.lengths), list[list[int]]()
        shuffled = _permutation(np.random.PCG64(int(self.cut[:16], 16)), count)
        by = self.lengths * count + np.arange(count)  # rows of one length: in their own order
        for some in _sorted(shuffled, by, CUT_WINDOW * self.batch):
            batches.append([])
            for row, longest in zip(some.tolist(), self.lengths[some].tolist(), strict=True):
                size = len(batches[-1])
                if size == self.batch or (size and (size + 1) * longest > most):
                    batches.append([])
                batches[-1].append(row)
        return tuple(map(tuple, batches))

    def _order_epoch(self, epoch: int) -> list[Indices]:
        """Return the batches of each step of an epoch; depends on (seed, epoch) only."""
        bits = np.random.PCG64([self.seed, epoch])
        shuffled = _permutation(bits, len(self.batches))
        size, steps = self.accumulate, list[Indices]()
        for some in _sorted(shuffled, self.tokens, STEP_WINDOW * size):
            steps += [some[at : at + size] for at in range(0, len(some), size)]
        whole = len(self.batches) // size  # a shorter step stays last in the epoch
        return [steps[at] for at in _permutation(bits, whole)] + steps[whole:]


def _sorted(shuffled: Indices, by: Indices, window: int) -> Iterator[Indices]:
    """Yield one window of `shuffled` after the other, each sorted by what `by` says of its items."""
    for start in range(0, len(shuffled), window):
        some = shuffled[start : start + window]
        yield some[np.argsort(by[some], kind="stable")]


def _permutation(bits: np.random.PCG64, size: int) -> Indices:
    """Return a random order of range(size) that is the same with every numpy."""
    return np.argsort(bits.random_raw(size), kind="stable").astype(np.int64)
