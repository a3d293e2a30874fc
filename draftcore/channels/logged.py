"""A channel between processes, over any transport that carries records: see `Log`.

    trainer end   ── task ──────────────────────►   producer end
    the books     ◄── beat (what it waits for), ──  a thread that beats and listens
    of the run        published, failed, returned
                  ◄── full ─────────────────────
                  ── room (a round, or none) ──►

The trainer is the brain. Which group is claimed, published, needed or released is known to its
books alone, a `MemoryChannel`; the log carries messages, and a session of them ends with its
trainer. One that starts again opens a new session from its checkpoint's cursor: producers notice,
drop what they had claimed and go on. Nothing of the old session is needed.

What keeps both ends right, whoever is killed or frozen at whatever moment:

- A request is part of every beat until it is answered, and is answered once per number. An answer
  that nobody waits for any more is returned.
- Clocks of two machines are never compared: times are arrivals, on the own monotonic clock. Silence
  is judged by the time *before* the log was read and arrivals get the time after, so that a process
  that was frozen, wherever, first hears what came in meanwhile.
- A full store is a matter of rounds, one per time that the trainer freed something: `full` names the
  round in which features had no room, and is answered by the next one, or by none where the claim
  is void. So nobody tries without need, and no old word counts.
- A producer that was declared dead and is not simply goes on: its old claims are void, and what
  it publishes under them is stale, by the claim's name.
- Where the medium has lost the head, nobody knows which letters went with it: the trainer voids all
  claims and goes on with its books in a new session. Waiting for the medium is nobody's silence.
- A trainer whose session was replaced while it was frozen reads its own mailbox only, and ends.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from draftcore.channels import (
    NAME,
    ChannelEnded,
    Credit,
    require_claim,
    require_metadata,
    require_name,
    require_refs_of,
)
from draftcore.channels.memory import UNLIMITED, MemoryChannel
from draftcore.errors import DraftcoreError, UsageError
from draftcore.records import CaptureTask, PlannedStep, SampleRef
from draftcore.uris import Uri

OPTIONS = (
    "limit_refs",
    "limit_bytes",
    "ttl",
    "patience",
    "attempts",
)  # of every such channel's URI
STATES = ("running", "finished", "failed")
PASS = 0.02  # seconds an idle thread sleeps at most, so that it notices what its own process did
LOOK_EVERY = 0.25  # seconds between two looks at the head
TRIM_AFTER = 64  # letters

Letter = tuple[str, dict[str, Any]]  # (a name, a record of plain JSON)
logger = logging.getLogger(__name__)


class Log(Protocol):
    """A transport: one process's mailbox, and its way to those of others.

    `append` may be called by several threads at once, the rest by one thread. Names match
    `channels.NAME`. Failures of the medium are DraftcoreErrors that say what to do.
    """

    def head(self) -> dict[str, Any] | None:
        """Return what `set_head` wrote last, by whichever process; None where nobody did.

        None also where the medium may have lost letters since: the trainer then begins anew.
        """
        ...

    def set_head(self, head: Mapping[str, Any]) -> None:
        """Replace the head: a reader sees the old one or the new one, whatever crashes."""
        ...

    def append(self, letters: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Send records, as (recipient, record); they are durable when this returns."""
        ...

    def read(self) -> list[Letter]:
        """Return what is new in this mailbox, as (writer, record), in each writer's order.

        A torn record is never returned; a malformed one is skipped and reported (`report`).
        """
        ...

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, or earlier when something may be new."""
        ...

    def trim(self) -> None:
        """Forget what `read` has returned: a long run must not pile it up."""
        ...

    def drop(self, name: str) -> None:
        """A process is gone: forget its mailbox and what it wrote here. It may come back."""
        ...

    def hurry(self) -> None:
        """The channel is closing: wait for a medium that is away no longer than seconds.

        May be called by another thread, also while that one waits.
        """
        ...

    def close(self) -> None: ...


OpenLog = Callable[[str], Log]  # from the name of the mailbox


def report(writer: str, problem: object) -> None:
    """Tell of a record that is skipped."""
    logger.warning("skipped a record of %s in the channel: %s", writer, problem)


def parse_record(writer: str, text: str | bytes) -> dict[str, Any] | None:
    """Return a record, or None for one that is malformed, which is reported."""
    try:
        record = json.loads(text)
    except (TypeError, ValueError) as error:
        report(writer[:64], f"not JSON: {error}")
        return None
    if not isinstance(record, dict) or NAME.fullmatch(writer) is None:
        report(writer[:64], f"not a record of a mailbox: {record!r:.80}")
        return None
    return record


@dataclass(frozen=True)
class Settings:
    """The URI options of every channel between processes; times in seconds.

    A producer that is silent for `ttl` is dead. Who hears nothing of the other side for `patience`
    gives up. A failed group is handed out `attempts` times. The trainer's `ttl` counts.
    """

    limit_refs: int = UNLIMITED
    limit_bytes: int = UNLIMITED
    ttl: float = 30.0
    patience: float = 600.0
    attempts: int = 3

    @classmethod
    def of(cls, uri: Uri) -> Settings:
        return cls(
            uri.count("limit_refs", cls.limit_refs),
            uri.size("limit_bytes", cls.limit_bytes),
            uri.seconds("ttl", cls.ttl),
            uri.seconds("patience", cls.patience),
            uri.count("attempts", cls.attempts),
        )


@dataclass(frozen=True)
class Head:
    """Whose channel it is, and how the run stands. `session` is the trainer's mailbox."""

    run_id: str
    session: str
    state: str
    ttl: float
    about: Mapping[str, str]

    @classmethod
    def of(cls, log: Log) -> Head | None:
        data = log.head()
        if data is None:
            return None
        try:
            ttl, about = float(data["ttl"]), dict(data["about"])
            head = cls(data["run_id"], data["session"], data["state"], ttl, about)
            good = NAME.fullmatch(head.run_id) and NAME.fullmatch(head.session) and head.ttl > 0
        except (KeyError, TypeError, ValueError):
            good = None
        if not good or head.state not in STATES:
            raise UsageError(
                f"this is not the head of a channel: {data!r:.200}\n"
                "  something else wrote it: name another place for the channel"
            )
        return head


def open_end(uri: Uri, run_id: str, role: str, open_log: OpenLog) -> LoggedChannel:
    """Open one end of a run's channel. Raises UsageError for another or a finished run's."""
    if role not in ("trainer", "producer"):
        raise UsageError(
            f"the channel {uri.text!r} has two ends, and a run that is both was asked for\n"
            "  run trainer and producers as processes of their own, or set channel=memory"
        )
    if role == "trainer" or run_id:  # a producer elsewhere takes the run that it finds
        require_name("run", run_id)
    kind = TrainerEnd if role == "trainer" else ProducerEnd
    return kind(uri.text, run_id, Settings.of(uri), open_log)


class LoggedChannel(ABC):
    """What both ends share: a mailbox, and a thread that serves it."""

    def __init__(
        self, uri: str, run_id: str, settings: Settings, name: str, open_log: OpenLog
    ) -> None:
        self.uri, self.run_id, self.settings, self.name = uri, run_id, settings, name
        self._changed = threading.Condition()
        self._ttl = settings.ttl
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._unread = 0  # letters read and not trimmed
        self._looked = self._beaten = float("-inf")
        self._log = open_log(name)
        self._thread = threading.Thread(target=self._serve, name=f"channel {name}", daemon=True)

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                began = time.monotonic()
                if not self._pass():
                    self._log.wait(PASS)
                away = time.monotonic() - began
                if away > self._ttl / 2:  # less is no reason to take anybody for dead
                    self._excuse(away)
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    @abstractmethod
    def _pass(self) -> bool:
        """Deal with what is new; say whether there was anything."""

    @abstractmethod
    def _hear(self, writer: str, record: Mapping[str, Any], now: float) -> None:
        """Deal with one record; KeyError, TypeError and ValueError mean that it is malformed."""

    @abstractmethod
    def _excuse(self, seconds: float) -> None:
        """So long nobody could be heard: it does not count as silence."""

    def _read(self) -> bool:
        letters = self._log.read()
        self._take(letters, time.monotonic())
        self._unread += len(letters)
        if self._unread >= TRIM_AFTER:
            self._trim()
        return bool(letters)

    def _take(self, letters: Iterable[Letter], now: float) -> None:
        for writer, record in letters:
            try:
                self._hear(writer, record, now)
            except (KeyError, TypeError, ValueError, DraftcoreError) as error:
                report(writer, repr(error))

    def _trim(self) -> None:
        if self._unread:
            self._log.trim()
        self._unread = 0

    def _head(self) -> Head | None:
        """Read the head. Raises UsageError where it is another run's, or that run is finished."""
        head = Head.of(self._log)
        if head is not None and not self.run_id:
            self.run_id = head.run_id
        if head is not None and head.run_id != self.run_id:
            raise UsageError(
                f"the channel {self.uri!r} belongs to another run\n"
                f"  channel: {head.run_id}, {head.state}; this run: {self.run_id}\n"
                "  name another place for the channel, or remove this one"
            )
        return head

    def _require_unfinished(self, head: Head | None) -> None:
        if head is not None and head.state == "finished":
            raise ChannelEnded(
                f"the channel {self.uri!r} is of a run that is finished\n"
                f"  channel: {head.run_id}, {head.state}; this run: {self.run_id}\n"
                "  name another place for the channel, or remove this one",
                head.state,
            )

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise DraftcoreError(
                f"the channel of run {self.run_id} is closed\n  open a new one to go on"
            )
        if self._failure is not None:
            raise self._failure

    def _stop(self) -> bool:
        """End the thread; False where this was done before."""
        if self._closed.is_set():
            return False
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self._log.hurry()
        self._thread.join()
        return True

    # ------------------------------------------------------------ what the other end does

    def offer(self, tasks: Iterable[CaptureTask]) -> None:
        self._other_end("offer")

    def receive(self, step: PlannedStep) -> tuple[SampleRef, ...] | None:
        self._other_end("receive")

    def credit(self) -> Credit:
        self._other_end("credit")

    @property
    def given_up(self) -> Mapping[str, str]:
        self._other_end("given_up")

    def reject(self, wrong: Mapping[SampleRef, str]) -> tuple[SampleRef, ...]:
        self._other_end("reject")

    def evict(self, step: PlannedStep, tasks: Iterable[CaptureTask]) -> tuple[SampleRef, ...]:
        self._other_end("evict")

    def wait_for_room(self, task: CaptureTask, wait: float) -> bool:
        self._other_end("wait_for_room")

    def announce(self, about: Mapping[str, str]) -> None:
        self._other_end("announce")

    def about(self, wait: float) -> Mapping[str, str]:
        self._other_end("about")

    def advance(self, step_index: int) -> tuple[SampleRef, ...]:
        self._other_end("advance")

    def claim(self, producer: str, wait: float = 0.0) -> CaptureTask | None:
        self._other_end("claim")

    def publish(self, task: CaptureTask, refs: Sequence[SampleRef] | Exception) -> None:
        self._other_end("publish")

    @abstractmethod
    def close(self, state: str = "finished") -> None: ...

    def _other_end(self, method: str) -> NoReturn:
        role = "trainer" if isinstance(self, TrainerEnd) else "producer"
        raise UsageError(
            f"{method!r} is not for the {role}'s end of the channel {self.uri!r}\n"
            "  a trainer offers, receives and advances; a producer claims and publishes"
        )


# ---------------------------------------------------------------- the trainer's end


@dataclass
class _Peer:
    """A producer that is alive. `answered` holds each claimant's last answered request."""

    heard: float
    answered: dict[str, int] = field(default_factory=dict)


class TrainerEnd(LoggedChannel):
    """The books, and a thread that answers producers from them."""

    def __init__(self, uri: str, run_id: str, settings: Settings, open_log: OpenLog) -> None:
        session = _new_session()
        super().__init__(uri, run_id, settings, session, open_log)
        self._open_log = open_log
        self._books = MemoryChannel(
            run_id,
            limit_refs=settings.limit_refs,
            limit_bytes=settings.limit_bytes,
            attempts=settings.attempts,
            session=session,
        )
        self._peers: dict[str, _Peer] = {}
        self._pending: dict[tuple[str, str], int] = {}  # (producer, claimant): request, in order
        self._full: dict[tuple[str, str], tuple[CaptureTask, int]] = {}  # (producer, claim): round
        self._starved: DraftcoreError | None = None  # what a producer was told last
        self._deserted: DraftcoreError | None = None
        self._about: Mapping[str, str] = {}
        self._announcing = False
        self._heard = time.monotonic()
        try:
            before = self._head()
            self._require_unfinished(before)
            self._set_head("running")
            if before is not None:
                self._inherit(before.session)
        except BaseException:
            self._log.close()
            raise
        self._thread.start()

    def _set_head(self, state: str) -> None:
        head = {"run_id": self.run_id, "session": self.name, "state": state}
        self._log.set_head({**head, "ttl": self.settings.ttl, "about": dict(self._about)})

    def _inherit(self, session: str) -> None:
        """Read what the session before did not: refs that are stale now, to be freed in time."""
        log = self._open_log(session)
        try:
            unread = [letter for letter in log.read() if letter[1].get("kind") == "published"]
            self._take(unread, self._heard)
        finally:
            log.close()
        self._log.drop(session)
        self._peers.clear()

    # ------------------------------------------------------------ the trainer's side

    def offer(self, tasks: Iterable[CaptureTask]) -> None:
        self._require_open()
        self._starved = None
        self._books.offer(tasks)

    def receive(self, step: PlannedStep) -> tuple[SampleRef, ...] | None:
        """As `MemoryChannel.receive`. Raises DraftcoreError where nobody is left to capture."""
        self._require_open()
        refs = self._books.receive(step)
        if refs is None and self._deserted is not None:
            raise self._deserted
        return refs

    def credit(self) -> Credit:
        return self._books.credit()

    @property
    def given_up(self) -> Mapping[str, str]:
        return self._books.given_up

    def reject(self, wrong: Mapping[SampleRef, str]) -> tuple[SampleRef, ...]:
        self._require_open()
        return self._books.reject(wrong)

    def evict(self, step: PlannedStep, tasks: Iterable[CaptureTask]) -> tuple[SampleRef, ...]:
        self._require_open()
        return self._books.evict(step, tasks)

    def announce(self, about: Mapping[str, str]) -> None:
        self._require_open()
        self._about, self._announcing = dict(about), True  # the thread alone writes the head

    def advance(self, step_index: int) -> tuple[SampleRef, ...]:
        self._require_open()
        return self._books.advance(step_index)

    def close(self, state: str = "finished") -> None:
        """End the run for all producers: `finished`, or `failed` for one that will be resumed."""
        if state not in STATES[1:]:
            raise ValueError(f"a channel ends in one of {STATES[1:]}, not {state!r}")
        if not self._stop():
            return
        self._books.close()
        try:
            head = Head.of(self._log)
            if head is None or head.session == self.name:
                self._set_head(state)
        except DraftcoreError:
            if self._failure is None:  # else it is what has been told before
                raise
        finally:
            self._log.close()

    # ------------------------------------------------------------ the thread

    def _pass(self) -> bool:
        now = time.monotonic()
        heard = self._read()
        for name in [name for name, peer in self._peers.items() if self._dead(peer, now)]:
            logger.warning("producer %s is silent: its claims are handed out again", name)
            self._bury(name)
        letters = [*self._answers(), *self._room()]
        if now - self._beaten >= self.settings.ttl / 4:
            self._beaten = now
            letters += [(name, {"kind": "beat"}) for name in self._peers]
            self._trim()
        if letters:
            self._log.append(letters)
        if self._announcing or now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._require_own_session()
            if self._announcing:
                self._announcing = False
                self._set_head("running")
        self._judge_desertion(now)
        return heard or bool(letters)

    def _dead(self, peer: _Peer, now: float) -> bool:
        return now - peer.heard > self.settings.ttl

    def _bury(self, name: str) -> None:
        del self._peers[name]
        for letters in (self._pending, self._full):
            for key in [key for key in letters if key[0] == name]:
                del letters[key]
        self._books.leave(name)
        self._log.drop(name)

    def _hear(self, writer: str, record: Mapping[str, Any], now: float) -> None:
        kind = record["kind"]
        if kind == "left":
            if writer in self._peers:
                self._bury(writer)
            return
        peer = self._peers.setdefault(writer, _Peer(now))
        self._heard = peer.heard = now
        if kind == "beat":
            for claimant, request in _requests(record).items():
                if request > peer.answered.get(claimant, 0):
                    self._pending[writer, claimant] = request
            return
        task = _task(record)
        if kind == "published":
            self._books.publish(task, _refs(record))
            self._starved = None
        elif kind == "failed":
            reason = f"capture group {task.group.index} failed at {writer}: {record['error']}"
            self._books.publish(task, DraftcoreError(reason))
        elif kind == "returned":
            self._books.give_back(task)
        elif kind == "full":
            self._full[writer, task.claim] = task, _round(record)
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _answers(self) -> list[Letter]:
        letters: list[Letter] = []
        for (producer, claimant), request in list(self._pending.items()):
            answer: dict[str, Any] = {"claimant": claimant, "request": request}
            answer["round"] = self._books.round
            try:
                task = self._books.claim(producer)
            except DraftcoreError as error:
                self._starved = error
                answer |= {"kind": "starved", "error": str(error)}
            else:
                if task is None:
                    continue
                answer |= {"kind": "task", "task": task.to_json()}
            del self._pending[producer, claimant]
            self._peers[producer].answered[claimant] = request
            letters.append((producer, answer))
        return letters

    def _room(self) -> list[Letter]:
        letters: list[Letter] = []
        for (producer, claim), (task, tried) in list(self._full.items()):
            now = self._books.tell_full(task, tried)
            if now != tried:
                del self._full[producer, claim]
                letters.append((producer, {"kind": "room", "claim": claim, "round": now}))
        return letters

    def _require_own_session(self) -> None:
        head = self._head()
        if head is None:
            self._begin_anew()
        elif head.session != self.name:
            raise DraftcoreError(
                f"another trainer has taken over the channel {self.uri!r} of run {self.run_id}\n"
                "  end this one: two trainers of one run overwrite each other's checkpoints"
            )

    def _begin_anew(self) -> None:
        """The medium has lost letters: void all claims, and go on in a new session."""
        logger.warning("the channel %r has lost its messages: a new session begins", self.uri)
        for name in list(self._peers):
            self._bury(name)
        before, self.name = self.name, _new_session()
        self._log.close()
        self._log = self._open_log(self.name)
        self._set_head("running")
        self._inherit(before)

    def _excuse(self, seconds: float) -> None:
        now = time.monotonic()
        self._heard = min(self._heard + seconds, now)
        for peer in self._peers.values():
            peer.heard = min(peer.heard + seconds, now)

    def _judge_desertion(self, now: float) -> None:
        self._deserted = None
        if self._peers:
            return
        if self._starved is not None:
            self._deserted = self._starved
        elif now - self._heard > self.settings.patience:
            self._deserted = DraftcoreError(
                f"run {self.run_id} waits for features, and for {self.settings.patience:g} s no "
                f"producer was there, in {self.uri!r}\n"
                "  start a producer with this channel, or set the channel's patience higher"
            )


def _new_session() -> str:
    return f"trainer-{uuid.uuid4().hex[:16]}"


def _requests(record: Mapping[str, Any]) -> dict[str, int]:
    requests = record["wants"]
    if not isinstance(requests, dict):
        raise ValueError(f"not requests: {requests!r:.80}")
    for claimant, request in requests.items():
        if NAME.fullmatch(claimant) is None or type(request) is not int:
            raise ValueError(f"not a request: {claimant!r:.80}, {request!r:.80}")
    return requests


def _round(record: Mapping[str, Any]) -> int:
    if type(record["round"]) is not int:
        raise ValueError(f"not a round: {record['round']!r:.80}")
    return int(record["round"])


def _task(record: Mapping[str, Any]) -> CaptureTask:
    task = CaptureTask.from_json(record["task"])
    if type(task.group.index) is not int or not isinstance(task.claim, str):
        raise ValueError(f"not a task: {record['task']!r:.200}")
    return task


def _refs(record: Mapping[str, Any]) -> tuple[SampleRef, ...]:
    refs = tuple(SampleRef.from_json(data) for data in record["refs"])
    for ref in refs:
        words, counts = (ref.feature_id, ref.generation, ref.uri), (ref.tokens, ref.nbytes)
        if not all(isinstance(word, str) for word in words) or {*map(type, counts)} != {int}:
            raise ValueError(f"not a ref: {ref!r:.200}")
    return refs


# ---------------------------------------------------------------- a producer's end


class ProducerEnd(LoggedChannel):
    """A mailbox, and a thread that says that this process is alive and what it waits for."""

    def __init__(self, uri: str, run_id: str, settings: Settings, open_log: OpenLog) -> None:
        host = re.sub(r"[^A-Za-z0-9_]", "-", socket.gethostname())[:32].lstrip("-")
        name = f"{host or 'host'}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        super().__init__(uri, run_id, settings, name, open_log)
        self._session = ""
        self._about: Mapping[str, str] = {}
        self._requests = 0
        self._wants: dict[str, int] = {}  # claimant: the request that is not answered yet
        self._answers: dict[str, CaptureTask | DraftcoreError] = {}  # not fetched yet
        self._round = 0  # the last one that the trainer told
        self._tried: dict[str, int] = {}  # by claim that is not void: the round known before a put
        self._heard = time.monotonic()
        try:
            self._require_unfinished(self._head())
        except BaseException:
            self._log.close()
            raise
        self._thread.start()

    # ------------------------------------------------------------ the producer's side

    def claim(self, producer: str, wait: float = 0.0) -> CaptureTask | None:
        """Ask for a task and wait for it. An answer that comes later is there for the next call.

        Raises ChannelEnded when the run is over, and DraftcoreError where the trainer was silent
        for too long, or where it waits for a sample that no task will bring.
        """
        require_name("producer", producer)
        deadline = time.monotonic() + wait
        while True:
            with self._changed:
                self._require_open()
                answer = self._answers.pop(producer, None)
                if isinstance(answer, CaptureTask):
                    self._tried[answer.claim] = self._round
                asking = answer is None and producer not in self._wants
                if asking:
                    self._requests += 1
                    self._wants[producer] = self._requests
            if asking:
                self._beat()
            if isinstance(answer, DraftcoreError):
                raise answer
            left = deadline - time.monotonic()
            if answer is not None or left <= 0:
                return answer
            with self._changed:
                self._changed.wait_for(lambda: self._news(producer), left)

    def about(self, wait: float) -> Mapping[str, str]:
        deadline = time.monotonic() + wait
        while True:
            with self._changed:
                self._require_open()
                if self._about:
                    return self._about
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DraftcoreError(
                        f"no trainer has opened the channel {self.uri!r} for {wait:g} s\n"
                        "  start the trainer with this channel, or set its patience higher"
                    )
                self._changed.wait(min(left, LOOK_EVERY))

    def publish(self, task: CaptureTask, refs: Sequence[SampleRef] | Exception) -> None:
        """Announce refs or a failure; the trainer ignores what is not the claim's first word."""
        self._require_open()
        require_claim(task)
        record: dict[str, Any] = {"task": task.to_json()}
        if isinstance(refs, Exception):
            told = isinstance(refs, DraftcoreError)
            error = str(refs) if told else f"{type(refs).__name__}: {refs}"
            record |= {"kind": "failed", "error": error}
        else:
            require_metadata(refs)
            require_refs_of(task, refs)
            record |= {"kind": "published", "refs": [ref.to_json() for ref in refs]}
        self._log.append([(self._session, record)])
        with self._changed:
            self._tried.pop(task.claim, None)

    def wait_for_room(self, task: CaptureTask, wait: float) -> bool:
        with self._changed:
            self._require_open()
            tried = self._tried.get(task.claim)
            session, current = self._session, self._round
        if tried is None:
            return False
        if tried == current:
            record = {"kind": "full", "task": task.to_json(), "round": tried}
            self._log.append([(session, record)])
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(task, tried), wait)
            self._require_open()
            if task.claim in self._tried:
                self._tried[task.claim] = self._round
            return task.claim in self._tried

    def close(self, state: str = "finished") -> None:
        """Leave: what this process had claimed is handed out again. `state` is the trainer's."""
        if not self._stop():
            return
        with suppress(DraftcoreError):  # it only spares the others the ttl
            if self._session and not isinstance(self._failure, ChannelEnded):
                self._log.append([(self._session, {"kind": "left"})])
            self._log.drop(self.name)
        self._log.close()

    def _news(self, producer: str) -> bool:
        waiting = producer in self._wants and producer not in self._answers
        return not waiting or self._closed.is_set() or self._failure is not None

    def _has_room(self, task: CaptureTask, tried: int) -> bool:
        settled = task.claim not in self._tried or self._round != tried
        return settled or self._closed.is_set() or self._failure is not None

    # ------------------------------------------------------------ the thread

    def _pass(self) -> bool:
        now = time.monotonic()
        heard = self._read()
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._look(now)
        if now - self._beaten >= self._ttl / 4:
            self._beaten = now
            self._trim()
            self._beat()
        if now - self._heard > self.settings.patience:
            raise DraftcoreError(
                f"the trainer of run {self.run_id} was silent for {self.settings.patience:g} s, "
                f"in {self.uri!r}\n"
                "  start it again before its producers, or set the channel's patience higher"
            )
        return heard

    def _beat(self) -> None:
        with self._changed:
            wants, session = dict(self._wants), self._session
        if session:
            self._log.append([(session, {"kind": "beat", "wants": wants})])

    def _hear(self, writer: str, record: Mapping[str, Any], now: float) -> None:
        if writer != self._session:
            return
        self._heard = now
        kind = record["kind"]
        if kind == "beat":
            return
        if kind == "room":
            self._hear_of_room(record)
            return
        answer: CaptureTask | DraftcoreError
        answer = _task(record) if kind == "task" else DraftcoreError(str(record["error"]))
        claimant, current = record["claimant"], _round(record)
        with self._changed:
            self._round = max(self._round, current)
            wanted = self._wants.get(claimant) == record["request"]
            if wanted:
                del self._wants[claimant]
                self._answers[claimant] = answer
                self._changed.notify_all()
        if not wanted and isinstance(answer, CaptureTask):
            self._log.append([(writer, {"kind": "returned", "task": answer.to_json()})])

    def _hear_of_room(self, record: Mapping[str, Any]) -> None:
        current = None if record["round"] is None else _round(record)
        with self._changed:
            if current is None:
                self._tried.pop(record["claim"], None)
            else:
                self._round = max(self._round, current)
            self._changed.notify_all()

    def _excuse(self, seconds: float) -> None:
        self._heard = min(self._heard + seconds, time.monotonic())

    def _look(self, now: float) -> None:
        """See whether the run has ended, or its trainer has started again."""
        head = self._head()
        if head is None or (head.state == "failed" and head.session != self._session):
            return  # not there yet: a run that failed before this process came may be resumed
        if head.state != "running":
            ended = f"run {self.run_id} is {head.state}: nothing is left to capture"
            raise ChannelEnded(ended, head.state)
        self._about = head.about
        if head.session != self._session:
            if self._session:
                self._log.drop(self._session)
            with self._changed:
                self._session, self._ttl, self._heard = head.session, head.ttl, now
                self._answers.clear()
                self._tried.clear()
                self._round = 0
                self._changed.notify_all()
            self._beat()
