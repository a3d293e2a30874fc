"""Channel `redis`: mailboxes of processes on several hosts, in Redis Streams.

    PREFIX:head              who runs here, as JSON; with the server's own run id
    PREFIX:mailbox:NAME      the mailbox of a process, a stream: writer, number, record (JSON)

A prefix belongs to one run at a time, and names of processes are not used twice; so the run's name
is in no key, and a producer may open the channel of a run whose name it does not know.

A server that is away is waited for. Whoever got no answer does not know whether it was heard, and
says it again; letters are numbered by their writer, and its reader passes over what it has read.

A server that was restarted may have forgotten letters, by its settings for persistence, and nobody
could say which. So the head is void then, until a trainer writes it anew with a session of its own:
where a run goes on does not depend on what the server keeps.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import redis

from draftcore.channels import require_name
from draftcore.channels.log import Letter, parse_record, report
from draftcore.channels.logged import LoggedChannel
from draftcore.channels.opening import open_end
from draftcore.errors import DraftcoreError
from draftcore_redis.server import TIMEOUT, Server, ServerAway, passes

START = "0-0"  # before every entry of a stream
AT_ONCE = 1000  # entries
PAUSES = (0.05, 1.0)  # seconds between two tries, the first and the longest
HURRY = 2.0  # seconds to wait for the server when the channel is being closed
NUMBER = re.compile(rb"[0-9]{1,18}")

Entry = tuple[bytes, dict[bytes, bytes]]
T = TypeVar("T")
logger = logging.getLogger(__name__)


class RedisLog:
    """A mailbox in a stream; see `draftcore.channels.log.Log`. Making one does no I/O."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, name
        self._client = server.client()
        self._hurried = threading.Event()
        self._gone: DraftcoreError | None = None  # how waiting for the server has ended
        self._appending = threading.Lock()
        self._number = 0  # of the last letter written
        self._incarnation = ""  # of the server, under which this process knows the head
        self._void = False  # the head, as the server was restarted
        self._renewed = time.monotonic()
        self._position = START
        self._fetched: list[Entry] = []
        self._known: dict[str, int] = {}  # the last number read, by writer

    @classmethod
    def open(cls, uri: str, run_id: str, role: str) -> LoggedChannel:
        """Open one end of a channel; see `server` for the URI. Raises UsageError within seconds.

        A producer that is started while the server is away waits for it, as it does for a trainer.
        """
        server, parsed = Server.parse(uri)
        try:
            server.check()
        except ServerAway:
            if role != "producer":
                raise
        return open_end(parsed, run_id, role, lambda name: cls(server, name))

    # ------------------------------------------------------------ the head

    def head(self) -> dict[str, Any] | None:
        """As `Log.head`. None also where the server was restarted since the head was written."""
        text, incarnation = self._call(self._look)
        record = None if text is None else parse_record("head", text) or {}
        if self._incarnation not in ("", incarnation):
            self._void = record is None or record.get("server") != incarnation
            if self._void:
                return None
            self._position = START  # of a stream that was perhaps begun anew
        self._incarnation = incarnation
        return record

    def _look(self, client: redis.Redis) -> tuple[bytes | None, str]:
        now = time.monotonic()
        with client.pipeline(transaction=False) as look:
            look.get(self._head)
            look.info("server")
            if now - self._renewed > self.server.expire / 8:
                self._renewed = now
                look.pexpire(self._head, self._lifetime)
            text, about, *_ = look.execute()
        return text, about["run_id"]

    def set_head(self, head: Mapping[str, Any]) -> None:
        """As `Log.set_head`. A restart that this process does not know yet leaves the head void."""

        def replace(client: redis.Redis) -> str:
            known = "" if self._void else self._incarnation
            incarnation = known or str(client.info("server")["run_id"])
            record = json.dumps({**head, "server": incarnation})
            client.set(self._head, record, px=self._lifetime)
            return incarnation

        self._incarnation, self._void = self._call(replace), False

    # ------------------------------------------------------------ letters

    def append(self, letters: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        with self._appending:
            entries = [(self._key(to), self._entry(record)) for to, record in letters]

            def send(client: redis.Redis) -> None:
                with client.pipeline(transaction=True) as commit:
                    for key, entry in entries:
                        commit.xadd(key, entry)
                    for key in {key for key, _ in entries}:
                        commit.pexpire(key, self._lifetime)
                    commit.execute()

            self._call(send)

    def read(self) -> list[Letter]:
        entries = self._fetched or self._fetch()
        self._fetched = []
        letters = (self._letter(entry) for _, entry in entries)
        return [letter for letter in letters if letter is not None]

    def wait(self, seconds: float) -> None:
        self._fetched = self._fetched or self._fetch(max(1, int(1000 * seconds)))

    def trim(self) -> None:
        time_part, _, count = self._position.partition("-")
        following = f"{time_part}-{int(count) + 1}"
        self._call(
            lambda client: client.xtrim(self._key(self.name), minid=following, approximate=False)
        )

    def drop(self, name: str) -> None:
        self._call(lambda client: client.delete(self._key(name)))

    def hurry(self) -> None:
        self._hurried.set()

    def close(self) -> None:
        self._client.close()

    def _entry(self, record: Mapping[str, Any]) -> dict[Any, Any]:
        self._number += 1
        return {"writer": self.name, "number": self._number, "record": json.dumps(dict(record))}

    def _fetch(self, wait_ms: int | None = None) -> list[Entry]:
        streams: dict[Any, Any] = {self._key(self.name): self._position}
        answer: Any = self._call(lambda client: client.xread(streams, AT_ONCE, wait_ms))
        entries: list[Entry] = answer[0][1] if answer else []
        if entries:
            self._position = entries[-1][0].decode()
        return entries

    def _letter(self, entry: Mapping[bytes, bytes]) -> Letter | None:
        writer = entry.get(b"writer", b"").decode("ascii", "replace")
        number = entry.get(b"number", b"")
        if NUMBER.fullmatch(number) is None:
            report(writer[:64], f"no number, but {number[:80]!r}")
            return None
        if int(number) <= self._known.get(writer, 0):
            return None  # said again
        record = parse_record(writer, entry.get(b"record", b""))
        if record is None:
            return None
        self._known[writer] = int(number)
        return writer, record

    # ------------------------------------------------------------ keys

    @property
    def _head(self) -> str:
        return f"{self.server.prefix}:head"

    @property
    def _lifetime(self) -> int:
        return int(1000 * self.server.expire)

    def _key(self, name: str) -> str:
        return f"{self.server.prefix}:mailbox:{require_name('mailbox', name)}"

    # ------------------------------------------------------------ a server that is away

    def _call(self, function: Callable[[redis.Redis], T]) -> T:
        """Ask the server, again and again while it is away, for `patience` seconds.

        Raises DraftcoreError then, and UsageError for what waiting does not mend.
        """
        if self._gone is not None and self._hurried.is_set():
            raise self._gone
        away, pause = 0.0, PAUSES[0]
        while True:
            began = time.monotonic()
            try:
                answer = function(self._client)
            except redis.RedisError as error:
                if not passes(error):
                    raise self.server.explain(error) from error
                self._lament(error, away)
            else:
                if away:
                    logger.warning("Redis at %s is back after %.0f s", self.server.address, away)
                return answer
            if self._hurried.wait(pause):
                time.sleep(pause)
            # A process that was frozen meanwhile has not waited.
            away += min(time.monotonic() - began, TIMEOUT + 2 * pause)
            pause = min(2 * pause, PAUSES[1])

    def _lament(self, error: redis.RedisError, away: float) -> None:
        """Say once that the server is away, and give up in the end."""
        problem, _, remedy = str(self.server.explain(error)).partition("\n")
        patience = HURRY if self._hurried.is_set() else self.server.patience
        if away >= patience:
            self._gone = DraftcoreError(f"{problem}, for {away:.0f} s now\n{remedy}")
            raise self._gone from error
        if not away:
            logger.warning("%s; the run waits for it up to %.0f s", problem, patience)
