"""The verbs that do the work: capture, train, eval, export.

They are commands of a plugin like any other's. Each reads one YAML file with dotted overrides and
calls the function of `draftcore.api` that does its work; torch comes in only then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftcore import api
from draftcore.errors import ExitStatus

if TYPE_CHECKING:
    from draftcore.plugins.registry import Registry
    from draftcore.run import Role

FOLDER = click.Path(file_okay=False, path_type=Path)
EXAMPLE = "For example: draftcore {}"


def configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb CONFIG.yaml and any number of KEY=VALUE overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    function = click.argument("config", type=click.Path(path_type=Path))(function)
    return click.pass_obj(function)


draft_option = click.option("--draft", help="One of the run's `drafts`; all if not given.")


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
@click.option("--role", type=click.Choice(["trainer", "producer"]), help="Be this process only.")
def train(registry: Registry, config: Path, overrides: tuple[str, ...], role: Role | None) -> None:
    """Train a run's drafts, each from its last checkpoint if any.

    Features are captured on the way, once for all drafts; with a store that keeps them, what it lacks
    is captured first. Ctrl-C ends the step, writes checkpoints and stops; the same command goes on.

    With `topology`, capture and training are processes of their own, which this command starts and
    keeps alive. On several machines, start one trainer and any number of producers by --role. Ranks
    that torchrun started train together; another number of them may go on.
    """
    done = api.train(config, *overrides, role=role, registry=registry, say=click.echo)
    if done.reason == "interrupted":
        raise click.exceptions.Exit(ExitStatus.INTERRUPTED)


@click.command(name="eval", epilog=EXAMPLE.format("eval run.yaml eval.prompts=50"))
@configured
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
    registry: Registry, config: Path, overrides: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Decode the eval prompts for real, and measure acceptance.

    Greedy output is compared with the target's own generate, token by token; a difference is an
    error, not a statistic.
    """
    say = (lambda line: None) if as_json else click.echo
    reports = api.evaluate(config, *overrides, registry=registry, say=say, **options)
    if as_json:
        data = {report.about["draft"]: report.to_json() for report in reports}
        click.echo(json.dumps(data.get("", data), indent=1))


@click.command(epilog=EXAMPLE.format("export run.yaml --out my-draft"))
@configured
@draft_option
@click.option("--checkpoint", type=FOLDER, help="A step-* folder; the newest if not given.")
@click.option("--out", type=FOLDER, help="Folder to write; RUN[/DRAFT]/export if not given.")
@click.option("--layout", default="serving", show_default=True, help="A layout of the algorithm.")
@click.option("--force", is_flag=True, help="Replace the export that is there.")
def export(registry: Registry, config: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Write a trained draft in the layout that servers load."""
    api.export(config, *overrides, registry=registry, say=click.echo, **options)
