"""Batches that producers capture: what they are asked for, and how a rank reads what they put."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.channel import RunEnded, Task
from draftcore.contracts.store import FeatureStore, StoreAway, StoreError
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.samples import Samples, batch_of
from draftcore.features.loader import Loaded, open_refs
from draftcore.features.queue import STORE_RETRY, Queue, RemoteQueue


def tasks_of(
    uses: Iterator[PlannedBatch], samples: Samples, plan: Plan, token_bytes: int
) -> Iterator[Task]:
    """Yield what producers are asked for, in the plan's order."""
    for planned in uses:
        batch = batch_of(planned, samples, plan.feature_ids, {})
        masks: tuple[Any, ...] = tuple(samples.loss_mask(row) for row in batch.rows)
        lengths: NDArray[np.int64] = plan.lengths[list(batch.rows)]
        yield Task(planned.position, batch, masks, int(lengths.sum()) * token_bytes)


def queued(
    uses: Iterator[PlannedBatch],
    queue: Queue | RemoteQueue,
    store: FeatureStore,
    plan: Plan,
    names: Sequence[str],
    patience: float,
) -> Iterator[Loaded | None]:
    """Yield batches in the plan's order, and None about each second that one is waited for.

    A batch that cannot be read is freed and captured again. Raises StoreAway where the store stays
    away for longer than `patience`.
    """
    released = deque[int]()  # positions whose batches were closed, of which the queue hears
    for planned in uses:
        away_since = 0.0
        loaded: Loaded | None = None
        while loaded is None:
            positions = [released.popleft() for _ in range(len(released))]
            try:
                refs = queue.receive(planned.position, 1.0, positions)
            except RunEnded:
                return
            try:
                if refs is None:
                    # Is the store away? Producers wait for it as well, and publish nothing.
                    store.lookup([plan.feature_ids[row] for row in planned.rows])
                else:
                    loaded = open_refs(planned, refs, store, names, released.append)
                away_since = 0.0
            except StoreAway:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > patience:
                    raise
                time.sleep(STORE_RETRY)
            except StoreError as error:
                with suppress(StoreError):
                    store.free(refs or ())  # or a producer would publish it again
                queue.reject(planned.position, str(error))
            yield loaded


def forget(store: FeatureStore, ids: Sequence[str]) -> None:
    """Free all that a store holds of these rows, readable or not."""
    try:
        store.free(store.lookup(ids).values())
    except StoreAway:
        raise
    except StoreError:
        for feature_id in ids:
            store.abort(feature_id)
