"""The captures `sglang` and `sglang-server`, the engine `sglang`; what is heavy is imported inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore_sglang import INSTALL

if TYPE_CHECKING:
    from draftcore_eval.engines import Engine, Serving

    from draftcore.contracts.capture import Capture, FeatureRequest
    from draftcore.contracts.target import TargetSpec


OPTIONS = "draftcore_sglang.options"
IN_PROCESS, SERVER = frozenset({"images"}), frozenset({"images", "per-rank"})


@hookimpl
def describe() -> Sequence[Offer]:
    return [
        Offer(
            "capture", "sglang", IN_PROCESS, f"{OPTIONS}:SglangOptions", needs={"sglang": INSTALL}
        ),
        Offer("capture", "sglang-server", SERVER, f"{OPTIONS}:ServerOptions"),
        Offer("engine", "sglang", options=f"{OPTIONS}:EngineOptions"),
    ]


@hookimpl
def capture(name: str, target: TargetSpec, request: FeatureRequest, options: Any) -> Capture:
    if name == "sglang":
        from draftcore_sglang.capture import SglangCapture  # torch: keeps list-plugins quick

        return SglangCapture(target, request, options)
    from draftcore_sglang.remote import ServerCapture

    return ServerCapture(target, request, options)


@hookimpl
def engine(name: str, serving: Serving, options: Any) -> Engine:
    from draftcore_sglang.served import SglangEngine

    return SglangEngine(serving, options)
