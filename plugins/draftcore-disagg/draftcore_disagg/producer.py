"""A producer: captures the batches that the queue hands out and puts their features into the store.

Any number of them on any number of machines work on one run. A producer may die at any moment: its
claims are handed out again, and what it had not published does not count.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from draftcore.contracts.run import OpenCapture, RunEnded
from draftcore.contracts.store import FeatureStore, SampleRef, StoreAway, StoreError
from draftcore.errors import DraftcoreError, UsageError
from draftcore_disagg.channel import Json, Task
from draftcore_disagg.queue import STORE_RETRY, TTL, RemoteQueue

T = TypeVar("T")
CLAIM_WAIT = 5.0  # seconds that one request for a task may take


def produce(
    queue: RemoteQueue,
    prepare: Callable[[Json], tuple[OpenCapture, str]],
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
                tasks, uri = queue.claim(1, CLAIM_WAIT)
            except RunEnded as ended:
                if ended.state != "failed":
                    raise
                time.sleep(STORE_RETRY)  # the same command may go on, with another trainer
                continue
            for task in tasks:
                if store is None or store.uri != uri:  # also of a trainer that began again
                    if store is not None:
                        store.close()
                    store = patiently(functools.partial(open_store, uri), patience)
                outcome = _outcome(task, capture, store, provenance, patience)
                if isinstance(outcome, (UsageError, StoreAway)):
                    raise outcome  # the batch is not at fault
                accepted = queue.publish(task.claim, outcome)
                if not isinstance(outcome, (DraftcoreError, Sequence)):
                    raise outcome  # memory or a device may do better in a process begun anew
                captured += len(outcome) if accepted and isinstance(outcome, Sequence) else 0
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


def _outcome(
    task: Task, capture: OpenCapture, store: FeatureStore, provenance: str, patience: float
) -> tuple[SampleRef, ...] | Exception:
    """Return a task's refs, or why there are none."""

    def put() -> tuple[SampleRef, ...]:
        """Put the task's batch, unless the store holds all of it, captured in the same way."""
        try:
            stored = store.lookup(task.batch.ids)
        except StoreAway:
            raise
        except StoreError:  # torn or altered: as if it was not there
            stored = {}
        refs = tuple(ref for ref in map(stored.get, task.batch.ids) if ref is not None)
        if len(refs) == len(task.batch.ids) and {ref.provenance for ref in refs} == {provenance}:
            return refs
        return capture.put(task.batch, task.loss_masks, store, provenance)

    try:
        return patiently(put, patience)
    except Exception as error:
        return error


def patiently(attempt: Callable[[], T], patience: float) -> T:
    """Return what an attempt returns, which is repeated while the store is away."""
    began = time.monotonic()
    while True:
        try:
            return attempt()
        except StoreAway:
            if time.monotonic() - began > patience:
                raise
            time.sleep(STORE_RETRY)
