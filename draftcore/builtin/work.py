"""The verbs that do the work: capture, train, eval, export.

They are commands of a plugin like any other's. Each reads one YAML file with dotted overrides and
hands a `Run` to the part of draftcore that does it; torch comes in only then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftcore import hookimpl

if TYPE_CHECKING:
    from draftcore.plugins import Registry
    from draftcore.run import Run

FOLDER = click.Path(file_okay=False, path_type=Path)


def run_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb its configuration: CONFIG.yaml and any number of KEY=VALUE overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    function = click.argument("config", type=click.Path(path_type=Path))(function)
    return click.pass_obj(function)


@contextmanager
def open_run(registry: Registry, config: Path, overrides: Sequence[str]) -> Iterator[Run]:
    from draftcore.config import load_config  # pydantic, then torch: only for a verb that works

    settings = load_config(config, overrides)
    # Spinning OpenMP threads make a step 7 to 20 times slower where another process wants the
    # cores (docs/performance.md, 2026-11-21); read once, when torch loads libgomp.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from draftcore.run import Run

    run = Run(settings, registry)
    try:
        yield run
    finally:
        run.close()


@click.command()
@run_command
def capture(registry: Registry, config: Path, overrides: tuple[str, ...]) -> None:
    """Capture the target's features into a durable store.

    Stopped or killed, the same command goes on where it was; no sample is captured twice. The
    finished store is all that `train` needs on another host.
    """
    with open_run(registry, config, overrides) as run:
        from draftcore.capture import capture_all

        click.echo(capture_all(run))


@click.command()
@run_command
def train(registry: Registry, config: Path, overrides: tuple[str, ...]) -> None:
    """Train a draft, from the run's last checkpoint if it has one.

    Features come from the store; what it lacks is captured on the way. Ctrl-C ends the step,
    writes a checkpoint and stops; the same command goes on from there.
    """
    with open_run(registry, config, overrides) as run:
        from draftcore.training.trainer import Trainer

        trainer = Trainer(run)
        start, total = trainer.step, run.plan.total_steps
        if start == total:
            click.echo(f"already trained: {total} steps in {run.folder}")
            return
        if start:
            click.echo(f"resuming from step {start} of {total}")
        reason = trainer.train()
        click.echo(
            f"{reason}: step {trainer.step} of {total}, "
            f"{run.plan.samples_before(trainer.step)} samples, checkpoints in {trainer.checkpoints}"
        )
        if reason == "interrupted":
            raise click.exceptions.Exit(130)


@click.command(name="eval")
@run_command
@click.option("--checkpoint", type=FOLDER, help="A step-* folder; the run's newest if not given.")
@click.option("--export", "exported", type=FOLDER, help="Evaluate an exported draft instead.")
@click.option("--out", type=FOLDER, help="Folder of report and plot; RUN/eval if not given.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def evaluate(
    registry: Registry,
    config: Path,
    overrides: tuple[str, ...],
    checkpoint: Path | None,
    exported: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure acceptance by real speculative decoding of the eval prompts.

    Greedy output is compared with the target's own generate, token by token; a difference is an
    error, not a statistic.
    """
    with open_run(registry, config, overrides) as run:
        from draftcore.evaluation.session import evaluate_run

        report = evaluate_run(run, checkpoint, exported)
        folder = out or run.folder / "eval"
        report.write(folder)
        if as_json:
            click.echo(json.dumps(report.to_json(), indent=1))
            return
        for name, value in report.lines():
            click.echo(f"{name:28}  {value}")
        click.echo(f"{'report and plot':28}  {folder}")


@click.command()
@run_command
@click.option("--checkpoint", type=FOLDER, help="A step-* folder; the run's newest if not given.")
@click.option("--out", type=FOLDER, help="Folder to write; RUN/export if not given.")
@click.option("--layout", default="serving", show_default=True, help="A layout of the algorithm.")
def export(
    registry: Registry,
    config: Path,
    overrides: tuple[str, ...],
    checkpoint: Path | None,
    out: Path | None,
    layout: str,
) -> None:
    """Write a trained draft in the layout that servers load."""
    with open_run(registry, config, overrides) as run:
        from draftcore import drafts

        found = drafts.find_checkpoint(run, checkpoint)
        folder = drafts.export(run, found, out or run.folder / "export", layout)
        click.echo(f"exported step {found.step} to {folder}")


@hookimpl
def commands() -> Sequence[click.Command]:
    return [capture, train, evaluate, export]
