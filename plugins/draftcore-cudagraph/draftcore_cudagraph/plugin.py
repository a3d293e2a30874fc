"""The hooks of the graph backends and of `tbo`. Thin: what is heavy is imported inside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftcore import hookimpl
from draftcore.offers import Offer

if TYPE_CHECKING:
    from draftcore.graphs import GraphBackend, GraphPlugin

OPTIONS = "draftcore_cudagraph.options"
BREAKABLE = frozenset({"device:cuda", "breaks"})
PIECEWISE = frozenset({"device:cuda", "device:cpu"})  # there, with compilers that record nothing

OVERLAPS = frozenset({"phase:prefill", "forks"})


@hookimpl
def describe() -> Sequence[Offer]:
    return [
        Offer("graph", "full", frozenset({"device:cuda", "auto:cuda", "forks"})),
        Offer("graph", "breakable", BREAKABLE, f"{OPTIONS}:BreakableOptions"),
        Offer("graph", "piecewise", PIECEWISE, f"{OPTIONS}:PiecewiseOptions"),
        Offer("graph-plugin", "tbo", OVERLAPS, f"{OPTIONS}:OverlapOptions"),
    ]


@hookimpl
def graph_backend(name: str, options: Any) -> GraphBackend | None:
    """Open a backend. Raises UsageError where there is no CUDA to record on."""
    if name == "piecewise":
        from draftcore_cudagraph.piecewise import PiecewiseBackend

        return PiecewiseBackend.open(options)
    if name not in ("full", "breakable"):
        return None
    from draftcore_cudagraph.cuda import open_backend  # torch, 1.2 s: keeps list-plugins quick

    return open_backend(name, options)


@hookimpl
def graph_plugin(name: str, options: Any) -> GraphPlugin | None:
    if name != "tbo":
        return None
    from draftcore_cudagraph.tbo import TwoBatchOverlap

    return TwoBatchOverlap(options.least_share)
