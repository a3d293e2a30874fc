"""The verbs `list-plugins` and `hooks`, which show what there is, as text or as data."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from draftcore.contracts.hooks import Specs
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import HOOKS, Registry, register

HEADER = ("NAME", "DIST", "VERSION", "STATE", "OFFERS")
INNER = ("module", "loose", "requires", "instance")  # fields of a plugin that are not shown


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print data instead of a table.")
@click.option("--check", is_flag=True, help="Exit with 1 if any plugin cannot be used.")
@click.pass_obj
def list_plugins(registry: Registry, as_json: bool, check: bool) -> None:
    """List the plugins, with what they offer or what is wrong."""
    if as_json:
        shown = [{k: v for k, v in vars(p).items() if k not in INNER} for p in registry.plugins]
        click.echo(json.dumps({"plugins": shown}, indent=2, default=_plain))
    else:
        rows = [HEADER, *(row for plugin in registry.plugins for row in _rows(plugin))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            click.echo("  ".join(map(str.ljust, row, widths)).rstrip())
    if check and any(plugin.problem for plugin in registry.plugins):
        sys.exit(1)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print data instead of text.")
@click.pass_obj
def hooks(registry: Registry, as_json: bool) -> None:
    """List the hooks, and the plugins that implement them."""
    data = hooks_data(registry)
    if as_json:
        return click.echo(json.dumps(data, indent=2))
    called = {"first": "one plugin answers", "all": "all plugins are called"}
    texts = (
        f"{hook['signature']}\n"
        f"  {hook['doc']}\n"
        f"  {called[hook['result']]}; here: {', '.join(hook['plugins']) or 'none'}"
        for hook in data["hooks"]
    )
    click.echo("\n\n".join(texts))


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


def _plain(value: Any) -> Any:
    """Return what JSON has no form for, an offer or its capabilities, as a mapping or a list."""
    return sorted(value) if isinstance(value, frozenset) else vars(value)


def _rows(plugin: Plugin) -> list[tuple[str, ...]]:
    """Return a plugin's rows of the table; a problem and its fix stand in the last column."""
    if plugin.problem:
        first, *more = [*plugin.problem.splitlines(), plugin.fix]
    else:
        offers = ", ".join(map(str, plugin.offers)) or f"hooks {', '.join(plugin.hooks)}"
        first, more = f"{offers}   {from_here(plugin.origin)}", []
    cells = (plugin.name, from_here(plugin.dist), plugin.version, plugin.state)
    return [(*cells, first), *(("", "", "", "", line) for line in more)]


def from_here(text: str) -> str:
    """Shorten the paths in a text that lie in the current folder."""
    return text.replace(f"{Path.cwd()}/", "")


def _signature(name: str) -> str:
    """Write a hook's signature as its implementer does: without `self`, types unquoted."""
    signature = str(inspect.signature(getattr(Specs, name)))
    unquoted = re.sub(r"'([\w\[\], .|]+)'", r"\1", signature)
    return name + re.sub(r"^\(self(, )?", "(", unquoted)
