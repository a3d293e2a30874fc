"""A producer's end of a channel between processes: its requests, and their answers; see `logged`."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from draftcore.channels import require_claim, require_metadata, require_name, require_refs_of
from draftcore.channels.log import OpenLog
from draftcore.channels.logged import LOOK_EVERY, LoggedChannel, Settings, read_round, read_task
from draftcore.contracts.channel import CaptureTask, ChannelEnded
from draftcore.contracts.store import SampleRef
from draftcore.errors import DraftcoreError


class ProducerEnd(LoggedChannel):
    """A mailbox, and a thread that says that this process is alive and what it waits for."""

    role = "producer"

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
        answer = read_task(record) if kind == "task" else DraftcoreError(str(record["error"]))
        claimant, current = record["claimant"], read_round(record)
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
        current = None if record["round"] is None else read_round(record)
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
