"""The hooks and the kinds of offers that there are: the core's, and those that dists bring.

A dist brings kinds by entry points of the group `draftcore.hooks`, which name a module for each: it has
a class `Specs` of hookspecs, as `contracts.hooks` has, and `NEEDED`, the hooks that each kind has to
answer. Like modules, what was brought stays for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from inspect import signature
from typing import Any

import pluggy

from draftcore.contracts.hooks import Specs
from draftcore.errors import nearest

OF_ONE_HOOK = "target", "samples", "capture", "batches", "evaluation", "runner"  # of their name
# By kind the hooks that an offer of it has to answer.
NEEDED: dict[str, tuple[str, ...]] = {
    "algorithm": ("feature_request", "build_draft", "collate", "forward_loss"),
    **{kind: (kind,) for kind in OF_ONE_HOOK},
    "store": ("feature_store",),
    "ranks": ("ranks", "launch"),
    "graph": ("graph_backend",),
    "verb": ("commands",),
    "observer": (),
}
SPECS: list[Any] = [Specs]


def hooks() -> dict[str, Any]:
    """Return every hook's specification by its name."""
    return {name: hook for specs in SPECS for name, hook in vars(specs).items() if name[0] != "_"}


def first_results() -> list[str]:
    """Return the names of the hooks that one plugin answers."""
    return [name for name, hook in hooks().items() if hook.draftcore_spec["firstresult"]]


def of_algorithms() -> list[str]:
    """Return the names of the hooks that algorithms answer: those that are given options, and no name."""
    given = {name: signature(hook).parameters for name, hook in hooks().items()}
    return [name for name, has in given.items() if "options" in has and "name" not in has]


def marked(instance: Any) -> Iterator[tuple[str, str, pluggy.HookImpl]]:
    """Yield the functions of a plugin that are marked as hooks: their names, hooks, and how they are."""
    parse = pluggy.PluginManager("draftcore").parse_hookimpl_opts
    for name, opts in ((name, parse(instance, name)) for name in dir(instance)):
        if opts:
            impl = pluggy.HookImpl(instance, "", getattr(instance, name), opts)
            yield name, opts["specname"] or name, impl


def mistake(hook: str, arguments: Iterable[str]) -> str:
    """Say what is wrong with a function of these arguments that answers a hook; '' if nothing is."""
    if hook not in hooks():
        return f"unknown hook {hook!r}{nearest(hook, hooks())}"
    known = list(signature(hooks()[hook]).parameters)[1:]
    for name in (name for name in arguments if name not in known):
        return f"{hook} has no argument {name!r}{nearest(name, known)}; it has {', '.join(known)}"
    return ""


def bring(module: str) -> None:
    """Load the hooks and kinds of a module; raises whatever its import does."""
    brought = import_module(module)
    if brought.Specs not in SPECS:
        pluggy.PluginManager("draftcore").add_hookspecs(brought.Specs)
        SPECS.append(brought.Specs)
        NEEDED.update({**brought.NEEDED, **NEEDED})  # what is there stays as it is


def manager() -> pluggy.PluginManager:
    """Make a plugin manager that knows all hooks."""
    made = pluggy.PluginManager("draftcore")
    for specs in SPECS:
        made.add_hookspecs(specs)
    return made
