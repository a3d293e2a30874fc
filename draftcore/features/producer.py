"""A producer: captures the batches that the queue hands out and puts their features into the store.

Any number of them on any number of machines work on one run. A producer may die at any moment: its
claims are handed out again, and what it had not published does not count.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from draftcore.contracts.capture import (
    BadRows,
    Capture,
    CaptureBatch,
    CapturedBatch,
    StoringCapture,
)
from draftcore.contracts.channel import Json, RunEnded, Task
from draftcore.contracts.store import FeatureStore, SampleRef, StoreAway, StoreError, StoreItem
from draftcore.data.plan import PlannedBatch
from draftcore.data.samples import Samples, batch_of
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError, UsageError
from draftcore.features.queue import TTL, RemoteQueue
from draftcore.plugins.binding import type_error
from draftcore.tensors import all_finite

T = TypeVar("T")
WAIT = 5.0  # seconds that one request for a task may take
AWAY = 0.5  # seconds between two attempts to reach a store that is away
AUTHORS = "tell its authors of this"
SHORT = "a short capture comes from chunked prefill or a prefix cache"
TEXT = ("token_ids", "loss_mask")  # stored beside the features, so that a store is all one needs


def produce(
    queue: RemoteQueue,
    prepare: Callable[[Json], tuple[Capture, str]],
    open_store: Callable[[str], FeatureStore],
    stop: Callable[[], bool],
    patience: float,
) -> tuple[str, str]:
    """Capture until the run ends or `stop` says so; returns `finished` or `interrupted`, and a line.

    `prepare` opens the capture by what the queue is about, and says the provenance of its features.
    Raises UsageError where the capture cannot work at all: the trainer is told, and goes on with others.
    """
    captured, store, capture, ending = 0, None, None, threading.Event()

    def beat() -> None:
        while not ending.wait(TTL / 4):
            with suppress(DraftcoreError):
                queue.heartbeat()

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        capture, provenance = prepare(queue.about())
        while not stop():
            try:
                tasks, uri = queue.claim(1, WAIT)
            except RunEnded as ended:
                if ended.state != "failed":
                    raise
                time.sleep(AWAY)  # the same command may go on, with another trainer
                continue
            for task in tasks:
                if store is None or store.uri != uri:  # also of a trainer that began again
                    if store is not None:
                        store.close()
                    store = patiently(functools.partial(open_store, uri), patience)
                found = _outcome(task, capture, store, provenance, patience)
                if isinstance(found, (UsageError, StoreAway)):
                    raise found  # the batch is not at fault
                taken = queue.publish(task.claim, found)
                if not isinstance(found, (DraftcoreError, Sequence)):
                    raise found  # memory or a device may do better in a process begun anew
                captured += len(found) if taken and isinstance(found, Sequence) else 0
        queue.leave()
        return "interrupted", f"interrupted; {captured} samples captured here"
    except RunEnded as ended:
        return ended.state, f"{ended}; {captured} samples captured here"
    except Exception as error:
        with suppress(DraftcoreError):
            queue.leave(str(error) or repr(error))
        raise
    finally:
        ending.set()
        for opened in (store, capture):
            if opened is not None:
                opened.close()


def fill(
    batches: Iterable[PlannedBatch],
    capture: Capture,
    store: FeatureStore,
    provenance: str,
    samples: Samples,
    skipped: Skipped,
) -> Iterator[None]:
    """Capture batches into a store, one at each turn of the iterator. Bad rows are skipped."""
    for planned in batches:
        while (batch := batch_of(planned, samples, samples.feature_ids, skipped)).rows:
            masks = [samples.loss_mask(row).tolist() for row in batch.rows]
            try:
                put_batch(batch, masks, capture, store, provenance)
                break
            except BadRows as error:
                skipped.add({batch.rows[at]: why for at, why in error.reasons.items()})
        yield


def put_batch(
    batch: CaptureBatch,
    loss_masks: Sequence[Sequence[bool]],
    capture: Capture,
    store: FeatureStore,
    provenance: str,
) -> tuple[SampleRef, ...]:
    """Capture a batch and put it, each row with its token ids and loss mask.

    Raises BadRows for features that are not finite.
    """
    text: list[dict[str, Tensor]] = []
    for ids, mask in zip(batch.token_ids, loss_masks, strict=True):
        token_ids, loss_mask = torch.as_tensor(ids, dtype=torch.long), torch.as_tensor(mask)
        text.append({"token_ids": token_ids, "loss_mask": loss_mask.to(torch.bool)})
    storing = getattr(capture, "capture", capture)
    if isinstance(storing, StoringCapture) and storing.reaches(store):
        return storing.deliver(batch, text, provenance, store)
    (captured,) = capture.features([batch])
    require_finite(captured)
    rows = zip(batch.ids, captured.features, text, strict=True)
    return store.put_many(
        [StoreItem(one, {**own, **t}, len(t["token_ids"]), provenance) for one, own, t in rows]
    )


class CheckedCapture:
    """The capture of a plugin, `who`, of which each batch is compared with what was asked for.

    `forms` are the size and dtype of a token's features, by name. Raises BadRows for rows of
    another form, DraftcoreError for other rows or batches.
    """

    def __init__(self, capture: Capture, who: str, forms: Mapping[str, tuple[int, str]]) -> None:
        self.capture, self.who, self.forms, self.close = capture, who, forms, capture.close

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        asked, said = list(batches), f"the capture of {self.who} yielded"
        for batch, captured in itertools.zip_longest(asked, self.capture.features(asked)):
            fits = batch and not type_error(captured, CapturedBatch) and captured.batch == batch
            if not fits or len(captured.features) != len(batch.ids):
                raise DraftcoreError(
                    f"{said} other batches or rows than were asked for\n  {AUTHORS}"
                )
            bad: dict[int, str] = {}
            rows = zip(batch.ids, batch.token_ids, captured.features, strict=True)
            for at, (one, ids, row) in enumerate(rows):
                found = {name: (*value.shape, str(value.dtype)) for name, value in row.items()}
                for name, (size, dtype) in self.forms.items():
                    if found.get(name) != (form := (len(ids), size, f"torch.{dtype}")):
                        what = f"{name!r} of {found.get(name)}, not {form}, for sample {one}"
                        bad[at] = f"{said} {what}\n  {AUTHORS}; {SHORT}"
            if bad:
                raise BadRows(bad)
            yield captured


def require_finite(captured: CapturedBatch) -> None:
    """Raise BadRows for rows of which a feature holds inf or nan; waits for the device."""
    if all_finite([value for features in captured.features for value in features.values()]):
        return
    reasons = {}
    for at, features in enumerate(captured.features):
        for name, value_TH in features.items():
            if not bool(value_TH.isfinite().all()):
                reasons[at] = (
                    f"feature {name!r} of dataset row {captured.batch.rows[at]} (sample "
                    f"{captured.batch.ids[at]}) holds inf or nan in {value_TH.dtype}\n"
                    "  capture in a wider type (capture.dtype=float32), or leave the row out"
                )
    raise BadRows(reasons)


def _outcome(
    task: Task, capture: Capture, store: FeatureStore, provenance: str, patience: float
) -> tuple[SampleRef, ...] | Exception:
    """Return a task's refs, or why there are none."""

    def put() -> tuple[SampleRef, ...]:
        if (held := held_refs(store, task.batch.ids, provenance)) is not None:
            try:
                for handle in store.get_many(held):  # the trainer may have found them torn
                    handle.close()
                return held
            except StoreAway:
                raise
            except StoreError:
                forget(store, task.batch.ids)
        return put_batch(task.batch, task.loss_masks, capture, store, provenance)

    try:
        return patiently(put, patience)
    except Exception as error:
        return error


def held_refs(
    store: FeatureStore, ids: Sequence[str], provenance: str
) -> tuple[SampleRef, ...] | None:
    """Return the refs of these ids if the store holds all of them, captured the same way."""
    try:
        held = store.lookup(ids)
    except StoreAway:
        raise
    except StoreError:  # torn or altered: as if it was not there
        forget(store, ids)
        return None
    refs = tuple(held[one] for one in ids if one in held and held[one].provenance == provenance)
    return refs if len(refs) == len(ids) else None


def forget(store: FeatureStore, ids: Sequence[str]) -> None:
    """Free all that a store holds of these rows, readable or not."""
    try:
        store.free(store.lookup(ids).values())
    except StoreAway:
        raise
    except StoreError:
        for one in ids:
            store.abort(one)


def patiently(attempt: Callable[[], T], patience: float) -> T:
    """Return what an attempt returns, which is repeated while the store is away."""
    began = time.monotonic()
    while True:
        try:
            return attempt()
        except StoreAway:
            if time.monotonic() - began > patience:
                raise
            time.sleep(AWAY)
