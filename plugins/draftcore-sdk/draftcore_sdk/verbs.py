"""The verb `check-plugin`: the conformance suites as a command, no test file needed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from draftcore.plugins.registry import Registry


@click.command(epilog="For example: draftcore check-plugin my-idea depth=2")
@click.argument("name")
@click.argument("options", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--uri",
    help="Of a store or channel that needs another than NAME:{tmp}; {tmp} is a fresh folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def check_plugin(
    ctx: click.Context, name: str, options: tuple[str, ...], uri: str | None, as_json: bool
) -> None:
    """Test a plugin and all it offers; exit 1 if anything fails.

    NAME is as in list-plugins; options of its offers are given as in a run's YAML. A plugin that
    is a file is checked too: draftcore --plugin mine.py check-plugin mine.
    """
    registry: Registry = ctx.obj
    plugin = registry.named(name)
    from draftcore_sdk import check  # pytest, 0.1 s: only where it is used

    report = check.Report(plugin, check.suites_of(plugin, options, uri))
    traceback = ctx.find_root().params.get("traceback", False)
    for line in report.lines(check.run(report.checks, traceback)):
        if not as_json:
            click.echo(line)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    if report.failed:
        ctx.exit(1)
