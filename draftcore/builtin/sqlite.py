"""Built-in plugin `sqlite`: a channel for the processes of one host, in an SQLite file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.offers import Offer

if TYPE_CHECKING:
    from draftcore.channels.logged import LoggedChannel


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("channel", "sqlite", frozenset({"shared"}))]


@hookimpl
def channel(name: str, uri: str, run_id: str, role: str) -> LoggedChannel | None:
    if name != "sqlite":
        return None
    from draftcore.channels.sqlite import SqliteLog

    return SqliteLog.open(uri, run_id, role)
