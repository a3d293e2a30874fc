"""The hooks of the target `hf` and of its capture. What is heavy is imported inside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.contracts.capture import Capture, FeatureRequest
    from draftcore.contracts.target import TargetSpec
    from draftcore_hf.options import TargetOptions

CAPTURES = "embeddings graphs images per-rank tensor-parallel topk"


@hookimpl
def describe() -> Sequence[Offer]:
    return [
        Offer("target", "hf", options="draftcore_hf.options:TargetOptions"),
        Offer("capture", "hf", frozenset(CAPTURES.split())),
    ]


@hookimpl
def target(name: str, options: TargetOptions) -> TargetSpec:
    from draftcore_hf.target import TransformersTarget

    return TransformersTarget(**options.model_dump())


@hookimpl
def capture(name: str, target: TargetSpec, request: FeatureRequest) -> Capture:
    from draftcore_hf.capture import LocalCapture

    return LocalCapture(target, request)
