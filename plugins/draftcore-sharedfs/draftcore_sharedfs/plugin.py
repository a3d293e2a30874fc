"""The hook of the channel `dir`. Thin on purpose: what is heavy is imported inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.channels.logged import LoggedChannel


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("channel", "dir", frozenset({"shared"}))]


@hookimpl
def channel(name: str, uri: str, run_id: str, role: str) -> LoggedChannel | None:
    if name != "dir":
        return None
    from draftcore_sharedfs.log import DirLog  # keeps list-plugins quick

    return DirLog.open(uri, run_id, role)
