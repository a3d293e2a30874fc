"""Built-in plugin `memory`: a store and a channel for runs of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.offers import Offer

if TYPE_CHECKING:
    from draftcore.channels.memory import MemoryChannel
    from draftcore.stores.memory import MemoryStore


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("store", "memory"), Offer("channel", "memory")]


@hookimpl
def feature_store(name: str, uri: str) -> MemoryStore | None:
    if name != "memory":
        return None
    from draftcore.stores.memory import MemoryStore  # torch, 1.6 s: keeps list-plugins quick

    return MemoryStore.open(uri)


@hookimpl
def channel(name: str, uri: str, run_id: str, role: str) -> MemoryChannel | None:
    if name != "memory":
        return None
    from draftcore.channels.memory import MemoryChannel

    return MemoryChannel.open(uri, run_id, role)
