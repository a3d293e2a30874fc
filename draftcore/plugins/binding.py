"""Bind a run to the plugins it selected.

Installed is not selected: each binding is a plugin manager of its own, with one owner and the
wrappers and observers of the run, so nothing else that is installed can change a result. Two
owners of one first-result hook is an error here, where pluggy would take the last registered.
What a hook returns is checked here, once, by the types of the contract, and what it raises is named
with hook and plugin. An observer that fails so is dropped: the run goes on without it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType, ModuleType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import pluggy

from draftcore import hookimpl
from draftcore.contracts.algorithm import Algorithm, Stop
from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import Kind, Offer
from draftcore.contracts.source import Source
from draftcore.errors import DraftcoreError, UsageError, raised
from draftcore.options import imported, validate
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import FIRST, HOOKS, Registry, lacking, owners, register

MEANT = (DraftcoreError, KeyboardInterrupt, GeneratorExit)  # leave a hook as they are


@dataclass(frozen=True)
class Binding:
    """An offer that can be called: `hook` reaches its owner and the run's wrappers."""

    plugin: Plugin
    offer: Offer
    hook: Specs
    options: Any

    @property
    def capabilities(self) -> frozenset[str]:
        return self.offer.capabilities


def bind(
    registry: Registry,
    kind: Kind,
    name: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    extras: Sequence[str] = (),
    plugin: str = "",
) -> Binding:
    """Bind the owner of (kind, name) with the plugins named in `extras` and the loose files.

    `plugin` chooses where several offer this name. A loose file that offers something is chosen by
    that offer, as any plugin. Raises UsageError for a plugin that cannot be used, for options that
    its model refuses and for two owners of one first-result hook.
    """
    owner = registry.find(kind, name, plugin)
    offer = owner.offer(kind, name)
    assert offer is not None
    where = f"the {kind} {name!r}, plugin {owner}"
    checked, instance = validate(offer.options, options, f"options of {where}"), owner.instance
    if offer.implementation:
        instance = _implementation(offer, where)(checked)
    chosen = {p.name: p for p in registry.extras(extras) if p.name in extras or not p.offers}
    chosen[owner.name] = dataclasses.replace(owner, instance=instance)
    manager = _manager(chosen.values(), owner.name)
    for hook in FIRST:
        if len(rivals := sorted(owners(getattr(manager.hook, hook)))) > 1:
            raise UsageError(
                f"the hook {hook!r} has several owners: {' and '.join(rivals)}\n"
                "  leave one, or make the others wrappers: @hookimpl(wrapper=True)"
            )
    if missing := lacking(offer, manager.hook):
        raise UsageError(f"{where} lacks {', '.join(missing)}\n  draftcore hooks {missing[0]}")
    return Binding(owner, offer, cast(Specs, manager.hook), checked)


def find_source(registry: Registry, uri: str) -> Source:
    """Open training data by the plugin that offers the scheme of its URI."""
    name = uri.partition(":")[0]
    return bind(registry, "source", name).hook.source(name=name, uri=uri)


def observers(registry: Registry, extras: Sequence[str] = ()) -> Specs:
    """Return the hooks of the run's observers alone: the plugins named and the loose files.

    A `Stop` that one of them returns is given its plugin's name.
    """
    return cast(Specs, _manager(registry.extras(extras)).hook)


def _implementation(offer: Offer, where: str) -> Any:
    """Import an algorithm's class, whose methods then answer the hooks of their names."""
    found = imported(offer.implementation, where)
    if not (inspect.isclass(found) and issubclass(found, Algorithm)):
        raise UsageError(
            f"{where}: {offer.implementation} is no subclass of Algorithm\n"
            "  derive it from draftcore.contracts.algorithm.Algorithm"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise UsageError(f"{where}: {found.__name__} lacks {missing}\n  write these methods")
    for method in (getattr(found, name, None) for name in HOOKS):
        if method and not hasattr(method, "draftcore_impl"):
            hookimpl(method)
    return found


# ---------------------------------------------------------------- what a hook raises and returns


def _manager(plugins: Iterable[Plugin], owner: str = "") -> pluggy.PluginManager:
    """Register plugins, each once, in the order of their names; a hook that fails names its plugin."""
    manager = register(())
    once = {id(plugin.instance): plugin for plugin in plugins}
    for plugin in sorted(once.values(), key=lambda plugin: plugin.name):
        guarded = ModuleType(plugin.name)
        for name in dir(plugin.instance):
            if opts := manager.parse_hookimpl_opts(plugin.instance, name):
                function = getattr(plugin.instance, name)
                hook, wraps = opts["specname"] or name, opts["wrapper"] or opts["hookwrapper"]
                observes = not (wraps or hook in FIRST or plugin.name == owner)
                guard: Any = _guard(function, hook, plugin, wraps, observes)
                guard.draftcore_impl = opts
                setattr(guarded, name, guard)
        manager.register(guarded, plugin.name)
    return manager


def _guard(
    function: Any, hook: str, plugin: Plugin, wraps: bool, observes: bool
) -> Callable[..., Any]:
    """Return a plugin's hook such that it names both where it fails, and is dropped if it observes."""

    def settled(found: Any, error: BaseException | None = None) -> Any:
        if isinstance(error, MEANT):
            raise error
        if error is not None:
            last = traceback.extract_tb(error.__traceback__)[-1]
            what = f"raised {raised(error)}\n  at {last.filename}:{last.lineno}"
        elif "torch" in sys.modules and sys.modules["torch"].compiler.is_compiling():
            return found
        else:
            kind = _hints(getattr(Specs, hook)).get("return")
            said = misfit(found, list[kind] if wraps and hook not in FIRST else kind, "it")  # type: ignore[valid-type]
            if not said:
                stops = isinstance(found, Stop)
                return dataclasses.replace(found, plugin=plugin.name) if stops else found
            what = f"returned {_kind_of(found)}, and that does not fit: {said}\n  draftcore hooks {hook}"
        failure = DraftcoreError(f"the hook {hook} of {plugin} {what}")
        if not observes:
            raise failure from error
        plugin.dropped = True
        print(f"warning: {failure}\n  the run goes on without {plugin.name}", file=sys.stderr)

    @functools.wraps(function)
    def guarded(*given: Any) -> Any:
        if observes and plugin.dropped:
            return None
        try:
            found = function(*given)
        except BaseException as error:
            return settled(None, error)
        return settled(found)

    @functools.wraps(function)
    def around(*given: Any) -> Any:
        try:
            found = yield from function(*given)
        except BaseException as error:
            return settled(None, error)
        return settled(found)

    return around if wraps else guarded


def misfit(value: Any, kind: Any, where: str) -> str:
    """Say in which part a value is not of a type of the contract, records looked into; '' if it is."""
    base, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return ""
    if base in (Union, UnionType):
        said = [misfit(value, one, where) for one in inner]
        return "" if "" in said else said[0]
    if base is Literal:
        return "" if value in inner else f"{where} is {value!r}, not one of {inner}"
    if getattr(base, "_is_protocol", False):
        names = {
            name for part in base.__mro__[:-2] for name in (*vars(part), *part.__annotations__)
        }
        absent = sorted(n for n in names if n[0] != "_" and not hasattr(value, n))
        return f"{where} is no {base.__name__}, as it lacks {', '.join(absent)}" if absent else ""
    if not isinstance(value, (int, float) if base is float else base):
        wanted = kind if inner else getattr(base, "__name__", base)
        return f"{where} is {_kind_of(value)}, not {wanted}"
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(value, Mapping):
        parts = [(one, inner[1], f"{where}[{key!r}]") for key, one in value.items()] * bool(inner)
    elif dataclasses.is_dataclass(value):
        hints = _hints(cast(Any, type(value))).items()
        parts = [(getattr(value, name), hint, f"its {name}") for name, hint in hints]
    elif inner and isinstance(value, Sequence | frozenset):
        each = [inner[0]] * len(value) if base is not tuple or inner[-1] is ... else inner
        if len(each) != len(value):
            return f"{where} has {len(value)} parts, not {len(each)}"
        parts = [
            (one, k, f"{where}[{i}]") for i, (one, k) in enumerate(zip(value, each, strict=True))
        ]
    return next(filter(None, (misfit(*part) for part in parts)), "")


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    return get_type_hints(of, _names("torch" in sys.modules))


@functools.cache
def _names(loaded: bool) -> dict[str, Any]:
    """What the contract's annotations name; they are written for type checkers, which import it.

    Before torch is loaded nothing is a tensor: who starts a run's processes need not wait for it.
    """
    rooms = ["store", "target", "capture", "source", "channel", "launcher", "runner", "serving"]
    modules = (import_module(f"draftcore.contracts.{room}") for room in [*rooms, "algorithm"])
    names = {name: value for module in modules for name, value in vars(module).items()}
    if not loaded:
        return {**names, "torch": object, "Tensor": object, "nn": object, "Path": object}
    import torch

    return {**names, "torch": torch, "Tensor": torch.Tensor, "nn": torch.nn, "Path": object}
