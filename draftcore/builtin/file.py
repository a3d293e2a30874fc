"""Built-in plugin `file`: a store of safetensors shards in a folder, which outlives the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.offers import Offer

if TYPE_CHECKING:
    from draftcore.stores.file import FileStore


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("store", "file", frozenset({"durable", "one-writer", "shared"}))]


@hookimpl
def feature_store(name: str, uri: str) -> FileStore | None:
    if name != "file":
        return None
    from draftcore.stores.file import FileStore  # torch, 1.6 s: keeps list-plugins quick

    return FileStore.open(uri)
