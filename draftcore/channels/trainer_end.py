"""The trainer's end of a channel between processes: the books, and who is there; see `logged`."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftcore.channels import NAME
from draftcore.channels.log import Letter, OpenLog
from draftcore.channels.logged import (
    LOOK_EVERY,
    STATES,
    Head,
    LoggedChannel,
    Settings,
    read_round,
    read_task,
)
from draftcore.channels.memory import MemoryChannel
from draftcore.contracts.channel import CaptureTask, Credit, PlannedStep, Standing
from draftcore.contracts.store import SampleRef
from draftcore.errors import DraftcoreError

logger = logging.getLogger(__name__)


@dataclass
class _Peer:
    """A producer that is alive. `answered` holds each claimant's last answered request."""

    heard: float
    answered: dict[str, int] = field(default_factory=dict)


class TrainerEnd(LoggedChannel):
    """The books, and a thread that answers producers from them."""

    role = "trainer"

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

    def standing(self) -> Standing:
        return replace(self._books.standing(), producers=len(self._peers))

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
        task = read_task(record)
        if kind == "published":
            self._books.publish(task, _refs(record))
            self._starved = None
        elif kind == "failed":
            reason = f"capture group {task.group.index} failed at {writer}: {record['error']}"
            self._books.publish(task, DraftcoreError(reason))
        elif kind == "returned":
            self._books.give_back(task)
        elif kind == "full":
            self._full[writer, task.claim] = task, read_round(record)
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


def _refs(record: Mapping[str, Any]) -> tuple[SampleRef, ...]:
    refs = tuple(SampleRef.from_json(data) for data in record["refs"])
    for ref in refs:
        words, counts = (ref.feature_id, ref.generation, ref.uri), (ref.tokens, ref.nbytes)
        if not all(isinstance(word, str) for word in words) or {*map(type, counts)} != {int}:
            raise ValueError(f"not a ref: {ref!r:.200}")
    return refs
