"""The queue: what is still to be captured, in the trainer, and what was captured and not trained on.

Producers claim tasks in the plan's order and publish refs; loaders receive them. Nothing is durable:
a restart fills the queue from the plan and the checkpoint. Every wait is a condition.

The bytes of a batch are known before it is captured, so a claim reserves them, in the plan's order; a
claim that is lost keeps its reservation and is handed out first. A put that the store refuses all the
same (its free bytes lie scattered) takes back the published batch that is needed last, and nothing
that is needed later is captured until the refused batch lies in the store.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from draftcore.contracts.capture import BadRows
from draftcore.contracts.channel import Client, Json, RunEnded, Task
from draftcore.contracts.store import SampleRef, StoreAway, StoreFull
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError
from draftcore.uris import format_size

logger = logging.getLogger(__name__)
TTL = 30.0  # seconds of silence after which a producer loses its claims
ATTEMPTS = 3  # of a batch, before its rows are skipped
LONGEST_WAIT = 5.0  # seconds that one request may wait
ALONE = 600.0  # seconds without a producer, after the last one left with an error


@dataclass
class Entry:
    """A task in the queue, and how it stands."""

    task: Task
    producer: str = ""  # who has claimed it
    refs: tuple[SampleRef, ...] | None = None  # published
    reserved: bool = False
    received: bool = False  # by a loader, which may be reading it
    refused: bool = False  # by the store, since it was published last
    waits: bool = False  # as it was refused, until anything changes
    alone: bool = False  # when it was claimed after a refusal: another one ends the run
    lost: bool = False  # by who claimed it, and may have put it
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
    store's bytes, None where nothing limits them. `free` lets go of refs. `misfit` says what is wrong
    with refs, None for ones that fit.
    """

    def __init__(
        self,
        about: Json,
        *,
        ahead: int,
        limit: int | None,
        skipped: Skipped,
        free: Callable[[Sequence[SampleRef]], None],
        misfit: Callable[[Task, Sequence[SampleRef]], DraftcoreError | None],
        ttl: float = TTL,
    ) -> None:
        self.about, self.ahead, self.limit, self.ttl = about, ahead, limit, ttl
        self.skipped, self.free_refs, self.misfit = skipped, free, misfit
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.work = threading.Condition(lock)  # for producers, of which a change wakes one
        self.entries: dict[int, Entry] = {}  # by position, in the plan's order
        self.tasks: Iterator[Task] = iter(())
        self.upcoming: Task | None = None
        self.done = 0  # nobody reads what lies before this position any more
        self.seen: dict[str, float] = {}  # when each producer was last heard of
        self.captured = 0
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
                self._let_go(released)
            while True:
                self._look_around()
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
            if entry is not None and entry.refs is not None:
                self._take_back(entry)
                self._failed(entry, DraftcoreError(reason))

    def advance(self, done: int) -> None:
        """Let go of the batches before position `done`, which nobody reads any more."""
        with self.changed:
            self._let_go([at for at in self.entries if at < done])

    def status(self) -> Status:
        with self.changed:
            held = self.entries.values()
            claimed = sum(bool(entry.producer) and entry.refs is None for entry in held)
            ready = sum(entry.refs is not None and not entry.received for entry in held)
            return Status(len(self.seen), self.captured, self._reserved(), claimed, ready)

    def end(self, state: str) -> None:
        """Tell producers that the run is over: `finished`, or `failed` if it may go on.

        Nothing stays in the store. What was said first holds.
        """
        with self.changed:
            self.ended, self.upcoming = self.ended or state, None
            self._let_go(list(self.entries))
            self.work.notify_all()

    def farewell(self, wait: float) -> None:
        """Wait so many seconds at most until every producer has heard that the run is over."""
        with self.changed:
            self.changed.wait_for(lambda: not self.seen, wait)

    # ------------------------------------------------------------ the producers' side

    def claim(self, producer: str, count: int, wait: float) -> list[Task]:
        """Hand out up to `count` tasks; none after `wait` seconds where there is nothing to capture.

        What this producer has claimed and not published is lost: a reply did not reach it.
        Raises RunEnded once the run is over.
        """
        deadline = time.monotonic() + min(wait, LONGEST_WAIT)
        with self.changed:
            self._lose(producer)
            while True:
                self.seen[producer] = time.monotonic()
                self.deserted = None
                self._look_around()
                if self.ended is not None:
                    self.seen.pop(producer)
                    self.changed.notify_all()
                    raise RunEnded(f"the run has {self.ended}", self.ended)
                if found := self._hand_out(producer, count):
                    self.work.notify()  # there may be more
                    return found
                if not self._wait(deadline, self.work):
                    return []

    def publish(self, claim: str, found: Sequence[SampleRef] | Exception) -> bool:
        """Take a claim's refs, or why there are none; False where the claim was lost meanwhile.

        Refs of a lost claim are freed, and what they name does not count.
        """
        with self.changed:
            claimed = (e for e in self.entries.values() if e.producer and e.task.claim == claim)
            if (entry := next(claimed, None)) is None:
                refs = () if isinstance(found, Exception) else tuple(found)
                if refs and any(one.refs == refs for one in self.entries.values()):
                    return True  # asked again, as the reply was lost
                self._free(refs)
                self._look_again()
                return False
            self.seen[entry.producer] = time.monotonic()
            entry.producer, entry.lost = "", False
            self._look_again()
            if isinstance(found, StoreFull):
                self._make_room(entry, found)
            elif isinstance(found, Exception):
                self._failed(entry, found)
            elif wrong := self.misfit(entry.task, found):
                self._free(found)
                self._failed(entry, wrong, again=True)
            else:
                entry.refs, entry.refused = tuple(found), False
                self.captured += len(found)
            return True

    def heartbeat(self, producer: str) -> None:
        """Hear that a producer is alive, which a long capture would leave in doubt."""
        with self.changed:
            if producer in self.seen:
                self.seen[producer] = time.monotonic()

    def leave(self, producer: str, error: str = "") -> None:
        """Let a producer go; its claims are handed out again. `error` says why it cannot work."""
        with self.changed:
            self.seen.pop(producer, None)
            self._lose(producer)
            if error:
                logger.warning("a producer is out: %s", error)
                if not self.seen:
                    self.deserted = (time.monotonic(), error)
            self.changed.notify_all()

    # ------------------------------------------------------------ inside, with the lock held

    def _wait(self, deadline: float, condition: threading.Condition) -> bool:
        if (left := deadline - time.monotonic()) > 0:
            condition.wait(min(left, self.ttl / 4))
        return left > 0

    def _look_around(self) -> None:
        """Forget producers that went silent; fail where nobody is left to work."""
        now = time.monotonic()
        for producer in [one for one, seen in self.seen.items() if now - seen > self.ttl]:
            logger.warning("a producer was silent for %g s: its claims are handed out", self.ttl)
            self.leave(producer)
        if self.deserted is not None and now - self.deserted[0] > ALONE:
            self.failure = DraftcoreError(f"no producer works for this run\n  {self.deserted[1]}")

    def _lose(self, producer: str) -> None:
        """Hand out again what a producer has claimed and not published."""
        for entry in self.entries.values():
            if entry.producer == producer:
                entry.producer, entry.lost = "", True
                self._look_again()

    def _hand_out(self, producer: str, count: int) -> list[Task]:
        """Claim up to `count` tasks in order of need; the first that lacks room ends the search."""
        found: list[Task] = []
        while self.upcoming is not None and self.upcoming.position < self.done + self.ahead:
            self.entries[self.upcoming.position] = Entry(self._without_skipped(self.upcoming))
            if not self.entries[self.upcoming.position].task.batch.ids:
                self.entries[self.upcoming.position].refs = ()
                self.changed.notify_all()
            self.upcoming = next(self.tasks, None)
        reserved, refused = self._reserved(), False
        # Two uses of a batch, in two epochs, are not captured at once: they may share what is put.
        at_work = {one.task.batch.index for one in self.entries.values() if one.producer}
        for _, entry in sorted(self.entries.items()):
            held_up = entry.waits or (refused and not entry.lost)  # what is lost may take up bytes
            refused = refused or entry.refused
            if len(found) == count:
                break
            if entry.refs is not None or held_up or entry.task.batch.index in at_work:
                continue
            if not entry.reserved:
                first, reserved = not reserved, reserved + entry.task.nbytes
                if self.limit is not None and reserved > self.limit and not first:
                    break
            entry.reserved, entry.producer = True, producer
            entry.alone = entry.refused and self._is_alone(entry)
            entry.task = replace(entry.task, claim=uuid.uuid4().hex)
            at_work.add(entry.task.batch.index)
            found.append(entry.task)
        return found

    def _reserved(self) -> int:
        return sum(one.task.nbytes for one in self.entries.values() if one.reserved)

    def _without_skipped(self, task: Task) -> Task:
        kept = [at for at, row in enumerate(task.batch.rows) if row not in self.skipped]
        return task if len(kept) == len(task.batch.rows) else _only(task, kept)

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
        entry.task = self._without_skipped(entry.task)
        if not entry.task.batch.ids:
            entry.refs, entry.refused = (), False

    def _make_room(self, entry: Entry, error: StoreFull) -> None:
        """Free the published batch that is needed last, for one that is needed before it."""
        entry.refused = entry.waits = True
        logger.warning("batch %d found no room: %s", entry.task.batch.index, error)
        later = [one for at, one in self.entries.items() if at > entry.task.position]
        if free := [one for one in later if one.refs and not one.received]:
            self._take_back(free[-1])
        elif entry.alone:
            self.failure = DraftcoreError(f"{error}\n  a batch does not fit, and nothing can go")
        elif self._is_alone(entry):
            self._look_again()  # what was in its way is gone

    def _is_alone(self, entry: Entry) -> bool:
        """Say whether this batch is needed first, and no other may lie in the store."""
        others = [(at, one) for at, one in self.entries.items() if one is not entry]
        return not any(
            at < entry.task.position or one.refs or one.producer or one.lost for at, one in others
        )

    def _take_back(self, entry: Entry) -> None:
        refs, entry.refs, entry.received = entry.refs, None, False
        self._free(refs or ())
        self._look_again()

    def _let_go(self, positions: Sequence[int]) -> None:
        for position in positions:
            if (entry := self.entries.pop(position, None)) is not None:
                self._free(entry.refs or ())
        upcoming = self.done if self.upcoming is None else self.upcoming.position
        self.done = next(iter(self.entries), upcoming)
        self._look_again()

    def _look_again(self) -> None:
        """Let whoever waits see what has changed; what the store refused may fit now."""
        for entry in self.entries.values():
            entry.waits = False
        self.changed.notify_all()
        self.work.notify()

    def _free(self, refs: Sequence[SampleRef]) -> None:
        """Free refs, but for what another epoch's use shares; a store that stays away ends the run."""
        used = {ref.key for one in self.entries.values() for ref in one.refs or ()}
        free = [ref for ref in refs if ref.key not in used]
        if free and not isinstance(self.failure, StoreAway):
            try:
                self.free_refs(free)
            except StoreAway as error:  # for longer than it is patient
                self.failure = error


def _only(task: Task, kept: Sequence[int]) -> Task:
    """Return a task with these rows only, by number in its batch."""
    batch = task.batch
    picked = replace(
        batch,
        rows=tuple(batch.rows[at] for at in kept),
        ids=tuple(batch.ids[at] for at in kept),
        token_ids=tuple(batch.token_ids[at] for at in kept),
    )
    return replace(task, batch=picked, loss_masks=tuple(task.loss_masks[at] for at in kept))


# ---------------------------------------------------------------- over a channel


class QueueService:
    """Answers a channel's requests with the queue's methods."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def answer(self, request: Json) -> Json:
        try:
            return {"answer": self._answer(request)}
        except RunEnded as ended:
            return {"ended": ended.state}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            return {"error": f"a request that no producer sends: {error!r}"}
        except DraftcoreError as error:
            return {"error": str(error)}

    def lost(self, producer: str) -> None:
        self.queue.leave(producer)

    def _answer(self, request: Json) -> Any:
        queue, producer, wait = self.queue, str(request["producer"]), float(request.get("wait", 0))
        match request["call"]:
            case "about":
                return queue.about
            case "status":
                return vars(queue.status())
            case "claim":
                tasks = queue.claim(producer, int(request["count"]), wait)
                return [task.to_json() for task in tasks], queue.about["store"]
            case "publish":
                return queue.publish(request["claim"], _outcome(request))
            case "heartbeat":
                return queue.heartbeat(producer)
            case "leave":
                return queue.leave(producer, str(request["error"]))
            case "receive":
                refs = queue.receive(int(request["position"]), wait, request.get("released", ()))
                return None if refs is None else [ref.to_json() for ref in refs]
            case "reject":
                return queue.reject(int(request["position"]), str(request["reason"]))
            case other:
                raise ValueError(other)


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

    def claim(self, count: int, wait: float) -> tuple[list[Task], str]:
        """Return claimed tasks, and the URI of the store that their features go to."""
        tasks, store = self.call("claim", count=count, wait=wait)
        return [Task.from_json(one) for one in tasks], str(store)

    def publish(self, claim: str, found: Sequence[SampleRef] | Exception) -> bool:
        if not isinstance(found, Exception):
            return bool(self.call("publish", claim=claim, refs=[ref.to_json() for ref in found]))
        failed: Json = {"text": str(found) or repr(found), "full": isinstance(found, StoreFull)}
        if isinstance(found, BadRows):
            failed["rows"] = list(found.reasons.items())
        return bool(self.call("publish", claim=claim, failed=failed))

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


def _outcome(request: Json) -> Sequence[SampleRef] | Exception:
    if "refs" in request:
        return [SampleRef.from_json(ref) for ref in request["refs"]]
    failed = request["failed"]
    if "rows" in failed:
        return BadRows({int(at): str(why) for at, why in failed["rows"]})
    return (Full if failed["full"] else DraftcoreError)(failed["text"])


class Full(StoreFull):
    """A store's refusal as a producer told of it."""

    def __init__(self, text: str) -> None:
        DraftcoreError.__init__(self, text)
