"""The channel `sqlite`: the conformance suite, and what is its own."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from draftcore.channels.logged import Head
from draftcore.channels.sqlite import SqliteLog
from draftcore.testing.channels import ChannelSuite


class TestSqliteChannel(ChannelSuite):
    plugin = "draftcore.builtin.sqlite"

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
