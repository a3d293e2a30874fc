"""Built-in plugin `recording`: a graph backend for any device, which shows what a graph would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.offers import Offer

if TYPE_CHECKING:
    from draftcore.graphs.recording import RecordingBackend


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("graph", "recording", frozenset({"forks"}))]


@hookimpl
def graph_backend(name: str) -> RecordingBackend | None:
    if name != "recording":
        return None
    from draftcore.graphs.recording import RecordingBackend  # torch: keeps list-plugins quick

    return RecordingBackend()
