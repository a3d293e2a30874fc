"""The hooks of this plugin: runners, graph backends, and the graph plugin `tbo`.

A hook imports what it opens, as torch and pydantic would slow down the listing of plugins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.contracts.runner import GraphBackend, GraphPlugin, Runner, RunnerContext

OPTIONS = "draftcore_graphs.options"
FULL = frozenset({"device:cuda", "auto:cuda", "forks"})
BREAKABLE = frozenset({"device:cuda", "breaks"})
PIECEWISE = frozenset({"device:cuda", "device:cpu"})  # on a CPU some of its compilers run
TBO = frozenset({"phase:prefill", "forks"})


@hookimpl
def describe() -> Sequence[Offer]:
    return [
        Offer("runner", "graphs", options=f"{OPTIONS}:GraphsOptions"),
        Offer("runner", "compiled"),
        Offer("graph", "full", FULL),
        Offer("graph", "breakable", BREAKABLE, f"{OPTIONS}:BreakableOptions"),
        Offer("graph", "piecewise", PIECEWISE, f"{OPTIONS}:PiecewiseOptions"),
        Offer("graph", "recording", frozenset({"forks"})),
        Offer("graph-plugin", "tbo", TBO, f"{OPTIONS}:OverlapOptions"),
    ]


@hookimpl
def runner(name: str, context: RunnerContext, options: Any) -> Runner | None:
    if name == "compiled":
        from draftcore_graphs.compiled import Compiled

        return Compiled()
    if name != "graphs":
        return None
    from draftcore_graphs.graphs import Graphs

    return Graphs(context, options)


@hookimpl
def graph_backend(name: str, options: Any) -> GraphBackend | None:
    """Open a backend. Raises UsageError where it records CUDA graphs and there is no CUDA device."""
    if name in ("full", "breakable"):
        from draftcore_graphs.cuda import open_backend

        return open_backend(name, options)
    if name == "piecewise":
        from draftcore_graphs.piecewise import PiecewiseBackend

        return PiecewiseBackend.open(options)
    if name == "recording":
        from draftcore_graphs.recording import RecordingBackend

        return RecordingBackend()
    return None


@hookimpl
def graph_plugin(name: str, options: Any) -> GraphPlugin | None:
    if name != "tbo":
        return None
    from draftcore_graphs.tbo import TwoBatchOverlap

    return TwoBatchOverlap(options.least_share)
