"""Batches that producers capture: what they are asked for, and how a rank reads what they put."""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

from draftcore.contracts.offers import Bound
from draftcore.contracts.run import Loaded, Needed, OpenRun, RunEnded
from draftcore.contracts.store import FeatureStore, StoreAway, StoreError
from draftcore.errors import UsageError
from draftcore.files import regular, write_atomic
from draftcore.uris import format_size
from draftcore_disagg.channel import PATIENCE, Channel, Task
from draftcore_disagg.launcher import QUEUE
from draftcore_disagg.queue import STORE_RETRY, Queue, QueueService, RemoteQueue
from draftcore_disagg.secret import secret

FAREWELL = 5.0  # seconds for producers to hear that the run is over
MEMORY = Path("/dev/shm")
LEAST_STORE = 32 << 20  # bytes; half of the shared memory that Docker gives a container
HEAD_BYTES = 4096  # of a row in a store, beside its tokens'


def queue_address(folder: Path) -> str:
    """Return where the queue of a run's trainer is; '' while there is none, or its file is not whole."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        return str(json.loads(regular(folder / QUEUE).read_text())["address"])
    return ""


def open_channel(run: OpenRun) -> Channel:
    """Open the run's channel, with what its processes know and nobody else: the secret."""
    shared = run.ranks.on_rank0(lambda: secret(run.folder))
    return channel_of(run.config.channel, shared, run.bind)


def channel_of(uri: str, shared: str, bind: Callable[[str, str], Bound]) -> Channel:
    """Open the channel of a URI for those who share a secret."""
    bound = bind("channel", uri.partition(":")[0])
    given = {"uri": uri, "secret": shared.encode(), "patience": PATIENCE}
    return cast(Channel, bound.hook.channel(name=bound.offer.name, **given))


class QueueSource:
    """The queue in rank 0, which producers work for; see `contracts.run.BatchSource`."""

    def __init__(self, run: OpenRun) -> None:
        self.run = run

    def open_store(self, needed: Needed, run_id: str) -> tuple[Bound, FeatureStore]:
        """Open the store of `auto`: in shared memory, with room for the batches that are held.

        It is the same at every start of a run, as producers that outlive a trainer hold on to it. Raises
        UsageError where there is too little memory.
        """
        batches = needed.held_batches
        heads = batches * self.run.config.train.batch * HEAD_BYTES
        need = needed.largest(batches) * needed.token_bytes + heads
        room = max(LEAST_STORE, 2 * need)  # of which `open_queue` takes half
        folder = MEMORY / f"draftcore-{run_id}"
        if not folder.exists() and (free := shutil.disk_usage(MEMORY).free) < room:
            raise UsageError(
                f"features on their way need {format_size(room)} of shared memory, and {MEMORY} has "
                f"{format_size(free)} free\n"
                "  make it larger, lower train.batch or train.prefetch, or set store=file:FOLDER"
            )
        return self.run.open_store(f"file:{folder}?volatile=yes&max_bytes={room}")

    @contextmanager
    def open(self, needed: Needed) -> Iterator[QueuedBatches]:
        """Serve the queue on rank 0, and reach it from each rank."""
        run, store = self.run, needed.store
        assert store is not None
        channel, queue, address = open_channel(run), None, ""
        try:
            with run.ranks.raise_on_all():
                if not run.ranks.rank:
                    queue = open_queue(run, needed, store)
                    address = channel.serve(QueueService(queue))
                    write_atomic(run.folder / QUEUE, json.dumps({"address": address}))
            (address, *_) = run.ranks.all_gather(address)
            reached = queue or RemoteQueue(channel.connect(lambda: address))
            patience = 0.0 if queue else PATIENCE
            batches = queued(needed, run.ranks.rank, run.ranks.size, reached, store, patience)
            yield QueuedBatches(queue, batches)
        finally:
            if queue is not None:
                queue.end("failed")  # unless it has ended before
                (run.folder / QUEUE).unlink(missing_ok=True)
                queue.farewell(FAREWELL)
                with suppress(StoreAway):  # or it went with all that it held
                    if queue.ended == "finished" and not needed.keeps:
                        forget(store, needed.feature_ids)  # what was put too late
            channel.close()
            store.close()


@dataclass
class QueuedBatches:
    """A rank's batches; the queue is rank 0's."""

    queue: Queue | None
    batches: Iterator[Loaded | None]

    def __iter__(self) -> Iterator[Loaded | None]:
        return self.batches

    def finished(self, position: int) -> None:
        if self.queue is not None:
            self.queue.advance(position)

    def status(self) -> str:
        return str(self.queue.status()) if self.queue is not None else ""

    def end(self, state: Literal["finished", "failed"]) -> None:
        if self.queue is not None:
            self.queue.end(state)


def open_queue(run: OpenRun, needed: Needed, store: FeatureStore) -> Queue:
    """Open the queue with all that is still to be captured. Raises UsageError for too small a store."""
    limit, least = None, needed.largest(run.ranks.size) * needed.token_bytes
    if not needed.keeps and (room := store.stats().limit_bytes) is not None:
        if least > room:
            raise UsageError(
                f"a batch for each of {run.ranks.size} ranks needs {format_size(least)}, and the "
                f"store {store.uri} has {format_size(room)}\n"
                "  raise max_bytes in its URI, or lower train.batch or data.max_length"
            )
        limit = max(room // 2, least)  # as what is free in a store of one piece may lie scattered
    about = {"store": store.uri, "provenance": needed.provenance, "request": asdict(needed.request)}
    queue = Queue(
        about,
        ahead=needed.held_batches,
        limit=limit,
        skipped=needed.skipped,
        free=(lambda refs: None) if needed.keeps else store.free,
        ref_error=needed.ref_error,
    )
    if not needed.keeps:
        forget(store, needed.feature_ids)  # what a trainer that was killed left behind
    queue.offer(tasks_of(needed), next(needed.uses(0, 1)).position)
    return queue


def tasks_of(needed: Needed) -> Iterator[Task]:
    """Yield what producers are asked for, in the plan's order."""
    for planned in needed.uses(0, 1):
        batch, masks = needed.batch_of(planned)
        tokens = sum(map(len, batch.token_ids))
        yield Task(planned.position, batch, masks, tokens * needed.token_bytes)


def queued(
    needed: Needed,
    rank: int,
    ranks: int,
    queue: Queue | RemoteQueue,
    store: FeatureStore,
    patience: float,
) -> Iterator[Loaded | None]:
    """Yield batches in the plan's order, and None about each second that one is waited for.

    A batch that cannot be read is freed and captured again. Raises StoreAway where the store stays
    away for longer than `patience`.
    """
    released = deque[int]()  # positions whose batches were closed, of which the queue hears
    for planned in needed.uses(rank, ranks):
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
                    store.lookup([needed.feature_ids[row] for row in planned.rows])
                else:
                    loaded = needed.open_refs(planned, refs, released.append)
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
