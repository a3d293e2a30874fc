"""The channel `sqlite`: the conformance suite, durability, and files that it cannot use."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from draftcore_sdk.channels import ChannelSuite

from draftcore.channels.logged import Head
from draftcore.channels.sqlite import SqliteLog
from draftcore.errors import DraftcoreError, UsageError


class TestSqliteChannel(ChannelSuite):
    plugin, name = "draftcore.builtin", "sqlite"

    def garble(self, uri: str, bodies: Sequence[bytes]) -> None:
        file = Path(uri.removeprefix("sqlite:"))
        log = SqliteLog(file, "vandal")
        head = Head.of(log)
        log.close()
        assert head is not None
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.executemany(
                "INSERT INTO letters (recipient, writer, body) VALUES (?, 'vandal', ?)",
                [(head.session, body) for body in bodies],
            )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "channel.db"


@pytest.fixture
def log(file: Path) -> Iterator[SqliteLog]:
    log = SqliteLog(file, "reader")
    yield log
    log.close()


def test_the_file_is_in_wal_mode_and_commits_are_durable(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, connect = list[sqlite3.Connection](), sqlite3.connect

    def noted(*args: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*args, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    log = SqliteLog(file, "reader")
    for pragma, value in (("journal_mode", "wal"), ("synchronous", 2)):
        assert made[0].execute(f"PRAGMA {pragma}").fetchone() == (value,)
    log.close()


def test_records_come_once_in_order_and_in_one_commit(log: SqliteLog, file: Path) -> None:
    writer = SqliteLog(file, "writer")
    writer.append([("reader", {"n": 1}), ("other", {"n": 0}), ("reader", {"n": 2})])
    with pytest.raises(TypeError):
        writer.append([("reader", {"n": 3}), ("reader", {"n": object()})])
    assert log.read() == [("writer", {"n": 1}), ("writer", {"n": 2})]
    log.trim()
    writer.append([("reader", {"n": 4})])  # its number is new, though older rows are gone
    assert log.read() == [("writer", {"n": 4})]
    assert log.read() == []
    writer.close()


def test_a_file_that_is_no_database_is_refused_and_left_alone(file: Path) -> None:
    file.write_text("precious " * 1000)
    with pytest.raises(UsageError, match=r"(?s)cannot use the file .*not a database.*name a file"):
        SqliteLog(file, "reader")
    assert file.read_text().startswith("precious")


def test_another_heads_content_is_refused(log: SqliteLog) -> None:
    for head in ({}, {"run_id": "../up", "session": "s", "state": "running", "ttl": 1}):
        log.set_head(head)
        with pytest.raises(UsageError, match="not the head of a channel"):
            Head.of(log)


def test_a_removed_file_is_reported(file: Path) -> None:
    log = SqliteLog(file, "reader")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DROP TABLE letters")
    with pytest.raises(DraftcoreError, match=r"(?s)cannot be read: no such table.*start again"):
        log.read()
    log.close()
