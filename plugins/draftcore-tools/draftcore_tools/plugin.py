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
    from torch import Tensor

    from draftcore.contracts.run import OpenDraft, OpenRun
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


@click.command()
@click.argument("config", metavar="CONFIG|MODEL")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--device", help="A device as h100, of a table; the run's is measured if not given.")
@click.option("--rows", type=click.IntRange(1), help="Render these first rows, and infer the rest.")
@click.option("--gpu", help="For MODEL: the memory of a GPU.  [default: 80GB]")
@click.option("--gpus", type=click.IntRange(1, 64), help="For MODEL: how many.  [default: 1]")
@click.option("--disk", help="For MODEL: what may be kept there; nothing if not given.")
@click.option("--data", help="For MODEL: conversations; some are assumed if not given.")
@click.option("--eval", "held_out", help="For MODEL: held-out conversations.")
@click.option("--out", type=click.Path(path_type=Path), help="For MODEL.  [default: run.yaml]")
@click.option("--force", is_flag=True, help="Replace the file that lies there.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.pass_obj
def plan(
    registry: Any, /, config: str, overrides: tuple[str, ...], device: str | None, rows: int | None,
    out: Path | None, force: bool, as_json: bool, **for_model: Any,
) -> None:  # fmt: skip
    """Say what a run takes, before it starts: disk, memory, hours.

    No weights are read. Rows are rendered, as `train` then finds them, but for --rows: those are
    rendered aside. Where the device's memory does not suffice, it says what to lower.

    For a MODEL, which is a folder, a Hugging Face id or the name of a known target, a CONFIG is written
    first, whose settings fit, each with its reason.
    """
    import json

    planned: Any
    if Path(config).suffix in (".yaml", ".yml") or Path(config).is_file():
        if asked := [
            name for name, value in {**for_model, "out": out}.items() if value is not None
        ]:
            raise UsageError(
                f"{', '.join(asked)} choose settings of a new run, and {config} has its own\n"
                "  leave them out, or name a model in its place"
            )
        planned = api.plan(config, *overrides, device=device, rows=rows or 0, registry=registry)
    else:
        if (file := out or Path("run.yaml")).exists() and not force:
            raise UsageError(
                f"{file} is there\n  write another, --out FILE, or replace it: --force"
            )
        from draftcore.files import write_atomic
        from draftcore_tools.suggest import suggest

        planned = suggest(config, overrides, registry, device=device or "h100", **for_model)
        write_atomic(file, planned.text())
        click.echo(f"wrote {file}", err=as_json)
    if as_json:
        click.echo(json.dumps(planned.to_json(), indent=1))
    for name, value in () if as_json else planned.lines():
        click.echo(f"{name:24}  {value}")


@click.command()
@click.argument("place", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print it as data, with what is installed.")
@click.pass_obj
def catalogue(registry: Any, place: str | None, as_json: bool) -> None:
    """List the distributions that could be installed, and how.

    Each has its category, its version and what the conformance suites said of it. PLACE is a file or an
    address of http; without it the catalogue is that of the project's site, or of the checkout that the
    core was installed from.
    """
    import json

    from draftcore_tools.catalogue import read, where

    found = read(place or where(registry))
    if as_json:
        data = [{**dist.model_dump(), "installed": dist.installed} for dist in found.dists]
        click.echo(json.dumps(data, indent=1))
    for line in () if as_json else found.lines():
        click.echo(line)


@hookimpl
def describe() -> Sequence[Offer]:
    one_row = Offer("samples", "one-row", options="draftcore_tools.one_row:OneRowOptions")
    return [one_row, Offer("memory", "fake-tensors")]


@hookimpl
def samples(name: str, run: OpenRun, options: OneRowOptions) -> OneRowRun:
    from draftcore_tools.one_row import OneRowRun

    return OneRowRun(run, options)


@hookimpl
def step_memory(draft: OpenDraft, masks: Sequence[Tensor]) -> Sequence[int]:
    from draftcore_tools import memory

    return memory.step_memory(draft, masks)


@hookimpl
def commands() -> Sequence[click.Command]:
    return [verify, overfit, config, plan, catalogue]
