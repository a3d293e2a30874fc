"""The plugin that draftcore brings along, and the verbs that do its work: capture, train, export.

It registers as third parties do, by an entry point and through hooks. Each verb reads one YAML file with
dotted overrides and calls the function of `draftcore.api` that does its work; torch comes in only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftcore import api, hookimpl
from draftcore.errors import ExitStatus

if TYPE_CHECKING:
    from draftcore.plugins.registry import Registry

FOLDER = click.Path(file_okay=False, path_type=Path)
EXAMPLE = "For example: draftcore {}"


def configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb CONFIG.yaml and any number of KEY=VALUE overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    function = click.argument("config", type=click.Path(path_type=Path))(function)
    return click.pass_obj(function)


@click.command(epilog=EXAMPLE.format("capture run.yaml store=file:features"))
@configured
def capture(registry: Registry, config: Path, overrides: tuple[str, ...]) -> None:
    """Capture the target's features into a durable store.

    Stopped or killed, the same command goes on where it was; no sample is captured twice. The
    finished store is all that `train` needs on another host.
    """
    api.capture(config, *overrides, registry=registry, say=click.echo)


@click.command(epilog=EXAMPLE.format("train run.yaml train.lr=3e-4 run=runs/higher-rate"))
@configured
@click.option("--trainer", is_flag=True, help="Start no others: producers are started elsewhere.")
@click.option("--dry-run", is_flag=True, help="Say what it would take, as `draftcore plan` does.")
def train(
    registry: Registry, config: Path, overrides: tuple[str, ...], trainer: bool, dry_run: bool
) -> None:
    """Train a run's drafts, each from its last checkpoint if any.

    Features are captured on the way, once for all drafts; with a store that keeps them, what it lacks
    is captured first. Ctrl-C ends the step, writes checkpoints and stops; the same command goes on.

    With `topology`, capture and training are processes of their own, which this command starts and
    keeps alive. On several machines, start one by --trainer, and any number of `draftcore produce`. Ranks
    that torchrun started train together; another number of them may go on.
    """
    if dry_run:
        plan = registry.find("verb", "plan").verbs["plan"]
        click.get_current_context().invoke(plan, config=config, overrides=overrides)
        return
    done = api.train(config, *overrides, trainer=trainer, registry=registry, say=click.echo)
    if done.reason == "interrupted":
        raise click.exceptions.Exit(ExitStatus.INTERRUPTED)


@click.command(epilog=EXAMPLE.format("export run.yaml --out my-draft"))
@configured
@click.option("--draft", help="One of the run's `drafts`; all if not given.")
@click.option("--checkpoint", type=FOLDER, help="A step-* folder, or best; else the newest.")
@click.option("--out", type=FOLDER, help="Folder to write; RUN[/DRAFT]/export if not given.")
@click.option("--layout", default="serving", show_default=True, help="A layout of the algorithm.")
@click.option("--force", is_flag=True, help="Replace the export that is there.")
def export(registry: Registry, config: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Write a trained draft in the layout that servers load."""
    api.export(config, *overrides, registry=registry, say=click.echo, **options)


@hookimpl
def commands() -> Sequence[click.Command]:
    return [capture, train, export]
