"""The plugin: captures `sglang` and `sglang-server`; what is heavy is imported inside the hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.contracts.capture import Capture, FeatureRequest
    from draftcore.contracts.target import TargetSpec
    from draftcore_sglang.options import ServerOptions, SglangOptions


@hookimpl
def describe() -> Sequence[Offer]:
    return [
        Offer(
            "capture",
            "sglang",
            frozenset({"images"}),
            options="draftcore_sglang.options:SglangOptions",
        ),
        Offer(
            "capture",
            "sglang-server",
            frozenset({"images", "per-rank"}),
            options="draftcore_sglang.options:ServerOptions",
        ),
    ]


@hookimpl
def capture(
    name: str,
    target: TargetSpec,
    request: FeatureRequest,
    options: SglangOptions | ServerOptions,
) -> Capture | None:
    if name == "sglang":
        from draftcore_sglang.capture import SglangCapture  # torch: keeps list-plugins quick
        from draftcore_sglang.options import SglangOptions

        assert isinstance(options, SglangOptions)
        return SglangCapture(target, request, options)
    if name == "sglang-server":
        from draftcore_sglang.options import ServerOptions
        from draftcore_sglang.remote import ServerCapture

        assert isinstance(options, ServerOptions)
        return ServerCapture(target, request, options)
    return None
