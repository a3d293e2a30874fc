"""The hook of the store `file`. Thin on purpose: what is heavy is imported inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.contracts.store import FeatureStore


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("store", "file", frozenset({"durable", "shared"}))]


@hookimpl
def feature_store(name: str, uri: str) -> FeatureStore:
    from draftcore_file.store import FileStore  # keeps list-plugins quick

    return FileStore.open(uri)
