"""A producer: captures the batches that the queue hands out and puts their features into the store.

A thread puts a batch while the next one is captured: at 8B shapes a put takes a third of a capture's time.
Any number of them on any number of machines work on one run. A producer may die at any moment: its
claims are handed out again, and what it had not published does not count.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    thread = ThreadPoolExecutor(1, "put")
    putting: dict[str, Future[int]] = {}  # by claim, one at most

    def beat() -> None:
        while not ending.wait(TTL / 4):
            with suppress(DraftcoreError):
                queue.heartbeat()

    def outcome_of(attempt: Callable[[], T]) -> T | Exception:
        """Return what an attempt returns or raises; it is repeated while the store is away."""
        began = time.monotonic()
        while True:
            try:
                return attempt()
            except StoreAway as error:
                if time.monotonic() - began > patience or ending.wait(STORE_RETRY):
                    return error
            except Exception as error:
                return error

    def publish(task: Task, outcome: Sequence[SampleRef] | Exception) -> int:
        """Say what became of a task; returns how many samples count."""
        if isinstance(outcome, (UsageError, StoreAway)):
            raise outcome  # the batch is not at fault
        accepted = queue.publish(task.claim, outcome)
        if not isinstance(outcome, (DraftcoreError, Sequence)):
            raise outcome  # memory or a device may do better in a process begun anew
        return len(outcome) if accepted and isinstance(outcome, Sequence) else 0

    def finish(task: Task, put: Callable[[], tuple[SampleRef, ...]]) -> int:
        return publish(task, outcome_of(put))

    def settle() -> int:
        """Wait for the batch that is put; returns how many samples count."""
        return sum(putting.pop(claim).result() for claim in list(putting))

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        capture, provenance = prepare(queue.about())
        while not stop():
            try:
                # A request that waits would keep the thread from publishing.
                tasks, uri = queue.claim(1, 0 if putting else CLAIM_WAIT, list(putting))
            except RunEnded as ended:
                captured += settle()
                if ended.state != "failed":
                    raise
                time.sleep(STORE_RETRY)  # the same command may go on, with another trainer
                continue
            if not tasks or store is None or store.uri != uri:
                captured += settle()
            for task in tasks:
                if store is None or store.uri != uri:  # also of a trainer that began again
                    if store is not None:
                        store.close()
                    opened = outcome_of(functools.partial(open_store, uri))
                    if isinstance(opened, Exception):
                        raise opened
                    store = opened
                put = outcome_of(functools.partial(_begin, task, capture, store, provenance))
                captured += settle()
                if isinstance(put, Exception):
                    publish(task, put)
                else:
                    putting[task.claim] = thread.submit(finish, task, put)
        captured += settle()
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
        thread.shutdown()
        for resource in (store, capture):
            if resource is not None:
                resource.close()


def _begin(
    task: Task, capture: OpenCapture, store: FeatureStore, provenance: str
) -> Callable[[], tuple[SampleRef, ...]]:
    """Capture a task's batch, unless the store holds all of it, captured in the same way."""
    try:
        stored = store.lookup(task.batch.ids)
    except StoreAway:
        raise
    except StoreError:  # torn or altered: as if it was not there
        stored = {}
    refs = tuple(ref for ref in map(stored.get, task.batch.ids) if ref is not None)
    if len(refs) == len(task.batch.ids) and {ref.provenance for ref in refs} == {provenance}:
        return lambda: refs
    return capture.begin(task.batch, task.loss_masks, store, provenance)
