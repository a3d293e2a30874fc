"""Built-in plugin `dir`: a channel for several hosts, in a folder they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.offers import Offer

if TYPE_CHECKING:
    from draftcore.channels.logged import LoggedChannel


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("channel", "dir", frozenset({"shared"}))]


@hookimpl
def channel(name: str, uri: str, run_id: str, role: str) -> LoggedChannel | None:
    if name != "dir":
        return None
    from draftcore.channels.dir import DirLog

    return DirLog.open(uri, run_id, role)
