"""A channel between processes, over any transport that carries records: a `log.Log`.

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

This file has what both ends share, `trainer_end` and `producer_end` the two, `opening` opens them.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from draftcore.channels import NAME
from draftcore.channels.log import Letter, Log, OpenLog, report
from draftcore.channels.memory import UNLIMITED
from draftcore.contracts.channel import CaptureTask, ChannelEnded, Credit, PlannedStep, Standing
from draftcore.contracts.store import SampleRef
from draftcore.errors import DraftcoreError, UsageError
from draftcore.uris import Uri

STATES = ("running", "finished", "failed")
PASS = 0.02  # seconds an idle thread sleeps at most, so that it notices what its own process did
LOOK_EVERY = 0.25  # seconds between two looks at the head
TRIM_AFTER = 64  # letters


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


OPTIONS = tuple(field.name for field in dataclasses.fields(Settings))  # of every such channel's URI


class LoggedChannel(ABC):
    """What both ends share: a mailbox, and a thread that serves it."""

    role: ClassVar[str]

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

    def standing(self) -> Standing:
        self._other_end("standing")

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
        raise UsageError(
            f"{method!r} is not for the {self.role}'s end of the channel {self.uri!r}\n"
            "  a trainer offers, receives and advances; a producer claims and publishes"
        )


# ---------------------------------------------------------------- what records hold


def read_task(record: Mapping[str, Any]) -> CaptureTask:
    task = CaptureTask.from_json(record["task"])
    if type(task.group.index) is not int or not isinstance(task.claim, str):
        raise ValueError(f"not a task: {record['task']!r:.200}")
    return task


def read_round(record: Mapping[str, Any]) -> int:
    if type(record["round"]) is not int:
        raise ValueError(f"not a round: {record['round']!r:.80}")
    return int(record["round"])
