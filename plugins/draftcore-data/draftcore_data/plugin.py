"""The command `data` and its own commands. What is slow to import is imported inside them."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.errors import ExitStatus
from draftcore_data import api

if TYPE_CHECKING:
    from draftcore.contracts.capture import ImageProcessor
    from draftcore.contracts.run import OpenRun
    from draftcore.contracts.target import TargetSpec
    from draftcore_data.options import DataOptions
    from draftcore_data.rows import Conversations
    from draftcore_data.source import Source


class Number(click.FloatRange):
    """A number within bounds, which nan is not."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number: float = super().convert(value, param, ctx)
        return self.fail("nan is no number", param, ctx) if math.isnan(number) else number


@click.group()
def data() -> None:
    """Make, show and check what a run learns from."""


@data.command()
@click.argument("source", metavar="RUN.yaml|SOURCE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--endpoint", "endpoints", multiple=True, help="A server's address; several work side by side."
)
@click.option("--in-process", is_flag=True, help="The run's target here, greedy; no server.")
@click.option("--model", help="The model's name at the servers; if they have one, that.")
@click.option(
    "--concurrency", type=click.IntRange(1, 10_000),
    help="Conversations under way at a time; as many as servers keep up with, up to 256 each, if not "
    "given. In process, rows of a batch: 32.",
)  # fmt: skip
@click.option("--rows", type=click.IntRange(1), help="Read this many rows at most.")
@click.option(
    "--max-tokens", type=click.IntRange(1), default=2048, show_default=True,
    help="Longest answer, its reasoning included.",
)  # fmt: skip
@click.option("--temperature", type=Number(0), help="The server's default if not given.")
@click.option("--top-p", type=Number(0, 1), help="The server's default if not given.")
@click.option("--seed", type=int, help="None if not given.")
@click.option("--reasoning-effort", help="low, medium, high: as the model's template takes it.")
@click.option(
    "--timeout", type=Number(0, min_open=True), default=600.0, show_default=True,
    help="Seconds to wait for one answer.",
)  # fmt: skip
@click.option(
    "--patience", type=Number(0), default=600.0, show_default=True,
    help="Seconds without any answer until it gives up.",
)  # fmt: skip
@click.pass_context
def regenerate(
    ctx: click.Context, /, source: str, overrides: tuple[str, ...], out: Path, **options: Any
) -> None:
    """Have the target answer the conversations of a run or a source anew.

    Each assistant turn is asked for again, in order, after the answers given before. The answers are
    lines of JSON that `data.train` takes. Killed or stopped, the same command goes on; rows that
    failed are listed beside the file, and the exit status is then 1.
    """
    job = api.regenerate(source, *overrides, out=out, **options, registry=ctx.obj)
    for line in job.summary(out):
        click.echo(line)
    if job.failed:
        ctx.exit(ExitStatus.FAILED)


def on_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb a run, by its YAML and KEY=VALUE overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    function = click.argument("config", type=click.Path(path_type=Path))(function)
    return click.pass_obj(function)


@data.command()
@on_run
@click.option("--rows", type=click.IntRange(0), default=3, show_default=True, help="Rows to show.")
@click.option("--json", "as_json", is_flag=True, help="Print rows and figures as JSON.")
def show(registry: Any, config: Path, overrides: tuple[str, ...], rows: int, as_json: bool) -> None:
    """Show rows as they will be learned, and figures over all of them.

    What is learned is coloured, or stands in brackets where the output is no terminal. What is
    rendered is what `train` uses, which does not render it again.
    """
    shown = api.show(config, *overrides, rows=rows, registry=registry)
    if as_json:
        rows_shown = [asdict(row) for row in shown.rows]
        click.echo(json.dumps({**shown.figures, "rows": rows_shown}, indent=1))
        return
    from draftcore_data.show import lines

    coloured = sys.stdout.isatty()
    mark = functools.partial(click.style, fg="green") if coloured else "\u27e6{}\u27e7".format
    for at, row in enumerate(shown.rows):
        click.secho(f"row {at}: {row.tokens:,} tokens, {row.learned:,} learned", bold=True)
        click.echo(row.text(mark).rstrip("\n") + "\n")
    for name, value in lines(shown.figures):
        click.echo(f"{name:24}  {value}")


@data.command()
@on_run
@click.option("--rows", type=click.IntRange(1), default=32, show_default=True, help="Rows to read.")
@click.option(
    "--max-tokens", type=click.IntRange(1), default=128, show_default=True,
    help="Of each answer, and of the target's own.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print verdict and figures as JSON.")
def check(
    registry: Any, config: Path, overrides: tuple[str, ...], as_json: bool, **sizes: int
) -> None:
    """Say whether the answers of a run's data are the target's own.

    The target reads the first answers of some rows, and answers the same prompts itself. The exit
    status is 1 if they are others' answers.
    """
    verdict = api.check(config, *overrides, **sizes, registry=registry)
    lines = [json.dumps(verdict.to_json(), indent=1)] if as_json else verdict.lines()
    click.echo("\n".join(lines))
    if verdict.name == "foreign":
        raise click.exceptions.Exit(ExitStatus.FAILED)


@hookimpl
def describe() -> Sequence[Offer]:
    return [
        Offer("samples", "conversations", options="draftcore_data.options:DataOptions"),
        *(Offer("source", name) for name in ("files", "hf")),
        Offer("images", "processor"),
    ]


@hookimpl
def samples(name: str, run: OpenRun, options: DataOptions) -> Conversations:
    from draftcore_data.rows import Conversations

    return Conversations(run, options)


@hookimpl
def source(name: str, uri: str) -> Source:
    from draftcore_data.files import open_files
    from draftcore_data.tables import open_table

    return open_table(uri) if name == "hf" else open_files(uri)


@hookimpl
def image_processor(name: str, target: TargetSpec) -> ImageProcessor:
    from draftcore_data.images import OwnProcessor

    return OwnProcessor(target.path, target.source)


@hookimpl
def commands() -> Sequence[click.Command]:
    return [data]
