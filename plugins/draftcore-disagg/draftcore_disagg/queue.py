"""The queue: what is still to be captured, in the trainer, and what was captured and not trained on.

Producers claim tasks in the plan's order and publish refs; loaders receive them. Nothing is durable:
a restart fills the queue from the plan and the checkpoint. Every wait is a condition.

The bytes of a batch are known before it is captured, so a claim reserves them, in the plan's order; a
claim that is lost keeps its reservation and is handed out first. Where the store refuses a put all the
same (its free bytes lie scattered), everything published that is needed later and that no loader has is
freed. Nothing needed later is captured then until the refused batch lies in the store; that is tried
again whenever something has changed, and the run fails once it was refused with nothing else there.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from draftcore.contracts.capture import BadRows, CaptureBatch
from draftcore.contracts.run import RunEnded, Skipped
from draftcore.contracts.store import SampleRef, StoreAway, StoreFull
from draftcore.errors import DraftcoreError
from draftcore.uris import format_size
from draftcore_disagg.channel import Client, Json, Task

T = TypeVar("T")
logger = logging.getLogger(__name__)
TTL = 30.0  # seconds of silence after which a producer loses its claims
ATTEMPTS = 3  # of a batch, before its rows are skipped
LONGEST_WAIT = 5.0  # seconds that one request may wait
NO_PRODUCER = 600.0  # seconds without a producer, after the last one left with an error
STORE_RETRY = 0.5  # seconds between two attempts to reach a store that is away


@dataclass
class Entry:
    """A task in the queue, and how it stands."""

    task: Task
    producer: str = ""  # who has claimed it
    refs: tuple[SampleRef, ...] | None = None  # published
    reserved: bool = False
    received: bool = False  # by a loader, which may be reading it
    refused: bool = False  # by a full store, at the last attempt to put it
    tried_at: int = -1  # `Queue.changes` when it was handed out last
    lost: bool = False  # by a producer that may have put it
    attempts: int = 0


@dataclass(frozen=True)
class Status:
    """How capture stands: producers at work, batches captured since the start, bytes reserved.

    Of the batches that are held, `claimed` are with producers and `ready` wait for the trainer.
    """

    producers: int
    captured: int
    nbytes: int
    claimed: int = 0
    ready: int = 0

    def __str__(self) -> str:
        return (
            f"producers {self.producers}, captured {self.captured}, held {format_size(self.nbytes)}"
        )


class Queue:
    """The queue of one run, on rank 0; every method may be called from any thread.

    `ahead` is how many batches from the oldest that is still in use on may be claimed, `limit` the
    store's bytes, None where nothing limits them. `free` frees refs in the store. `ref_error` says
    what is wrong with published refs, None for good ones.
    """

    def __init__(
        self,
        about: Json,
        *,
        ahead: int,
        limit: int | None,
        skipped: Skipped,
        free: Callable[[Sequence[SampleRef]], None],
        ref_error: Callable[[CaptureBatch, Sequence[SampleRef]], Exception | None],
        ttl: float = TTL,
    ) -> None:
        self.about, self.ahead, self.limit, self.ttl = about, ahead, limit, ttl
        self.skipped, self.free_refs, self.ref_error = skipped, free, ref_error
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.work = threading.Condition(lock)  # for producers, of which a change wakes one
        self.entries: dict[int, Entry] = {}  # by position, in the plan's order
        self.tasks: Iterator[Task] = iter(())
        self.upcoming: Task | None = None
        self.done = 0  # nobody reads what lies before this position any more
        self.seen: dict[str, float] = {}  # when each producer was last heard of
        self.captured = 0
        self.changes = 0  # after any of which a put that was refused may succeed
        self.failure: DraftcoreError | None = None
        self.ended: str | None = None
        self.deserted: tuple[float, str] | None = None  # when the last producer left, and why

    # ------------------------------------------------------------ the trainer's side

    def offer(self, tasks: Iterator[Task], done: int) -> None:
        """Set what is to be captured, in the order of need, from position `done` on."""
        with self.changed:
            self.tasks, self.done = tasks, done
            self.upcoming = next(self.tasks, None)
            self.work.notify()

    def receive(
        self, position: int, wait: float, released: Sequence[int] = ()
    ) -> tuple[SampleRef, ...] | None:
        """Return the refs of a batch, without skipped rows; None if they are not there after `wait` s.

        `released` are positions whose batches the caller reads no more: a step of many batches needs
        no room for all of them. Raises DraftcoreError where the run has failed.
        """
        deadline = time.monotonic() + min(wait, LONGEST_WAIT)
        with self.changed:
            if released:
                self._release(released)
            while True:
                self._drop_silent()
                if self.failure is not None:
                    raise self.failure
                entry = self.entries.get(position)
                if entry is not None and entry.refs is not None:
                    entry.received = True
                    return entry.refs
                if not self._wait(deadline, self.changed):
                    return None

    def reject(self, position: int, reason: str) -> None:
        """Take back the refs of a batch that cannot be read: it is captured again."""
        with self.changed:
            entry = self.entries.get(position)
            if entry is not None and entry.refs:  # else it was rejected before
                self._take_back(entry)
                self._failed(entry, DraftcoreError(reason))

    def advance(self, done: int) -> None:
        """Free the batches before position `done`, which nobody reads any more."""
        with self.changed:
            self._release([at for at in self.entries if at < done])

    def status(self) -> Status:
        with self.changed:
            entries = self.entries.values()
            claimed = sum(bool(entry.producer) and entry.refs is None for entry in entries)
            ready = sum(entry.refs is not None and not entry.received for entry in entries)
            return Status(len(self.seen), self.captured, self._reserved(), claimed, ready)

    def end(self, state: str) -> None:
        """Tell producers that the run is over: `finished`, or `failed` if it may go on.

        Nothing stays in the store. What was said first holds.
        """
        with self.changed:
            self.ended, self.upcoming = self.ended or state, None
            self._release(list(self.entries))
            self.work.notify_all()

    def farewell(self, wait: float) -> None:
        """Wait so many seconds at most until every producer has heard that the run is over."""
        with self.changed:
            self.changed.wait_for(lambda: not self.seen, wait)

    # ------------------------------------------------------------ the producers' side

    def claim(
        self, producer: str, count: int, wait: float, putting: Container[str] = ()
    ) -> list[Task]:
        """Hand out up to `count` tasks; none after `wait` seconds where there is nothing to capture.

        What this producer has claimed and neither published nor still puts (`putting`, claims) is lost:
        a reply did not reach it. Raises RunEnded once the run is over.
        """
        deadline = time.monotonic() + min(wait, LONGEST_WAIT)
        with self.changed:
            self._lose(producer, putting)
            while True:
                self.seen[producer] = time.monotonic()
                self.deserted = None
                self._drop_silent()
                if self.ended is not None:
                    self.seen.pop(producer)
                    self.changed.notify_all()
                    raise RunEnded(f"the run has {self.ended}", self.ended)
                if tasks := self._hand_out(producer, count):
                    self.work.notify()  # there may be more
                    return tasks
                if not self._wait(deadline, self.work):
                    return []

    def publish(self, claim: str, outcome: Sequence[SampleRef] | Exception) -> bool:
        """Take a claim's refs, or why there are none; False where the claim was lost meanwhile.

        Refs of a lost claim are freed, and what they name does not count.
        """
        with self.changed:
            claimed = (e for e in self.entries.values() if e.producer and e.task.claim == claim)
            if (entry := next(claimed, None)) is None:
                refs = () if isinstance(outcome, Exception) else tuple(outcome)
                if refs and any(other.refs == refs for other in self.entries.values()):
                    return True  # asked again, as the reply was lost
                self._free(refs)
                self._note_change()
                return False
            self.seen[entry.producer] = time.monotonic()
            entry.producer, entry.lost = "", False
            if isinstance(outcome, StoreFull):
                self._make_room(entry, outcome)
                return True
            self._note_change()
            if isinstance(outcome, Exception):
                self._failed(entry, outcome)
            elif error := self.ref_error(entry.task.batch, outcome):
                self._free(outcome)
                self._failed(entry, error, again=True)
            else:
                entry.refs, entry.refused = tuple(outcome), False
                self.captured += len(outcome)
            return True

    def heartbeat(self, producer: str) -> None:
        """Hear that a producer is alive, which a long capture would leave in doubt."""
        with self.changed:
            if producer in self.seen:
                self.seen[producer] = time.monotonic()

    def leave(self, producer: str, error: str = "") -> None:
        """Forget a producer; its claims are handed out again. `error` says why it cannot work."""
        with self.changed:
            self.seen.pop(producer, None)
            self._lose(producer)
            if error:
                logger.warning("a producer stopped: %s", error)
                if not self.seen:
                    self.deserted = (time.monotonic(), error)
            self.changed.notify_all()

    # ------------------------------------------------------------ inside, with the lock held

    def _wait(self, deadline: float, condition: threading.Condition) -> bool:
        if (left := deadline - time.monotonic()) > 0:
            condition.wait(min(left, self.ttl / 4))
        return left > 0

    def _drop_silent(self) -> None:
        """Forget producers that went silent; fail where nobody is left to work."""
        now = time.monotonic()
        for producer in [name for name, seen in self.seen.items() if now - seen > self.ttl]:
            logger.warning("a producer was silent for %g s: its claims are handed out", self.ttl)
            self.leave(producer)
        if self.deserted is not None and now - self.deserted[0] > NO_PRODUCER:
            self.failure = DraftcoreError(f"no producer works for this run\n  {self.deserted[1]}")

    def _lose(self, producer: str, putting: Container[str] = ()) -> None:
        """Hand out again what a producer has claimed, and neither published nor still puts."""
        for entry in self.entries.values():
            if entry.producer == producer and entry.task.claim not in putting:
                entry.producer, entry.lost = "", True
                self._note_change()

    def _hand_out(self, producer: str, count: int) -> list[Task]:
        """Claim up to `count` tasks in order of need; the first that lacks room ends the search."""
        tasks: list[Task] = []
        while self.upcoming is not None and self.upcoming.position < self.done + self.ahead:
            entry = Entry(without_rows(self.upcoming, self.skipped))
            self.entries[self.upcoming.position] = entry
            if not entry.task.batch.ids:
                entry.refs = ()
                self.changed.notify_all()
            self.upcoming = next(self.tasks, None)
        reserved, store_full = self._reserved(), False
        # Two uses of a batch, in two epochs, are not captured at once: they may share what is put.
        at_work = {entry.task.batch.index for entry in self.entries.values() if entry.producer}
        for _, entry in sorted(self.entries.items()):
            waits = entry.refused and entry.tried_at == self.changes
            # What is lost may lie in the store, and can be freed once it is published.
            blocked = waits or (store_full and not entry.lost)
            store_full |= entry.refused
            if len(tasks) == count:
                break
            if entry.refs is not None or blocked or entry.task.batch.index in at_work:
                continue
            if not entry.reserved:
                first, reserved = not reserved, reserved + entry.task.nbytes
                if self.limit is not None and reserved > self.limit and not first:
                    break
            entry.reserved, entry.producer, entry.tried_at = True, producer, self.changes
            entry.task = replace(entry.task, claim=uuid.uuid4().hex)
            at_work.add(entry.task.batch.index)
            tasks.append(entry.task)
        return tasks

    def _reserved(self) -> int:
        return sum(entry.task.nbytes for entry in self.entries.values() if entry.reserved)

    def _failed(self, entry: Entry, error: Exception, *, again: bool = False) -> None:
        """Do what an attempt that failed asks for: leave rows out, or try again.

        With `again`, bad rows may be good ones at another attempt.
        """
        rows = entry.task.batch.rows
        bad = error.reasons.items() if isinstance(error, BadRows) else ()
        reasons = {rows[at]: why for at, why in bad if 0 <= at < len(rows)}
        if again or not reasons:
            entry.attempts += 1
            logger.warning("batch %d was not captured: %s", entry.task.batch.index, error)
            if entry.attempts < ATTEMPTS:
                return
            reasons = reasons or dict.fromkeys(rows, str(error))
        try:
            self.skipped.add(reasons)
        except DraftcoreError as failure:
            self.failure = failure
        entry.task = without_rows(entry.task, self.skipped)
        if not entry.task.batch.ids:
            entry.refs, entry.refused = (), False

    def _make_room(self, entry: Entry, error: StoreFull) -> None:
        """Free what is published and needed later than a refused batch, which is then tried again."""
        logger.warning("batch %d found no room: %s", entry.task.batch.index, error)
        others = [other for other in self.entries.values() if other is not entry]
        for other in others:
            if other.task.position > entry.task.position and other.refs and not other.received:
                self._take_back(other)
        alone = not any(other.refs or other.producer or other.lost for other in others)
        if alone and entry.refused and entry.tried_at == self.changes:
            what = "the store is too small for one batch: raise max_bytes, or lower train.batch"
            self.failure = DraftcoreError(f"{error}\n  {what}")
        elif alone:
            self._note_change()  # what was in its way is gone
        entry.refused = True

    def _take_back(self, entry: Entry) -> None:
        refs, entry.refs, entry.received = entry.refs, None, False
        self._free(refs or ())
        self._note_change()

    def _release(self, positions: Sequence[int]) -> None:
        entries = [self.entries.pop(at) for at in positions if at in self.entries]
        for entry in entries:
            self._free(entry.refs or ())
        upcoming = self.done if self.upcoming is None else self.upcoming.position
        self.done = next(iter(self.entries), upcoming)
        if entries:
            self._note_change()

    def _note_change(self) -> None:
        """Wake whoever waits; what the store refused may fit now."""
        self.changes += 1
        self.changed.notify_all()
        self.work.notify()

    def _free(self, refs: Sequence[SampleRef]) -> None:
        """Free refs, but for what another epoch's use shares; a store that stays away ends the run."""
        shared = {ref.key for entry in self.entries.values() for ref in entry.refs or ()}
        unused = [ref for ref in refs if ref.key not in shared]
        if unused and not isinstance(self.failure, StoreAway):
            try:
                self.free_refs(unused)
            except StoreAway as error:  # for longer than it is patient
                self.failure = error


def without_rows(task: Task, skipped: Container[int]) -> Task:
    """Return a task without rows that are skipped."""
    batch = task.batch
    kept = [at for at, row in enumerate(batch.rows) if row not in skipped]
    if len(kept) == len(batch.rows):
        return task

    def pick(values: Sequence[T]) -> tuple[T, ...]:
        return tuple(values[at] for at in kept)

    images = pick(batch.images) if batch.images else ()
    rows = pick(batch.rows), pick(batch.ids), pick(batch.token_ids)
    picked = CaptureBatch(batch.index, *rows, images if any(images) else ())
    return replace(task, batch=picked, loss_masks=pick(task.loss_masks))


# ---------------------------------------------------------------- over a channel


CALLS: Mapping[str, Callable[[Queue, Json], Any]] = {
    "about": lambda queue, asked: queue.about,
    "status": lambda queue, asked: vars(queue.status()),
    "claim": lambda queue, asked: (
        [
            task.to_json()
            for task in queue.claim(
                asked["producer"], int(asked["count"]), asked["wait"], asked["putting"]
            )
        ],
        queue.about["store"],
    ),
    "publish": lambda queue, asked: queue.publish(asked["claim"], outcome_from_json(asked)),
    "heartbeat": lambda queue, asked: queue.heartbeat(asked["producer"]),
    "leave": lambda queue, asked: queue.leave(asked["producer"], str(asked["error"])),
    "receive": lambda queue, asked: refs_to_json(
        queue.receive(int(asked["position"]), asked["wait"], asked["released"])
    ),
    "reject": lambda queue, asked: queue.reject(int(asked["position"]), str(asked["reason"])),
}


class QueueService:
    """Answers a channel's requests with the queue's methods."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def answer(self, request: Json) -> Json:
        try:
            return {"answer": CALLS[request["call"]](self.queue, request)}
        except RunEnded as ended:
            return {"ended": ended.state}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            return {"error": f"a request that no producer sends: {error!r}"}
        except DraftcoreError as error:
            return {"error": str(error)}

    def lost(self, producer: str) -> None:
        self.queue.leave(producer)


class RemoteQueue:
    """The queue as another process calls it, through a channel's client."""

    def __init__(self, client: Client) -> None:
        self.client, self.producer = client, uuid.uuid4().hex

    def call(self, call: str, **data: Any) -> Any:
        """Raises RunEnded once the run is over, DraftcoreError with the trainer's error."""
        reply = self.client.call({"call": call, "producer": self.producer, **data})
        if "ended" in reply:
            raise RunEnded(f"the run has {reply['ended']}", str(reply["ended"]))
        if "error" in reply:
            raise DraftcoreError(str(reply["error"]))
        return reply["answer"]

    def about(self) -> Json:
        return cast(Json, self.call("about"))

    def claim(self, count: int, wait: float, putting: Sequence[str] = ()) -> tuple[list[Task], str]:
        """Return claimed tasks, and the URI of the store that their features go to."""
        tasks, store = self.call("claim", count=count, wait=wait, putting=list(putting))
        return [Task.from_json(task) for task in tasks], str(store)

    def publish(self, claim: str, outcome: Sequence[SampleRef] | Exception) -> bool:
        return bool(self.call("publish", claim=claim, **outcome_to_json(outcome)))

    def heartbeat(self) -> None:
        self.call("heartbeat")

    def leave(self, error: str = "") -> None:
        self.call("leave", error=error)

    def receive(
        self, position: int, wait: float, released: Sequence[int] = ()
    ) -> tuple[SampleRef, ...] | None:
        refs = self.call("receive", position=position, wait=wait, released=list(released))
        return None if refs is None else tuple(map(SampleRef.from_json, refs))

    def reject(self, position: int, reason: str) -> None:
        self.call("reject", position=position, reason=reason)


def refs_to_json(refs: Sequence[SampleRef] | None) -> list[Json] | None:
    return None if refs is None else [ref.to_json() for ref in refs]


def outcome_to_json(outcome: Sequence[SampleRef] | Exception) -> Json:
    """Describe what a producer publishes: refs, or the error of a capture or put."""
    if not isinstance(outcome, Exception):
        return {"refs": refs_to_json(outcome)}
    failed: Json = {"text": str(outcome) or repr(outcome), "full": isinstance(outcome, StoreFull)}
    if isinstance(outcome, BadRows):
        failed["rows"] = list(outcome.reasons.items())
    return {"failed": failed}


def outcome_from_json(data: Json) -> Sequence[SampleRef] | Exception:
    if "refs" in data:
        return [SampleRef.from_json(ref) for ref in data["refs"]]
    failed = data["failed"]
    if "rows" in failed:
        return BadRows({int(at): str(why) for at, why in failed["rows"]})
    return (RemoteStoreFull if failed["full"] else DraftcoreError)(failed["text"])


class RemoteStoreFull(StoreFull):
    """StoreFull as received over the channel."""

    def __init__(self, text: str) -> None:
        DraftcoreError.__init__(self, text)
