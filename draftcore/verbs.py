"""The verbs that do the work: capture, train, eval, export.

They are commands of a plugin like any other's. Each reads one YAML file with dotted overrides and
hands a `Run` to the part of draftcore that does it; torch comes in only then.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from draftcore.errors import DraftcoreError, UsageError, raised

if TYPE_CHECKING:
    from draftcore.config import RunConfig
    from draftcore.plugins.registry import Registry
    from draftcore.run import DraftRun, Run

Role = Literal["both", "trainer", "producer"]
FOLDER = click.Path(file_okay=False, path_type=Path)
EXAMPLE = "For example: draftcore {}"


def configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb CONFIG.yaml and any number of KEY=VALUE overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    function = click.argument("config", type=click.Path(path_type=Path))(function)
    return click.pass_obj(function)


def run_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb its configured run."""

    @configured
    @functools.wraps(function)
    def verb(registry: Registry, config: Path, overrides: Sequence[str], **given: Any) -> None:
        from draftcore.config import load_config  # pydantic, then torch: only for a verb that works

        with open_run(registry, load_config(config, overrides)) as run:
            function(run, **given)

    return verb


@contextmanager
def open_run(registry: Registry, settings: RunConfig, *, role: Role | None = None) -> Iterator[Run]:
    """Open a configured run; without a role it refuses to be started by torchrun."""
    # Spinning OpenMP threads make a step 7 to 20 times slower where another process wants the
    # cores (docs/performance.md, 2026-11-21); read once, when torch loads libgomp.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch's own place for compiled code is a name in /tmp that any user can make first.
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "draftcore/inductor")
    )
    from draftcore.run import Run
    from draftcore.training.distributed import join

    with join(settings.train, alone=role in (None, "producer")) as ranks:
        run = Run(settings, registry, ranks)
        with run.closing:
            try:
                yield run
            except SystemExit as error:
                if error.code:
                    raise
                raise DraftcoreError(f"{raised(error)} ended the run before its work") from error


plan_option = click.option(
    "--plan", "planned", is_flag=True, help="Print what `runner` comes to, and do nothing."
)
draft_option = click.option("--draft", "label", help="One of the run's `drafts`; all if not given.")


def show_runners(run: Run) -> None:
    """Print what the runners have to say of what they ran, those that were needed."""
    for phase, runner in run.runners.items():
        for line in runner.report():
            show_row(f"runner.{phase}", line)


def show_plan(run: Run) -> None:
    lines = [("PHASE", "KEY", "VALUE", "DECIDED BY")]
    for phase, runner in run.runners.items():
        chosen = getattr(run.config.runner, phase)
        who = "you" if phase in run.config.runner.model_fields_set else "default"
        lines.append((phase, "runner", chosen.name, who))
        lines += [(phase, *row) for row in runner.plan(run.target)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


@click.command(epilog=EXAMPLE.format("capture run.yaml store=file:features"))
@run_command
@plan_option
def capture(run: Run, planned: bool) -> None:
    """Capture the target's features into a durable store.

    Stopped or killed, the same command goes on where it was; no sample is captured twice. The
    finished store is all that `train` needs on another host.
    """
    from draftcore.run import capture_all

    if planned:
        return show_plan(run)
    click.echo(capture_all(run))
    show_runners(run)


@click.command(epilog=EXAMPLE.format("train run.yaml train.lr=3e-4 run=runs/higher-rate"))
@configured
@click.option("--role", type=click.Choice(["trainer", "producer"]), help="Be this process only.")
@click.pass_context
def train(
    ctx: click.Context,
    registry: Registry,
    config: Path,
    overrides: tuple[str, ...],
    role: Role | None,
) -> None:
    """Train a run's drafts, each from its last checkpoint if any.

    Features are captured on the way, once for all drafts; with a store that keeps them, what it lacks
    is captured first. Ctrl-C ends the step, writes checkpoints and stops; the same command goes on.

    With `topology`, capture and training are processes of their own, which this command starts and
    keeps alive. On several machines, start one trainer and any number of producers by --role. Ranks
    that torchrun started train together; another number of them may go on.
    """
    from draftcore.config import load_config

    settings = load_config(config, overrides)
    topology = settings.topology
    several = topology.producers > 0 or topology.ranks > 1
    if role is None and several and "WORLD_SIZE" not in os.environ:
        ctx.exit(launch(ctx, settings, config, overrides))
    if role is None and topology.producers > 0:
        role = "trainer"
    with open_run(registry, settings, role=role or "both") as run:
        from draftcore.run import produce_features
        from draftcore.run import train as train_run

        if role == "producer":
            click.echo(f"waiting for the trainer of {settings.run}", err=True)
            reason, line = produce_features(run)
            click.echo(line)
        else:
            reason = train_run(run, role or "both", click.echo)
            show_runners(run)
    if reason == "interrupted":
        raise click.exceptions.Exit(130)


def launch(ctx: click.Context, settings: RunConfig, config: Path, overrides: Sequence[str]) -> int:
    """Run the processes of a topology on this machine; returns the trainer's exit status."""
    from draftcore.launcher import Child, Launcher, devices

    topology = settings.topology
    files = [part for file in ctx.find_root().params["plugin"] for part in ("--plugin", str(file))]
    verb = [sys.executable, "-m", "draftcore", *files, "train", str(config), *overrides]
    role = ["--role", "trainer"] if topology.producers else []
    where = devices(topology.ranks, topology.producers)
    ranks = [
        Child(f"rank {rank}", [*verb, *role], env=where.get(f"rank {rank}", {}))
        for rank in range(topology.ranks)
    ]
    producers = [
        Child(
            f"producer {number}",
            [*verb, "--role", "producer"],
            settings.run / "logs" / f"producer-{number}.log",
            env=where.get(f"producer {number}", {}),
        )
        for number in range(topology.producers)
    ]
    code = Launcher(ranks, producers, topology.restarts).run()
    return code or require_done(settings)


def require_done(settings: RunConfig) -> int:
    """Return 0. Raises DraftcoreError where a draft was not stopped and lacks its last checkpoint."""
    for folder in [settings.run / label for label in settings.drafts] or [settings.run]:
        marks = sorted((folder / "checkpoints").glob("step-*/COMPLETE"))
        try:
            state = json.loads((marks[-1].parent / "state.json").read_text())
            done = state["step"] == state["total_steps"] or state.get("stopped")
        except (IndexError, OSError, ValueError, TypeError, KeyError, AttributeError):
            done = False
        if not done:
            raise DraftcoreError(
                f"the ranks ended without an error, and {folder} has no checkpoint of the last step\n"
                "  start the same command again: the run goes on from its last checkpoint"
            )
    return 0


def only_one(drafts: Sequence[DraftRun], **given: Path | None) -> None:
    """Raise UsageError where a folder is given, which can be of one draft only, for several."""
    named = [f"--{name}" for name, folder in given.items() if folder is not None]
    if named and len(drafts) > 1:
        labels = ", ".join(draft.label for draft in drafts)
        raise UsageError(
            f"{' and '.join(named)} can be given for one draft only, and the run has {labels}\n"
            "  choose one with --draft"
        )


@click.command(name="eval", epilog=EXAMPLE.format("eval run.yaml eval.prompts=50"))
@run_command
@plan_option
@draft_option
@click.option("--checkpoint", type=FOLDER, help="A step-* folder; the newest if not given.")
@click.option("--export", "exported", type=FOLDER, help="Evaluate an exported draft instead.")
@click.option(
    "--out", type=FOLDER, help="Folder of report and plot; RUN[/DRAFT]/eval if not given."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the report as JSON; by draft if several."
)
def evaluate(
    run: Run,
    label: str | None,
    checkpoint: Path | None,
    exported: Path | None,
    out: Path | None,
    as_json: bool,
    planned: bool,
) -> None:
    """Decode the eval prompts for real, and measure acceptance.

    Greedy output is compared with the target's own generate, token by token; a difference is an
    error, not a statistic.
    """
    from draftcore.export import open_draft
    from draftcore.run import evaluate_draft

    if planned:
        return show_plan(run)
    drafts, reports = run.chosen(label), {}
    only_one(drafts, checkpoint=checkpoint, export=exported, out=out)
    for draft in drafts:
        built, step = open_draft(draft, checkpoint, exported)
        report = reports[draft.label] = evaluate_draft(draft, built, step)
        folder = out or draft.folder / "eval"
        if not as_json:  # first, as decoding took minutes and the disk may be full
            for name, value in [("draft", draft.label)] * bool(draft.label) + report.lines():
                show_row(name, value)
        report.write(folder)
        if not as_json:
            show_row("report and plot", str(folder))
    if not as_json:
        show_runners(run)
    else:
        data = {label: report.to_json() for label, report in reports.items()}
        click.echo(json.dumps(data.get("", data), indent=1))


def show_row(name: str, value: str) -> None:
    click.echo(f"{name:28}  {value}")


@click.command(epilog=EXAMPLE.format("export run.yaml --out my-draft"))
@run_command
@draft_option
@click.option("--checkpoint", type=FOLDER, help="A step-* folder; the newest if not given.")
@click.option("--out", type=FOLDER, help="Folder to write; RUN[/DRAFT]/export if not given.")
@click.option("--layout", default="serving", show_default=True, help="A layout of the algorithm.")
def export(
    run: Run, label: str | None, checkpoint: Path | None, out: Path | None, layout: str
) -> None:
    """Write a trained draft in the layout that servers load."""
    from draftcore.export import export, find_checkpoint

    drafts = run.chosen(label)
    only_one(drafts, checkpoint=checkpoint, out=out)
    for draft in drafts:
        found = find_checkpoint(draft, checkpoint)
        folder = export(draft, found, out or draft.folder / "export", layout)
        click.echo(f"{draft.of}exported step {found.step} to {folder}")
