"""The verb `bench`, and the prompt sets that it asks from. What is slow to import is imported inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from draftcore_data.plugin import Number

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.errors import ExitStatus
from draftcore_bench import api

if TYPE_CHECKING:
    from draftcore_bench.prompts import Prompt

AT_LEAST_1 = click.IntRange(1)
FOLDER = click.Path(file_okay=False, path_type=Path)
# What a set takes to be read, by capabilities.
SETS = {"own": "", "files": "place", "hf": "place"}
SETS |= dict.fromkeys(("gsm8k", "humaneval", "math-500", "mt-bench"), "hub")


@click.command(
    context_settings={"show_default": True},
    epilog="For example: draftcore bench http://localhost:8000 --plain http://localhost:8001",
)
@click.argument("url")
@click.option("--plain", metavar="URL", help="A server of the same model without the draft.")
@click.option(
    "--prompts", multiple=True, default=("own",), metavar="NAME[:PLACE]",
    help="A prompt set, or a file of conversations; several follow each other.",
)  # fmt: skip
@click.option("--limit", type=AT_LEAST_1, default=80, help="Prompts of each set.")
@click.option(
    "--concurrency", type=AT_LEAST_1, multiple=True, default=api.LEVELS,
    help="Requests under way at once; several follow each other.",
)  # fmt: skip
@click.option("--repeats", type=AT_LEAST_1, default=3, help="Rounds of all prompts, each side.")
@click.option("--max-tokens", type=AT_LEAST_1, default=256, help="Longest answer.")
@click.option("--temperature", type=Number(0), default=0.0)
@click.option("--model", help="The model's name at the servers; if they have one, that.")
@click.option("--key-env", default=api.KEY, help="The variable that holds the servers' API key.")
@click.option("--out", type=FOLDER, help="Folder for bench.json and bench.png.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def bench(ctx: click.Context, /, url: str, as_json: bool, **options: Any) -> None:
    """Measure what a draft gains on a running server.

    The server (sglang, vLLM, llama.cpp) is asked with 1, 2, ... 64 requests at once, in turn with the one
    of --plain. The exit status is 1 where requests failed; what was measured is printed, after Ctrl-C, too.
    """
    from draftcore_bench.report import lines

    report = api.bench(url, **options, registry=ctx.obj)
    data = report.to_json()
    click.echo(json.dumps(data, indent=1) if as_json else "\n".join(lines(data)))
    if report.ended == "interrupted":
        ctx.exit(ExitStatus.INTERRUPTED)
    if report.ended or report.failures:
        ctx.exit(ExitStatus.FAILED)


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("prompts", name, frozenset({takes} - {""})) for name, takes in SETS.items()]


@hookimpl
def prompts(name: str, uri: str) -> Sequence[Prompt]:
    from draftcore_bench.prompts import read_prompts

    return read_prompts(name, uri)


@hookimpl
def commands() -> Sequence[click.Command]:
    return [bench]
