"""Bind a run to the plugins it selected.

Installed is not selected: each binding is a plugin manager of its own, with one owner and the
wrappers and observers of the run, so nothing else that is installed can change a result. Two
owners of one first-result hook is an error here, where pluggy would take the last registered.
What a hook returns is checked here, once, by the types of the contract, and what it raises is named
with hook and plugin. An observer that fails so is dropped: the run goes on without it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType, ModuleType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import pluggy

from draftcore import contracts, hookimpl
from draftcore.contracts.algorithm import Algorithm, Stop
from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import Bound, Kind, Offer
from draftcore.errors import DraftcoreError, UsageError, raised
from draftcore.options import imported, validate
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import Registry, missing_hooks
from draftcore.plugins.specs import first_results, hooks, manager, marked, mistake, of_algorithms

MEANT = (DraftcoreError, KeyboardInterrupt, GeneratorExit)  # leave a hook as they are


@dataclass(frozen=True)
class Binding(Bound):
    """An offer that is bound, as the core has it."""

    plugin: Plugin
    hook: Specs


def bind(
    registry: Registry, kind: Kind, name: str, options: Mapping[str, Any] = MappingProxyType({}),
    extras: Sequence[str] = (), plugin: str = "", beside: Iterable[str] = (),
) -> Binding:  # fmt: skip
    """Bind the owner of (kind, name) with the plugins named in `extras` and the loose files.

    `plugin` chooses where several offer this name; keys `beside` the options are the core's, for errors. A
    loose file that offers something is chosen by that offer, as any plugin. Raises UsageError for a
    plugin that cannot be used, for options that its model refuses and for two owners of one
    first-result hook.
    """
    owner = registry.find(kind, name, plugin)
    offer = owner.offer(kind, name)
    assert offer is not None
    where = f"the {kind} {name!r}, plugin {owner}"
    checked = validate(offer.options, options, f"options of {where}", beside)
    chosen = {p.name: p for p in registry.extras(extras) if p.name in extras or not p.offers}
    chosen[owner.name] = owner
    if offer.implementation:
        chosen[owner.name] = replace(owner, instance=_implementation(offer, where)(checked))
    bound = _manager(chosen.values(), owner.name)
    for hook in first_results():
        impls = getattr(bound.hook, hook).get_hookimpls()
        if len(rivals := sorted(i.plugin_name for i in impls if not i.wrapper)) > 1:
            problem = f"the hook {hook!r} has several owners: {' and '.join(rivals)}"
            remedy = "leave one, or make the others wrappers: @hookimpl(wrapper=True)"
            raise UsageError(f"{problem}\n  {remedy}")
    return Binding(owner, offer, cast(Specs, bound.hook), checked)


def observers(registry: Registry, extras: Sequence[str] = ()) -> Specs:
    """Return the hooks of the run's observers: the plugins named, the loose files, who else watches.

    A `Stop` that one of them returns is given its plugin's name.
    """
    return cast(Specs, _manager([*registry.extras(extras), *registry.watching]).hook)


def _implementation(offer: Offer, where: str) -> Any:
    """Import an algorithm's class, whose methods then answer the hooks of their names."""
    algorithm = imported(path := offer.implementation, where)
    if not (inspect.isclass(algorithm) and issubclass(algorithm, Algorithm)):
        raise UsageError(f"{where}: {path} is no subclass of Algorithm\n  derive it")
    methods = dict(inspect.getmembers(algorithm, inspect.isroutine))
    written = methods.keys() - algorithm.__abstractmethods__
    if missing := missing_hooks(offer, written):
        raise UsageError(f"{where}: {path} lacks {', '.join(missing)}\n  write these methods")
    for name in written.intersection(of_algorithms()):
        hookimpl(methods[name])
    for name, hook, impl in marked(algorithm):
        if wrong := mistake(hook, impl.argnames):
            raise UsageError(f"{where}: {path}: {wrong}\n  draftcore hooks {name}")
    return algorithm


# ---------------------------------------------------------------- what a hook raises and returns


def _manager(plugins: Iterable[Plugin], owner: str = "") -> pluggy.PluginManager:
    """Register plugins, each once, in the order of their names; a hook that fails names its plugin."""
    made, first = manager(), first_results()
    by_instance = {id(plugin.instance): plugin for plugin in plugins}
    for plugin in sorted(by_instance.values(), key=lambda plugin: plugin.name):
        guarded = ModuleType(plugin.name)
        for name, hook, impl in marked(plugin.instance):
            observes = not (impl.wrapper or hook in first or plugin.name == owner)
            setattr(guarded, name, _guard(impl, hook, plugin, observes))
        made.register(guarded, plugin.name)
    return made


def _guard(impl: pluggy.HookImpl, hook: str, plugin: Plugin, observes: bool) -> Any:
    """Return a plugin's hook such that it names both where it fails, and is dropped if it observes."""
    spec, function = hooks().get(hook), impl.function  # no spec if nobody here asks for this hook

    def checked_result(result: Any, error: BaseException | None = None) -> Any:
        if isinstance(error, MEANT):
            raise error
        if error is not None:
            last = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"raised {raised(error)}\n  at {last.filename}:{last.lineno}"
        elif "torch" in sys.modules and sys.modules["torch"].compiler.is_compiling():
            return result
        else:
            hint = _hints(spec).get("return")
            several = impl.wrapper and hook not in first_results()
            wrong = type_error(result, list[hint] if several else hint)  # type: ignore[valid-type]
            if not wrong:
                return replace(result, plugin=plugin.name) if isinstance(result, Stop) else result
            problem = f"returned {_type_of(result)}, and that does not fit: {wrong}\n  draftcore hooks {hook}"
        failure = DraftcoreError(f"the hook {hook} of {plugin} {problem}")
        if not observes:
            raise failure from error
        plugin.dropped = True
        print(f"warning: {failure}\n  the run goes on without {plugin.name}", file=sys.stderr)

    @functools.wraps(function)
    def guarded(*arguments: Any) -> Any:
        if observes and plugin.dropped:
            return None
        try:
            result = function(*arguments)
        except BaseException as error:
            return checked_result(None, error)
        return checked_result(result)

    @functools.wraps(function)
    def around(*arguments: Any) -> Any:
        try:
            result = yield from cast(Any, function(*arguments))
        except BaseException as error:
            return checked_result(None, error)
        return checked_result(result)

    return around if impl.wrapper else guarded


def type_error(value: Any, hint: Any, where: str = "it") -> str:
    """Say which part of what a hook returned is not of its type in the contract; '' if none is.

    Records are checked by their fields, containers by their first element: a batch has thousands, and
    the thread that trains waits for this.
    """
    parts = [(where, value, hint)]
    for place, part, asked in parts:  # grows as it is read
        classes, members, fields, elements = _parsed(asked)
        if not isinstance(part, classes):
            wanted = asked if get_args(asked) else asked.__name__
            return f"{place} is {_type_of(part)}, not {wanted}"
        if absent := [name for name in members if not hasattr(part, name)]:
            return f"{place} is no {asked.__name__}, as it lacks {', '.join(absent)}"
        if part is None:
            continue
        parts += [(f"its {name}", getattr(part, name), field) for name, field in fields]
        if len(elements) > 1 and len(part) != len(elements):
            return f"{place} has {len(part)} parts, not {len(elements)}"
        items = part.items() if isinstance(part, Mapping) else enumerate(part if elements else ())
        named = zip(items, elements, strict=False)
        parts += [(f"{place}[{key!r}]", element, kind) for (key, element), kind in named]
    return ""


@functools.cache
def _parsed(hint: Any) -> tuple[Any, Sequence[str], Iterable[tuple[str, Any]], Sequence[Any]]:
    """Return a hint's classes, a protocol's members, a record's fields, the types of first elements.

    Of a union, which is of a type and None, all but the classes are those of its first type.
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return tuple(_parsed(part)[0] for part in inner), *_parsed(inner[0])[1:]
    if kind is Literal:
        return tuple(map(type, inner)), (), (), ()
    if getattr(kind, "_is_protocol", False):
        names = {n for base in kind.__mro__[:-2] for n in (*vars(base), *base.__annotations__)}
        return object, sorted(name for name in names if name[0] != "_"), (), ()
    record: Any = kind
    fields = _hints(record).items() if is_dataclass(kind) else ()
    elements = inner[1:] if issubclass(kind, Mapping) else [t for t in inner if t is not ...]
    return {Any: object, float: (int, float)}.get(kind, kind), (), fields, elements


def _type_of(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    own = vars(sys.modules[of.__module__])  # of a dist that brings a hook, too
    return get_type_hints(of, {**own, **_names("torch" in sys.modules)})


@functools.cache
def _names(torch_loaded: bool) -> dict[str, Any]:
    """Return what the contract's annotations name: written for type checkers, they import none of it.

    Before torch is loaded nothing is a tensor: who starts a run's processes need not wait for it.
    """
    paths = (f"draftcore.contracts.{file.name}" for file in iter_modules(contracts.__path__))
    names = {name: value for path in paths for name, value in vars(import_module(path)).items()}
    torch: Any = sys.modules["torch"] if torch_loaded else SimpleNamespace(Tensor=object, nn=object)
    return {**names, "torch": torch, "Tensor": torch.Tensor, "nn": torch.nn, "Path": object}
