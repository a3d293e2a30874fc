"""The verbs of this dist. What is slow to import is imported inside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.errors import ExitStatus, UsageError
from draftcore_tools import api

if TYPE_CHECKING:
    from draftcore.contracts.run import OpenRun
    from draftcore_tools.one_row import OneRowOptions, OneRowRun

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("export", type=FOLDER)
@click.option("--target", required=True, help="The target's folder, or its Hugging Face id.")
@click.option(
    "--server", default="all", show_default=True, help="A server of the algorithm, or all."
)
@click.option(
    "--prompts", help="Conversations in JSONL to ask from; else a few built-in questions."
)
@click.option("--run", type=FOLDER, help="The run, or checkpoint, that the export was made of.")
@click.option("--device", default="auto", show_default=True, help="As target.device of a run.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
@click.pass_context
def verify(
    ctx: click.Context, export: Path, target: str, server: str, prompts: str | None,
    run: Path | None, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Compare an export, as servers read it, with the draft.

    Both draft on the same prompts, in fp32. The first difference in captured layers, hidden states,
    log-probabilities or proposals is reported with its cause, and the exit status is 1.
    """
    asked: dict[str, Any] = {"server": server, "prompts": prompts, "run": run, "device": device}
    verdicts = api.verify(export, target, **asked, registry=ctx.obj)
    for verdict in verdicts:
        for line in verdict.lines() if not as_json else ():
            click.echo(line)
    if as_json:
        import json

        click.echo(json.dumps([verdict.to_json() for verdict in verdicts], indent=1))
    if any(verdict.divergence is not None for verdict in verdicts):
        ctx.exit(ExitStatus.FAILED)


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--row", default=0, show_default=True, help="Row of the training data, from 0.")
@click.option("--steps", default=4096, show_default=True, help="Optimizer steps at most.")
@click.option("--minutes", default=10.0, show_default=True, help="Time to train in, at most.")
@click.option("--lr", type=float, help="Learning rate; 0.5 over the hidden size if not given.")
@click.option("--draft", help="One of the run's `drafts`; all if not given.")
@click.pass_context
def overfit(ctx: click.Context, /, config: Path, overrides: tuple[str, ...], **limits: Any) -> None:
    """Teach one conversation until every draft is accepted.

    The conversation goes through capture, store, training, checkpoint, export and decoding in a
    temporary folder; what a server would compute is compared at the end. If acceptance stays behind,
    the stage and the usual causes are named, and the exit status is 1.
    """
    api.overfit(config, *overrides, **limits, registry=ctx.obj, say=click.echo)


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--keys", is_flag=True, help="Print all keys there are, as a table in Markdown.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of a run, for editors.")
@click.pass_obj
def config(
    registry: Any, config: Path | None, overrides: tuple[str, ...], keys: bool, schema: bool
) -> None:
    """Show a run's settings, and who set each.

    That is the command line, CONFIG or a default. Nothing is opened: neither the target nor the data.
    """
    import json

    from draftcore_tools.configuration import as_yaml, reference, schema_of_run

    if keys:
        click.echo(reference(registry))
    elif schema:
        click.echo(json.dumps(schema_of_run(registry), indent=1))
    elif config is None:
        raise UsageError(
            "no CONFIG was given\n  name a run's YAML file, or ask for --keys or --schema"
        )
    else:
        click.echo(as_yaml(api.config(config, *overrides, registry=registry)))


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("samples", "one-row", options="draftcore_tools.one_row:OneRowOptions")]


@hookimpl
def samples(name: str, run: OpenRun, options: OneRowOptions) -> OneRowRun:
    from draftcore_tools.one_row import OneRowRun

    return OneRowRun(run, options)


@hookimpl
def commands() -> Sequence[click.Command]:
    return [verify, overfit, config]
