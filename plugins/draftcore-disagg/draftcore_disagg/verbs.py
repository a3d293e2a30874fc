"""The verbs `produce`, `status` and `scale`. What is slow to import is imported inside them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from draftcore.errors import ExitStatus, UsageError
from draftcore_disagg import api


@click.command(epilog="For example: draftcore produce run.yaml target.device=cuda:1")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_obj
def produce(registry: Any, config: Path, overrides: tuple[str, ...]) -> None:
    """Capture for a run's trainer, until its run ends.

    Any number of these, on any number of machines, work for one trainer, which hands out batches.
    """
    if api.produce(config, *overrides, registry=registry, say=click.echo) == "interrupted":
        raise click.exceptions.Exit(ExitStatus.INTERRUPTED)


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--seconds", default=5.0, show_default=True, type=click.FloatRange(0.1, 3600),
    help="Time over which rates are taken.",
)  # fmt: skip
@click.pass_obj
def status(registry: Any, config: Path, overrides: tuple[str, ...], seconds: float) -> None:
    """Say how a run stands, and who waits for whom.

    From another terminal, in the run's folder or anywhere that sees it.
    """
    if math.isnan(seconds):
        raise UsageError("--seconds nan is no time\n  for example --seconds 5")
    from draftcore import load_config
    from draftcore_disagg.status import parts

    none = [("queue", "none: the trainer captures for itself, or is not at work")]
    for part in parts(load_config(config, overrides), registry, seconds):
        for name, value in part.lines() if part else none:
            click.echo(f"{name:28}  {value}")


@click.command(epilog="For example: draftcore scale run.yaml producers=24")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("asked", metavar="producers=N")
def scale(config: Path, asked: str) -> None:
    """Change how many producers a run has.

    From another terminal, while it goes on; at least one stays. Started again, the run has as many as
    its configuration says.
    """
    name, _, number = asked.partition("=")
    if name != "producers" or not number.isdecimal() or not 1 <= int(number) <= 1000:
        raise UsageError(f"{asked!r} is not producers=N\n  N is 1 to 1000, as in producers=24")
    api.scale(config, int(number))
    click.echo(f"{number} producers are asked for; draftcore status shows when they are there")
