"""The verbs `eval` and `served`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from draftcore.errors import ExitStatus
from draftcore_eval import api

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(name="eval", epilog="For example: draftcore eval run.yaml eval.prompts=50")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--draft", help="One of the run's `drafts`; all if not given.")
@click.option("--checkpoint", type=FOLDER, help="A step-* folder, or best; else the newest.")
@click.option("--export", "exported", type=FOLDER, help="Evaluate an exported draft instead.")
@click.option(
    "--out", type=FOLDER, help="Folder of report and plot; RUN[/DRAFT]/eval if not given."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the report as JSON; by draft if several."
)
@click.pass_context
def verb(
    ctx: click.Context, /, config: Path, overrides: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Decode the eval prompts for real, and measure acceptance.

    Greedy output is compared with the target's own generate, token by token; a difference is an
    error, not a statistic.
    """
    say = (lambda line: None) if as_json else click.echo
    reports = api.evaluate(config, *overrides, registry=ctx.obj, say=say, **options)
    if as_json:
        from draftcore import load_config  # which imports pydantic

        label = options["draft"]
        labels = [label] if label else load_config(config, overrides).drafts
        data = [report.to_json() for report in reports]
        by_draft = dict(zip(labels, data, strict=True)) if labels else data[0]
        click.echo(json.dumps(by_draft, indent=1))


@click.command(epilog="For example: draftcore served run.yaml --engine llamacpp eval.prompts=20")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--engine", required=True, metavar="NAME|URL",
    help="An engine that is started, such as llamacpp, or the URL of a server that runs.",
)  # fmt: skip
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="Of the engine.")
@click.option("--requests", default=1, show_default=True, help="Prompts decoded at once there.")
@click.option("--dtype", default="float32", show_default=True, help="Of both sides.")
@click.option("--draft", help="One of the run's `drafts`; all if not given.")
@click.option("--checkpoint", type=FOLDER, help="A step-* folder, or best; else the newest.")
@click.option("--export", "exported", type=FOLDER, help="Serve this export, not one made anew.")
@click.option("--speed", is_flag=True, help="Measure tokens/s by drafts a round, for the card.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON, a list.")
@click.pass_context
def served(
    ctx: click.Context, /, config: Path, overrides: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Decode the eval prompts on an engine, and compare rounds.

    Outputs and rounds are compared with those of our own decoder of the trained draft, prompt by prompt.
    Where they differ, the first token is shown at which they do, and the known mistake that gives the
    engine's rounds; then the exit status is 1.
    """
    say = (lambda line: None) if as_json else click.echo
    found = api.served(config, *overrides, registry=ctx.obj, say=say, **options)
    if as_json:
        click.echo(json.dumps([one.to_json() for one in found], indent=1))
    if not all(one.as_trained for one in found):
        ctx.exit(ExitStatus.FAILED)
