"""Bind a run to the plugins it selected.

Installed is not selected: each binding is a plugin manager of its own, with one owner and the
wrappers and observers of the run, so nothing else that is installed can change a result. Two
owners of one first-result hook is an error here, where pluggy would take the last registered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import Kind, Offer
from draftcore.errors import UsageError
from draftcore.options import validate
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import HOOKS, Registry, owners, register


@dataclass(frozen=True)
class Binding:
    """An offer that can be called: `hook` reaches its owner and the run's wrappers."""

    plugin: Plugin
    offer: Offer
    hook: Specs

    @property
    def capabilities(self) -> frozenset[str]:
        return self.offer.capabilities

    def options(self, data: Mapping[str, Any]) -> Any:
        """Validate options by the offer's model; None for an offer without. Raises UsageError."""
        where = f"options of the {self.offer.kind} {self.offer.name!r}, plugin {self.plugin}"
        return validate(self.offer.options, data, where)


def bind(registry: Registry, kind: Kind, name: str, extras: Sequence[str] = ()) -> Binding:
    """Bind the owner of (kind, name) with the plugins named in `extras` and the loose files.

    A loose file that offers something is chosen by that offer, as any plugin. Raises UsageError
    for a plugin that cannot be used and for two owners of one first-result hook.
    """
    owner = registry.find(kind, name)
    offer = owner.offer(kind, name)
    assert offer is not None
    chosen = [p for p in registry.extras(extras) if p.name in extras or not p.offers]
    manager = register([owner, *chosen])
    for hook in (getattr(manager.hook, name) for name in HOOKS):
        rivals = sorted(owners(hook))
        if hook.spec.opts["firstresult"] and len(rivals) > 1:
            raise UsageError(
                f"the hook {hook.name!r} has several owners: {' and '.join(rivals)}\n"
                "  leave one, or make the others wrappers: @hookimpl(wrapper=True)"
            )
    return Binding(owner, offer, cast(Specs, manager.hook))


def observers(registry: Registry, extras: Sequence[str] = ()) -> Specs:
    """Return the hooks of the run's observers alone: the plugins named and the loose files."""
    return cast(Specs, register(registry.extras(extras)).hook)
