"""The verbs `list-plugins` and `hooks`, which show what there is, as text or as data."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from draftcore.contracts.hooks import Specs
from draftcore.plugins.registry import HOOKS, Plugin, Registry, register

HEADER = ("NAME", "DIST", "VERSION", "STATE", "OFFERS")
KEYS = [
    "name",
    "dist",
    "version",
    "origin",
    "state",
    "problem",
    "fix",
    "offers",
    "hooks",
    "import_ms",
]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print data instead of a table.")
@click.option("--check", is_flag=True, help="Exit with 1 if any plugin cannot be used.")
@click.pass_obj
def list_plugins(registry: Registry, as_json: bool, check: bool) -> None:
    """List the plugins, with what they offer or what is wrong."""
    _echo(plugins_data(registry) if as_json else plugins_table(registry))
    if check and any(plugin.problem for plugin in registry.plugins):
        sys.exit(1)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print data instead of text.")
@click.pass_obj
def hooks(registry: Registry, as_json: bool) -> None:
    """List the hooks, and the plugins that implement them."""
    _echo(hooks_data(registry) if as_json else hooks_text(registry))


def _echo(content: str | dict[str, Any]) -> None:
    if not isinstance(content, str):
        import json  # 1 ms, for data only

        content = json.dumps(content, indent=2)
    click.echo(content)


def plugins_data(registry: Registry) -> dict[str, Any]:
    """Return all plugins as JSON data."""
    return {"plugins": [_plugin_data(plugin) for plugin in registry.plugins]}


def plugins_table(registry: Registry) -> str:
    """Return all plugins as a table; a problem and its fix stand in the last column."""
    rows = [HEADER, *(row for plugin in registry.plugins for row in _rows(plugin))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def hooks_data(registry: Registry) -> dict[str, Any]:
    """Return every hook, with the ready plugins that implement it, as JSON data."""
    hook = register(()).hook
    return {
        "hooks": [
            {
                "name": name,
                "signature": _signature(name),
                "result": "first" if getattr(hook, name).spec.opts["firstresult"] else "all",
                "doc": (inspect.getdoc(getattr(Specs, name)) or "").partition("\n")[0],
                "plugins": [plugin.name for plugin in registry.ready if name in plugin.hooks],
            }
            for name in HOOKS
        ]
    }


def hooks_text(registry: Registry) -> str:
    """Return every hook as a few lines of text."""
    return "\n\n".join(
        f"{hook['signature']}\n"
        f"  {hook['doc']}\n"
        f"  {'one plugin answers' if hook['result'] == 'first' else 'all plugins are called'};"
        f" here: {', '.join(hook['plugins']) or 'none'}"
        for hook in hooks_data(registry)["hooks"]
    )


def _plugin_data(plugin: Plugin) -> dict[str, Any]:
    offers = [
        {**dataclasses.asdict(offer), "capabilities": sorted(offer.capabilities)}
        for offer in plugin.offers
    ]
    return {**{key: getattr(plugin, key) for key in KEYS}, "offers": offers}


def _rows(plugin: Plugin) -> Iterator[Sequence[str]]:
    cells = (plugin.name, from_here(plugin.dist), plugin.version, plugin.state)
    origin = f"   {from_here(plugin.origin)}" if plugin.origin else ""
    ready = [", ".join(_offers(plugin)) + origin]
    lines = [*plugin.problem.splitlines(), plugin.fix] if plugin.problem else ready
    yield (*cells, lines[0])
    yield from (("", "", "", "", line) for line in lines[1:])


def _offers(plugin: Plugin) -> Iterator[str]:
    for offer in plugin.offers:
        capabilities = ", ".join(sorted(offer.capabilities))
        yield f"{offer.kind} {offer.name}" + (f" [{capabilities}]" if capabilities else "")
    if not plugin.offers:
        yield f"hooks {', '.join(plugin.hooks)}"


def from_here(text: str) -> str:
    """Shorten the paths in a text that lie in the current folder."""
    return text.replace(f"{Path.cwd()}/", "")


def _signature(name: str) -> str:
    """Write a hook's signature as its implementer does: without `self`, types unquoted."""
    signature = inspect.signature(getattr(Specs, name))
    parameters = [
        f"{p.name}: {p.annotation}" + ("" if p.default is p.empty else f" = {p.default!r}")
        for p in list(signature.parameters.values())[1:]
    ]
    return f"{name}({', '.join(parameters)}) -> {signature.return_annotation}"
