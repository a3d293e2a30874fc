"""The hook of the channel `dir`. Thin on purpose: what is heavy is imported inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore_disagg.channel import Channel


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("channel", "dir")]


@hookimpl
def channel(name: str, uri: str, secret: bytes, patience: float) -> Channel:
    from draftcore_sharedfs.channel import DirChannel  # keeps list-plugins quick

    return DirChannel.open(uri, secret, patience)
