"""The verb `eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from draftcore_eval.api import evaluate

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
    reports = evaluate(config, *overrides, registry=ctx.obj, say=say, **options)
    if as_json:
        from draftcore import load_config  # which imports pydantic

        label = options["draft"]
        labels = [label] if label else load_config(config, overrides).drafts
        data = [report.to_json() for report in reports]
        by_draft = dict(zip(labels, data, strict=True)) if labels else data[0]
        click.echo(json.dumps(by_draft, indent=1))
