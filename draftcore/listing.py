"""The verb `list-plugins`, which shows what is installed, as text or as data."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from draftcore.errors import ExitStatus, UsageError
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import Registry

# Fields of a plugin.
NOT_SHOWN = ("module", "loose", "requires", "kinds", "instance", "dropped", "verbs")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print data instead of a table.")
@click.option("--check", is_flag=True, help="Exit with 1 if any plugin cannot be used.")
@click.option("--available", is_flag=True, help="List what could be installed instead.")
@click.pass_context
def list_plugins(ctx: click.Context, as_json: bool, check: bool, available: bool) -> Any:
    """List the plugins, with what they offer or what is wrong."""
    registry: Registry = ctx.obj
    if available:
        return ctx.invoke(registry.find("verb", "catalogue").verbs["catalogue"], as_json=as_json)
    plugins, clashes = registry.plugins, []
    offered = [(o.kind, o.name) for plugin in registry.ready for o in plugin.offers]
    for kind, name in dict.fromkeys(offer for offer in offered if offered.count(offer) > 1):
        which, taken = [p.name for p in registry.ready if p.offer(kind, name)], "none"
        with suppress(UsageError):
            taken = f"that of {registry.find(kind, name)}"
        clash = f"{' and '.join(which)} offer the {kind} {name!r}: a run takes {taken}"
        clashes.append(f"{clash}, or that of `plugin` beside the name")
    if as_json:
        data = [{k: v for k, v in vars(p).items() if k not in NOT_SHOWN} for p in plugins]
        click.echo(json.dumps({"plugins": data, "clashes": clashes}, indent=2, default=_plain))
    else:
        rows = [("NAME", "DIST", "VERSION", "STATE", "OFFERS")]
        rows += (row for plugin in plugins for row in _rows(plugin))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        slow = sorted(plugins, key=lambda plugin: -plugin.import_ms)
        times = (f"{plugin.name} {plugin.import_ms:.0f}" for plugin in slow if plugin.import_ms)
        lines += [*clashes, f"imported in ms: {', '.join(times) or 'none'}"]
        click.echo("\n".join(lines))
    if check and (clashes or any(plugin.problem for plugin in plugins)):
        ctx.exit(ExitStatus.FAILED)


def _plain(value: Any) -> Any:
    """Return what JSON has no form for, an offer or its capabilities, as a mapping or a list."""
    return sorted(value) if isinstance(value, frozenset) else vars(value) | {"needs": value.lacks()}


def _rows(plugin: Plugin) -> list[tuple[str, str, str, str, str]]:
    """Return a plugin's rows of the table; what is wrong, or lacks, and the fix stand in the last column."""
    offers = ", ".join(map(str, plugin.offers)) or f"hooks {', '.join(plugin.hooks)}"
    first = plugin.problem or f"{offers}   {from_here(plugin.origin)}"
    more = "\n".join([plugin.fix * bool(plugin.problem), *(o.lacks() for o in plugin.offers)])
    cells = (plugin.name, from_here(plugin.dist), plugin.version, plugin.state)
    return [(*cells, first), *(("", "", "", "", line) for line in more.split("\n") if line)]


def from_here(text: str) -> str:
    """Shorten the paths in a text that lie in the current folder."""
    return text.replace(f"{Path.cwd()}/", "")
