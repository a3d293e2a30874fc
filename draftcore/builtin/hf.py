"""Built-in plugin `hf`: capture by transformers in this process, for any causal LM it loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.offers import Offer

if TYPE_CHECKING:
    from draftcore.local_capture import LocalCapture
    from draftcore.records import FeatureRequest
    from draftcore.target import TargetSpec


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("capture", "hf", frozenset({"graphs", "overlap"}))]


@hookimpl
def capture(name: str, target: TargetSpec, request: FeatureRequest) -> LocalCapture:
    from draftcore.local_capture import LocalCapture  # torch, 1.6 s: keeps list-plugins quick

    return LocalCapture(target, request)
