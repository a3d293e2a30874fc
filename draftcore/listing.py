"""The verbs `list-plugins` and `hooks`, which show what there is, as text or as data."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

import click

from draftcore.errors import ExitStatus, UsageError, nearest
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import Registry
from draftcore.plugins.specs import NEEDED, SPECS, first_results
from draftcore.plugins.specs import hooks as all_hooks

HEADER = ("NAME", "DIST", "VERSION", "STATE", "OFFERS")
ROOMS = ("algorithm", "capture", "store", "target", "run", "runner", "serving", "offers")
# Fields of a plugin.
NOT_SHOWN = ("module", "loose", "requires", "kinds", "instance", "dropped", "verbs")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print data instead of a table.")
@click.option("--check", is_flag=True, help="Exit with 1 if any plugin cannot be used.")
@click.pass_obj
def list_plugins(registry: Registry, as_json: bool, check: bool) -> None:
    """List the plugins, with what they offer or what is wrong."""
    offered = Counter((o.kind, o.name) for plugin in registry.ready for o in plugin.offers)
    clashes = [
        f"{' and '.join(p.name for p in registry.ready if p.offer(kind, name))} offer the {kind} "
        f"{name!r}: a run chooses by `plugin` beside the name, and else takes that of our own dist, if any"
        for (kind, name), count in offered.items()
        if count > 1
    ]
    if as_json:
        plugins = [
            {k: v for k, v in vars(p).items() if k not in NOT_SHOWN} for p in registry.plugins
        ]
        click.echo(json.dumps({"plugins": plugins, "clashes": clashes}, indent=2, default=_plain))
    else:
        rows = [HEADER, *(row for plugin in registry.plugins for row in _rows(plugin))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            click.echo("  ".join(map(str.ljust, row, widths)).rstrip())
        click.echo("\n".join(clashes), nl=bool(clashes))
        slow = sorted(registry.plugins, key=lambda plugin: -plugin.import_ms)
        times = (f"{plugin.name} {plugin.import_ms:.0f}" for plugin in slow if plugin.import_ms)
        click.echo(f"imported in ms: {', '.join(times) or 'none'}")
    if check and (clashes or any(plugin.problem for plugin in registry.plugins)):
        sys.exit(ExitStatus.FAILED)


@click.command()
@click.argument("names", nargs=-1, metavar="[HOOK]...")
@click.option("--json", "as_json", is_flag=True, help="Print data instead of text.")
@click.pass_obj
def hooks(registry: Registry, names: tuple[str, ...], as_json: bool) -> None:
    """List the hooks and their plugins; show one with its types."""
    data = hooks_data(registry)
    known = [hook["name"] for hook in data["hooks"]]
    for name in (name for name in names if name not in known):
        raise UsageError(
            f"there is no hook {name!r}{nearest(name, known)}\n  there are {', '.join(known)}"
        )
    if as_json:
        return click.echo(json.dumps(data, indent=2))
    called = {"first": "one plugin answers", "all": "all plugins are called"}
    for hook in data["hooks"]:
        if names and hook["name"] not in names:
            continue
        needed = " and ".join(f"every {kind}" for kind in hook["required"])
        more = ", and maybe algorithms that are classes"  # which only an import would say
        click.echo(
            f"{hook['signature']}\n  {hook['doc']}\n  {called[hook['result']]}; "
            f"{f'required of {needed}' if needed else 'optional'}; "
            f"here: {', '.join(hook['plugins']) or 'none'}"
            f"{more * (not needed and 'options' in hook['signature'])}\n"
        )
        if names:
            click.echo("\n".join(_records(hook["signature"])))


def _records(signature: str) -> Iterator[str]:
    """Describe each record and interface of the contract that a signature, or one of these, names."""
    rooms = [import_module(f"draftcore.contracts.{room}") for room in ROOMS]
    rooms += [sys.modules[specs.__module__] for specs in SPECS]
    known = {name: value for room in rooms for name, value in vars(room).items()}
    names = re.findall(r"[A-Z]\w+", signature)
    for place, name in enumerate(names):
        record: Any = known.get(name)
        if name in names[:place] or not getattr(record, "__module__", "").startswith("draftcore"):
            continue
        yield f"{name}: {indent(inspect.cleandoc(record.__doc__ or ''), '    ').lstrip()}\n"
        for field, kind in record.__annotations__.items():
            yield f"    {field}: {kind}"
            names += re.findall(r"[A-Z]\w+", str(kind))
        for method, member in vars(record).items():
            if inspect.isfunction(member) and not method.startswith("_"):
                yield f"    {method}{_written(member)}"
                yield from filter(None, [indent(inspect.getdoc(member) or "", "        ")])
                names += re.findall(r"[A-Z]\w+", _written(member))
        yield ""


def hooks_data(registry: Registry) -> dict[str, Any]:
    """Return every hook, with the ready plugins that implement it, as JSON data."""
    registry.bring()
    first = first_results()
    return {
        "hooks": [
            {
                "name": name,
                "signature": name + _written(spec),
                "result": "first" if name in first else "all",
                "required": [kind for kind, needed in NEEDED.items() if name in needed],
                "doc": (inspect.getdoc(spec) or "").partition("\n")[0],
                "plugins": [p.name for p in registry.ready if name in (*p.hooks, *_methods(p))],
            }
            for name, spec in all_hooks().items()
        ]
    }


def _methods(plugin: Plugin) -> Sequence[str]:
    """Return the hooks that a plugin must answer by methods; whether more, only an import would say."""
    return NEEDED["algorithm"] if any(offer.implementation for offer in plugin.offers) else ()


def _plain(value: Any) -> Any:
    """Return what JSON has no form for, an offer or its capabilities, as a mapping or a list."""
    return sorted(value) if isinstance(value, frozenset) else vars(value)


def _rows(plugin: Plugin) -> list[tuple[str, ...]]:
    """Return a plugin's rows of the table; a problem and its fix stand in the last column."""
    if plugin.problem:
        first, more = plugin.problem, [plugin.fix]
    else:
        offers = ", ".join(map(str, plugin.offers)) or f"hooks {', '.join(plugin.hooks)}"
        first, more = f"{offers}   {from_here(plugin.origin)}", []
    cells = (plugin.name, from_here(plugin.dist), plugin.version, plugin.state)
    return [(*cells, first), *(("", "", "", "", line) for line in more)]


def from_here(text: str) -> str:
    """Shorten the paths in a text that lie in the current folder."""
    return text.replace(f"{Path.cwd()}/", "")


def _written(function: Any) -> str:
    """Write a signature as its implementer does: without `self`, types unquoted."""
    unquoted = re.sub(r"'([\w\[\], .|]+)'", r"\1", str(inspect.signature(function)))
    return re.sub(r"^\(self(, )?", "(", unquoted)
