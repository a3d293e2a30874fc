"""The hooks of this plugin: runners, graph backends, the graph plugin `tbo`, the verb `runners`.

A hook imports what it opens, as torch and pydantic would slow down the listing of plugins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.contracts.runner import GraphBackend, Runner, RunnerContext
    from draftcore_graphs.graph_plugin import GraphPlugin

OPTIONS = "draftcore_graphs.options"
FULL = frozenset({"device:cuda", "auto:cuda", "forks"})
BREAKABLE = frozenset({"device:cuda", "breaks"})
# On a CPU some of its compilers run. They do not trace what a drafter does in inference mode.
PIECEWISE = frozenset({"device:cuda", "device:cpu", "phase:prefill"})
TBO = frozenset({"phase:prefill", "forks"})


@click.command(epilog="For example: draftcore runners run.yaml runner.prefill.name=graphs")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_obj
def runners(registry: Any, config: Path, overrides: tuple[str, ...]) -> None:
    """Print the runner of each phase, and who decided it."""
    from draftcore import open_run
    from draftcore_graphs.graphs import Graphs

    rows = [("PHASE", "KEY", "VALUE", "DECIDED BY")]
    with open_run(config, overrides, registry) as run:
        phases = {"prefill": run.prefill, "decode": getattr(run.evaluation(), "runner", None)}
        for phase, runner in phases.items():
            choice = getattr(run.config.runner, phase)
            name, decided_by = (choice.name, "you") if choice else ("eager", "default")
            rows.append((phase, "runner", name, decided_by))
            if isinstance(runner, Graphs):
                rows += [(phase, *row) for row in runner.plan(run.target)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())


@hookimpl
def commands() -> Sequence[click.Command]:
    return [runners]


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
def runner(name: str, context: RunnerContext, options: Any) -> Runner:
    if name == "compiled":
        from draftcore_graphs.compiled import Compiled

        return Compiled()
    from draftcore_graphs.graphs import Graphs

    return Graphs(context, options)


@hookimpl
def graph_backend(name: str, options: Any) -> GraphBackend:
    """Open a backend. Raises UsageError where it records CUDA graphs and there is no CUDA device."""
    if name == "piecewise":
        from draftcore_graphs.piecewise import PiecewiseBackend

        return PiecewiseBackend.open(options.compiler)
    if name == "recording":
        from draftcore_graphs.recording import RecordingBackend

        return RecordingBackend()
    from draftcore_graphs.cuda import open_backend

    return open_backend(name, options)


@hookimpl
def graph_plugin(name: str, options: Any) -> GraphPlugin:
    from draftcore_graphs.tbo import TwoBatchOverlap

    return TwoBatchOverlap(options.least_share)
