"""The hooks of the runner `graphs`, of the graph backends and of `tbo`; what is heavy is imported in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.contracts.runner import GraphBackend, GraphPlugin, Runner, RunnerContext

OPTIONS = "draftcore_graphs.options"
BREAKABLE = frozenset({"device:cuda", "breaks"})
PIECEWISE = frozenset({"device:cuda", "device:cpu"})  # there, with compilers that record nothing

OVERLAPS = frozenset({"phase:prefill", "forks"})


@hookimpl
def describe() -> Sequence[Offer]:
    return [
        Offer("runner", "graphs", options="draftcore_graphs.config:PhaseConfig"),
        Offer("graph", "recording", frozenset({"forks"})),
        Offer("graph", "full", frozenset({"device:cuda", "auto:cuda", "forks"})),
        Offer("graph", "breakable", BREAKABLE, f"{OPTIONS}:BreakableOptions"),
        Offer("graph", "piecewise", PIECEWISE, f"{OPTIONS}:PiecewiseOptions"),
        Offer("graph-plugin", "tbo", OVERLAPS, f"{OPTIONS}:OverlapOptions"),
    ]


@hookimpl
def runner(name: str, context: RunnerContext, options: Any) -> Runner | None:
    if name != "graphs":
        return None
    from draftcore_graphs.opening import Graphs

    return Graphs(context, options)


@hookimpl
def graph_backend(name: str, options: Any) -> GraphBackend | None:
    """Open a backend. Raises UsageError where there is no CUDA to record on."""
    if name == "piecewise":
        from draftcore_graphs.piecewise import PiecewiseBackend

        return PiecewiseBackend.open(options)
    if name == "recording":
        from draftcore_graphs.recording import RecordingBackend

        return RecordingBackend()
    if name not in ("full", "breakable"):
        return None
    from draftcore_graphs.cuda import open_backend  # torch, 1.2 s: keeps list-plugins quick

    return open_backend(name, options)


@hookimpl
def graph_plugin(name: str, options: Any) -> GraphPlugin | None:
    if name != "tbo":
        return None
    from draftcore_graphs.tbo import TwoBatchOverlap

    return TwoBatchOverlap(options.least_share)
