"""The hooks of the target, its capture and its rows. What is slow to import is imported inside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.contracts.capture import Capture, FeatureRequest
    from draftcore.contracts.run import OpenRun, RunSamples
    from draftcore.contracts.target import TargetSpec
    from draftcore_tinylm.options import RowsOptions, TargetOptions


@hookimpl
def describe() -> Sequence[Offer]:
    return [
        Offer("target", "tinylm", options="draftcore_tinylm.options:TargetOptions"),
        Offer("capture", "tinylm", frozenset({"embeddings", "topk"})),
        Offer("samples", "token-rows", options="draftcore_tinylm.options:RowsOptions"),
    ]


@hookimpl
def target(name: str, options: TargetOptions) -> TargetSpec:
    from draftcore_tinylm.target import TinyTarget

    return TinyTarget(options.path, options.dtype, options.device)


@hookimpl
def capture(name: str, target: TargetSpec, request: FeatureRequest) -> Capture:
    from draftcore_tinylm.capture import TinyCapture

    return TinyCapture(target, request)


@hookimpl
def samples(name: str, run: OpenRun, options: RowsOptions) -> RunSamples:
    from draftcore_tinylm.rows import TokenRows

    return TokenRows(options, run.target.vocab_size)
