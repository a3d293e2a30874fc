"""The verb `check-plugin`: the conformance suites as a command, no test file needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from draftcore.errors import ExitStatus, UsageError

if TYPE_CHECKING:
    from draftcore_sdk.check import Result
    from draftcore_sdk.internals import Registry


def watched(results: Iterable[Result]) -> Iterator[Result]:
    """Show on a terminal which test is running."""
    for result in results:
        if sys.stderr.isatty():
            running = f"  ...      {result.words} " if result.outcome == "running" else ""
            click.echo(f"\r{running}\033[K", err=True, nl=False)
        yield result


@click.command(epilog="For example: draftcore check-plugin my-idea depth=2")
@click.argument("name")
@click.argument("options", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--uri",
    help="Of a store or channel that needs another than NAME:{tmp}; {tmp} is a fresh folder.",
)
@click.option("--each", is_flag=True, help="Try every boolean or literal option's other values.")
@click.option(
    "--quick", is_flag=True, help="Leave out slow tests, say which; try one set of options: ~10 s."
)
@click.option("--only", default="", help="Run the tests with these words in their names.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def check_plugin(
    ctx: click.Context, name: str, options: tuple[str, ...], uri: str | None, each: bool,
    quick: bool, only: str, as_json: bool,
) -> None:  # fmt: skip
    """Test a plugin and all it offers; exit 1 if anything fails.

    NAME is as in list-plugins; options of its offers are given as in a run's YAML. A plugin that
    is a file is checked too: draftcore --plugin mine.py check-plugin mine.
    """
    registry: Registry = ctx.obj
    if (file := Path(name)).suffix == ".py":
        remedy = f"draftcore --plugin {name} check-plugin {file.stem}"
        raise UsageError(f"{name!r} is a file, which has to be loaded as well\n  {remedy}")
    plugin = registry.named(name)
    from draftcore_sdk import check  # pytest, 0.1 s: only where it is used

    report = check.Report(plugin, check.suites_of(plugin, options, uri, each))
    traceback = ctx.find_root().params.get("traceback", False)
    flags = [f"--only={only}", *["--quick"] * quick]
    try:
        for line in report.lines(watched(check.run(report.checks, traceback, flags))):
            if not as_json:
                click.echo(line)
    except KeyboardInterrupt:
        if report.running:
            title = report.checks[report.running.check].title
            click.echo(f"in: {title}: {report.running.words}", err=True)
        raise
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    if report.failed or report.untried:
        ctx.exit(ExitStatus.FAILED)
