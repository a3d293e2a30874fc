"""A producer: a process that captures what the trainer's channel hands out, until the run ends.

Any number of them on any number of machines work on one run. A producer may die at any moment: its
claims return, and what it had not published does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from draftcore.channels import ChannelEnded
from draftcore.errors import DraftcoreError
from draftcore.feed import Producer
from draftcore.records import CaptureTask, SampleRef
from draftcore.run import Run
from draftcore.stores import StoreFull
from draftcore.training.trainer import stop_on_signal

WAIT = 1.0  # seconds that one request for a task may take
ROOM = 0.05  # seconds between two attempts to put features into a full store


def produce(run: Run) -> str:
    """Capture until the run ends or a signal asks to stop; returns a line about it.

    Raises DraftcoreError where the trainer stays away, or the data here is not the trainer's.
    """
    run.require_shared_store()
    producer, captured, last = run.producer, 0, tuple[SampleRef, ...]()
    with stop_on_signal() as stop:
        try:
            while not stop:
                task = run.channel.claim("producer", WAIT)
                if task is None:
                    continue
                require_same_data(run, task)
                refs = outcome(producer, task, lambda: bool(stop))
                last = () if isinstance(refs, Exception) else refs
                run.channel.publish(task, refs)
                captured += len(last)
        except ChannelEnded as ended:
            if not run.durable:
                run.store.free(last)  # nobody read of it any more, or it is freed already
            return f"{ended}; {captured} samples captured here"
    return f"interrupted; {captured} samples captured here"


def outcome(
    producer: Producer, task: CaptureTask, stop: Callable[[], bool]
) -> tuple[SampleRef, ...] | Exception:
    """A task's refs, or why there are none. A full store is waited for: the trainer empties it."""
    while True:
        try:
            return producer.refs(task)
        except StoreFull as full:
            if stop():
                return full
            time.sleep(ROOM)
        except DraftcoreError as error:
            return error


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
