"""Bind a run to the plugins it selected.

Installed is not selected: each binding is a plugin manager of its own, with one owner and the
wrappers and observers of the run, so nothing else that is installed can change a result. Two
owners of one first-result hook is an error here, where pluggy would take the last registered.
What a hook returns is checked here, once, by the types of the contract.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import pluggy

from draftcore import hookimpl
from draftcore.contracts.algorithm import Algorithm, Stop
from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import Kind, Offer
from draftcore.errors import DraftcoreError, UsageError
from draftcore.options import imported, validate
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import HOOKS, Registry, lacking, owners, register


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
    chosen = [p for p in registry.extras(extras) if p.name in extras or not p.offers]
    manager = _checked(register([dataclasses.replace(owner, instance=instance), *chosen]))
    for hook in (getattr(manager.hook, name) for name in HOOKS):
        rivals = sorted(owners(hook))
        if hook.spec.opts["firstresult"] and len(rivals) > 1:
            raise UsageError(
                f"the hook {hook.name!r} has several owners: {' and '.join(rivals)}\n"
                "  leave one, or make the others wrappers: @hookimpl(wrapper=True)"
            )
    if missing := lacking(offer, manager.hook):
        raise UsageError(f"{where} lacks {', '.join(missing)}\n  draftcore hooks {missing[0]}")
    return Binding(owner, offer, cast(Specs, manager.hook), checked)


def observers(registry: Registry, extras: Sequence[str] = ()) -> Specs:
    """Return the hooks of the run's observers alone: the plugins named and the loose files.

    A `Stop` that one of them returns is given its plugin's name.
    """
    manager = _checked(register(registry.extras(extras)))
    for hook in (manager.hook.step_finished, manager.hook.evaluated):
        for impl in hook.get_hookimpls():
            signed = functools.partial(_signed, impl.function, impl.plugin_name)
            impl.function = signed  # type: ignore[misc]
    return cast(Specs, manager.hook)


def _signed(function: Callable[..., Any], plugin: str, *given: Any) -> Any:
    found = function(*given)
    return dataclasses.replace(found, plugin=plugin) if isinstance(found, Stop) else found


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


# ---------------------------------------------------------------- what a hook returns


def _checked(manager: pluggy.PluginManager) -> pluggy.PluginManager:
    """Let a hook's answer be compared with the type that its specification says."""

    def after(outcome: pluggy.Result[Any], name: str, impls: Sequence[Any], _: Any) -> None:
        import torch

        if not impls or outcome.exception is not None or torch.compiler.is_compiling():
            return
        found, first = outcome.get_result(), getattr(manager.hook, name).spec.opts["firstresult"]
        for answer in [found] if first else found:
            if said := misfit(answer, _hints(getattr(Specs, name)).get("return"), "it"):
                who = " and ".join(impl.plugin_name for impl in impls)
                raise DraftcoreError(
                    f"the hook {name} of {who} returned {_kind_of(answer)}, and that does not fit: "
                    f"{said}\n  draftcore hooks {name}   # shows what it returns"
                )

    manager.add_hookcall_monitoring(lambda *_: None, after)
    return manager


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
    return get_type_hints(of, _names())


@functools.cache
def _names() -> dict[str, Any]:
    """What the contract's annotations name; they are written for type checkers, which import it."""
    import torch

    from draftcore.contracts import algorithm, capture, channel, runner, serving, store, target

    modules = (store, target, capture, channel, runner, serving, algorithm)
    names = {name: value for module in modules for name, value in vars(module).items()}
    return {**names, "torch": torch, "Tensor": torch.Tensor, "nn": torch.nn, "Path": object}
