"""The verb `hooks`, which shows what plugins may answer, as text or as data."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from textwrap import indent
from typing import Any

import click

from draftcore.errors import UsageError, nearest
from draftcore_sdk.internals import NEEDED, SPECS, Plugin, Registry, first_results
from draftcore_sdk.internals import hooks as all_hooks

ROOMS = ("algorithm", "capture", "store", "target", "run", "runner", "serving", "offers")


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
                "name": name, "signature": name + _written(spec),
                "result": "first" if name in first else "all",
                "required": [kind for kind, needed in NEEDED.items() if name in needed],
                "doc": (inspect.getdoc(spec) or "").partition("\n")[0],
                "plugins": [p.name for p in registry.ready if name in (*p.hooks, *_methods(p))],
            }
            for name, spec in all_hooks().items()
        ]
    }  # fmt: skip


def _methods(plugin: Plugin) -> Sequence[str]:
    """Return the hooks that a plugin must answer by methods; whether more, only an import would say."""
    return NEEDED["algorithm"] if any(offer.implementation for offer in plugin.offers) else ()


def _written(function: Any) -> str:
    """Write a signature as its implementer does: without `self`, types unquoted."""
    unquoted = re.sub(r"'([\w\[\], .|]+)'", r"\1", str(inspect.signature(function)))
    return re.sub(r"^\(self(, )?", "(", unquoted)
