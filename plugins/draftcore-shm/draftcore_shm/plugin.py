"""The plugin `shm`: a store that keeps features in shared memory, for the processes of one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore_shm.store import ShmStore


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("store", "shm", frozenset({"memory-speed", "shared"}))]


@hookimpl
def feature_store(name: str, uri: str) -> ShmStore:
    from draftcore_shm.store import ShmStore  # torch, 1.6 s: keeps list-plugins quick

    return ShmStore.open(uri)
