"""Channel `sqlite`: the mailboxes of all processes of one host in one SQLite file.

    sqlite:runs/my-draft/channel.db?limit_refs=4096&limit_bytes=40GiB

WAL lets everybody read while one writes, and `synchronous=FULL` makes a commit durable when it
returns. WAL needs shared memory between its processes: a file on a network mount does not work.
Numbers are never used twice (AUTOINCREMENT), so that a reader's
position stays right when rows go.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftcore.channels import require_name
from draftcore.channels.log import Letter, parse_record
from draftcore.channels.logged import OPTIONS, LoggedChannel
from draftcore.channels.opening import open_end
from draftcore.errors import DraftcoreError, UsageError
from draftcore.uris import parse_uri

POLL = 0.005  # seconds between two reads of an idle process; a read takes 20 µs
BUSY = 60.0  # seconds to wait for the others' commits
WAL_PAGES = 256  # 1 MiB; what is read is deleted, so little else would bound the file
SCHEMA = """
CREATE TABLE IF NOT EXISTS head (one INTEGER PRIMARY KEY CHECK (one = 1), body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS letters (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    recipient TEXT NOT NULL,
    writer TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS mailboxes ON letters (recipient, number);
"""


class SqliteLog:
    """A mailbox in an SQLite file; see `draftcore.channels.log.Log`."""

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name = file, require_name("mailbox", name)
        self._mutex = threading.Lock()  # one connection, several threads
        self._position = 0
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._connect()
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"the channel cannot use the file {file}: {error}\n"
                "  name a file on a local disk that this user may write, new or a channel's"
            ) from error

    @classmethod
    def open(cls, uri: str, run_id: str, role: str) -> LoggedChannel:
        """Open one end of the channel `sqlite:FILE?ttl=30&...`; see `logged.Settings`."""
        parsed = parse_uri(uri, known=OPTIONS)
        if not parsed.path:
            raise UsageError(f"the channel {uri!r} names no file\n  write sqlite:FILE")
        file = Path(parsed.path).expanduser()
        return open_end(parsed, run_id, role, lambda name: cls(file, name))

    def head(self) -> dict[str, Any] | None:
        with self._explained("read"):
            row = self._connection.execute("SELECT body FROM head").fetchone()
        return None if row is None else parse_record("head", row[0]) or {}

    def set_head(self, head: Mapping[str, Any]) -> None:
        with self._explained("written"):
            self._connection.execute(
                "INSERT OR REPLACE INTO head VALUES (1, ?)", [json.dumps(dict(head))]
            )

    def append(self, letters: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        rows = [(to, self.name, json.dumps(dict(record))) for to, record in letters]
        with self._explained("written"), self._transaction():
            self._connection.executemany(
                "INSERT INTO letters (recipient, writer, body) VALUES (?, ?, ?)", rows
            )

    def read(self) -> list[Letter]:
        with self._explained("read"):
            rows = self._connection.execute(
                "SELECT number, writer, body FROM letters WHERE recipient = ? AND number > ? "
                "ORDER BY number",
                [self.name, self._position],
            ).fetchall()
        letters = []
        for number, writer, body in rows:
            self._position = number
            record = parse_record(str(writer), body)
            if record is not None:
                letters.append((writer, record))
        return letters

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL))

    def trim(self) -> None:
        with self._explained("written"):
            self._connection.execute(
                "DELETE FROM letters WHERE recipient = ? AND number <= ?",
                [self.name, self._position],
            )

    def drop(self, name: str) -> None:
        with self._explained("written"):
            self._connection.execute("DELETE FROM letters WHERE recipient = ?", [name])

    def hurry(self) -> None: ...

    def close(self) -> None:
        with self._mutex:
            self._connection.close()

    def _connect(self) -> sqlite3.Connection:
        """Open the file, by as many processes at once as there are."""
        connection = sqlite3.connect(
            self.file, timeout=BUSY, isolation_level=None, check_same_thread=False
        )
        try:
            _enter_wal(connection)
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            connection.executescript(SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # some errors end it by themselves
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Use the connection alone, and say what an SQLite error means for a run."""
        try:
            with self._mutex:
                yield
        except sqlite3.Error as error:
            raise DraftcoreError(
                f"the channel's file {self.file} cannot be {what}: {error}\n"
                "  free space on its disk, see that nobody removed or locked it, and start again"
            ) from error


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL. Odd: SQLite does not wait, but fails, where another process does so too."""
    deadline = time.monotonic() + BUSY
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(POLL)
            continue
        if mode != "wal":
            raise sqlite3.OperationalError(f"its journal mode stays {mode!r} instead of WAL")
        return
