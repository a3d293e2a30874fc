"""Built-in plugin `shm`: a store in shared memory, for the processes of one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.offers import Offer

if TYPE_CHECKING:
    from draftcore.stores.shm import ShmStore


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("store", "shm", frozenset({"shared"}))]


@hookimpl
def feature_store(name: str, uri: str) -> ShmStore | None:
    if name != "shm":
        return None
    from draftcore.stores.shm import ShmStore  # torch, 1.6 s: keeps list-plugins quick

    return ShmStore.open(uri)
