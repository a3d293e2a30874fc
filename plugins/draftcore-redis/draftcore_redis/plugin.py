"""The hook of the channel `redis`. Thin on purpose: what is heavy is imported inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.channels.logged import LoggedChannel


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("channel", "redis", frozenset({"shared"}))]


@hookimpl
def channel(name: str, uri: str, run_id: str, role: str) -> LoggedChannel | None:
    if name != "redis":
        return None
    from draftcore_redis.log import RedisLog  # the client, 0.2 s: keeps list-plugins quick

    return RedisLog.open(uri, run_id, role)
