"""A producer: a process that captures what the trainer's channel hands out, until the run ends.

Any number of them on any number of machines work on one run. A producer may die at any moment: its
claims return, and what it had not published does not count.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from draftcore.contracts.channel import CaptureTask, ChannelEnded
from draftcore.contracts.store import SampleRef, StoreAway, StoreFull
from draftcore.errors import DraftcoreError
from draftcore.feed import Producer, forget
from draftcore.run.parts import PATIENCE, Run
from draftcore.run.provenance import differences
from draftcore.run.trainer import stop_on_signal

WAIT = 1.0  # seconds that one request for a task, or for room, may take
AWAY = 0.5  # seconds between two attempts to reach a store that is away

T = TypeVar("T")


def produce(run: Run) -> str:
    """Capture until the run ends or a signal asks to stop; returns a line about it.

    Raises DraftcoreError where the trainer stays away, or the data here is not the trainer's.
    """
    captured = 0
    with stop_on_signal() as stop:
        stopped = functools.partial(bool, stop)
        try:
            while not stop:
                patiently(lambda: follow_trainer(run), stopped)
                task = run.channel.claim("producer", WAIT)
                if task is None:
                    continue
                found = patiently(functools.partial(work, run, task, stopped), stopped)
                if found is None:
                    continue
                run.channel.publish(task, found)
                if isinstance(found, Exception) and not isinstance(found, DraftcoreError):
                    raise found  # a new process may do better, where memory or a device gave out
                captured += len(task.group.rows)
        except ChannelEnded as ended:
            if ended.state == "finished" and "store" in run.__dict__ and not run.durable:
                with suppress(StoreAway):  # or it went with the trainer, and all that it held
                    # What was put too late for the trainer.
                    forget(run.store, run.samples.feature_ids)
            return f"{ended}; {captured} samples captured here"
    return f"interrupted; {captured} samples captured here"


def patiently(attempt: Callable[[], T], stop: Callable[[], bool]) -> T | None:
    """Return what an attempt returns, which is repeated while the store is away; None if stopped."""
    began = time.monotonic()
    while not stop():
        try:
            return attempt()
        except StoreAway:
            if time.monotonic() - began > PATIENCE:
                raise
            time.sleep(AWAY)
    return None


def follow_trainer(run: Run) -> None:
    """Be ready for the trainer's tasks. One that began again may have another store."""
    told = run.channel.about(PATIENCE)
    if "producer" not in run.__dict__:
        run.require_shared_store()
        require_same_capture(run)
        _ = run.producer
    elif "store" not in run.__dict__ or told["store"] != run.store_uri:
        require_same_capture(run)
        run.change_store()


def work(
    run: Run, task: CaptureTask, stop: Callable[[], bool]
) -> Sequence[SampleRef] | Exception | None:
    """A task's outcome, with the store of now. Raises StoreAway where that does not answer."""
    follow_trainer(run)
    require_same_data(run, task)
    found = outcome(run.producer, task, stop)
    if isinstance(found, StoreAway):
        raise found
    return found


def outcome(
    producer: Producer, task: CaptureTask, stop: Callable[[], bool]
) -> Sequence[SampleRef] | Exception | None:
    """A task's refs, or why there are none; None where asked to stop, or not needed any more.

    A full store is waited for, and the trainer is told: it empties the store. Raises as `claim`
    does where it waits for nothing any more.
    """
    try:
        if (held := producer.held(task)) is not None:
            return held
        put = producer.captured(task)
    except Exception as error:
        return error
    while not stop():
        try:
            return put()
        except StoreFull:
            if not producer.channel.wait_for_room(task, WAIT):
                return None
        except Exception as error:
            return error
    return None


def require_same_data(run: Run, task: CaptureTask) -> None:
    """Raise DraftcoreError where a task's rows are other samples here than for the trainer."""
    ids = run.samples.feature_ids
    here = tuple(ids[row] if row < len(ids) else "none" for row in task.group.rows)
    if here != task.group.feature_ids:
        raise DraftcoreError(
            f"the data here is not the trainer's: rows {list(task.group.rows)} are {', '.join(here)}, "
            f"for the trainer {', '.join(task.group.feature_ids)}\n"
            "  give the producer the trainer's data file, target and data settings"
        )


def require_same_capture(run: Run) -> None:
    """Raise DraftcoreError where features made here would not be what the trainer asks for."""
    theirs = run.channel.about(PATIENCE)["provenance"]
    if theirs != run.provenance:
        raise DraftcoreError(
            "features captured here are not what the trainer trains on\n"
            f"{differences(run.provenance, theirs, 'for the trainer')}\n"
            "  give the producer the trainer's target, algorithm and capture settings"
        )
