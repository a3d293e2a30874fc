"""The hook of the store `mooncake`. Thin on purpose: what is heavy is imported inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore_mooncake import INSTALL

if TYPE_CHECKING:
    from draftcore_mooncake.store import MooncakeStore


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("store", "mooncake", frozenset({"shared"}), needs={"mooncake": INSTALL})]


@hookimpl
def feature_store(name: str, uri: str) -> MooncakeStore:
    from draftcore_mooncake.store import MooncakeStore  # torch, 1.6 s: keeps list-plugins quick

    return MooncakeStore.open(uri)
