"""The engine `vllm`, the captures `vllm` and `vllm-server`; what is heavy is imported inside the hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore_eval.engines import Engine, Serving

    from draftcore.contracts.capture import Capture, FeatureRequest
    from draftcore.contracts.target import TargetSpec

OPTIONS = "draftcore_vllm.options"


@hookimpl
def describe() -> Sequence[Offer]:
    gives = frozenset({"embeddings"})
    return [
        Offer("engine", "vllm", options=f"{OPTIONS}:EngineOptions"),
        Offer("capture", "vllm", gives, f"{OPTIONS}:VllmOptions"),
        Offer("capture", "vllm-server", gives | {"per-rank"}, f"{OPTIONS}:ServerOptions"),
    ]


@hookimpl
def engine(name: str, serving: Serving, options: Any) -> Engine:
    from draftcore_vllm.engine import VllmEngine

    return VllmEngine(serving, options)


@hookimpl
def capture(name: str, target: TargetSpec, request: FeatureRequest, options: Any) -> Capture:
    from draftcore_vllm.capture import VllmCapture

    return VllmCapture(target, request, options)
