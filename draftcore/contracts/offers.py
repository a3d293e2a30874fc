"""What a plugin offers, and how a run reaches what it has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar

Kind = str  # the core's, and those that dists bring: `draftcore list-plugins` shows them
# On a field of an options model: the option changes no bit of a captured feature.
SAME_FEATURES: Any = {"same_features": True}
FREE = "free"
T = TypeVar("T")
# Of a field of a configuration, and of a target's options: a resumed run may change it.
Free = Annotated[T, FREE]


@dataclass(frozen=True)
class Offer:
    """One thing a plugin offers.

    `options` is the dotted path `module:Class` of its options model, imported on selection; '' for
    an offer without options. Capabilities are what others may ask for instead of a name. Of an
    algorithm written as a class, `implementation` is the path of its `Algorithm`; one that is
    written as hooks of the plugin's module leaves it out. `needs` are modules that its dist does not
    require, such as an engine of several builds, each with what installs it. `examples` are sets of
    options of an algorithm that lead where the default ones do not: its conformance suite tries them.
    """

    kind: Kind
    name: str
    capabilities: frozenset[str] = frozenset()
    options: str = ""
    implementation: str = ""
    needs: Mapping[str, str] = field(default_factory=dict, hash=False)
    examples: Sequence[Mapping[str, Any]] = field(default=(), hash=False)

    def lacks(self) -> str:
        """Say which of the modules it needs are not installed, and what to do; '' if all are."""
        missing = {name: fix for name, fix in self.needs.items() if find_spec(name) is None}
        lines = (f"{name}, which is not installed\n  {fix}" for name, fix in missing.items())
        return "\n".join(f"the {self.kind} {self.name!r} needs {line}" for line in lines)

    def __str__(self) -> str:
        has = f" [{', '.join(sorted(self.capabilities))}]" if self.capabilities else ""
        return f"{self.kind} {self.name}{has}"


@dataclass(frozen=True)
class Bound:
    """An offer that a run has chosen and can call.

    `hook` holds every hook (`contracts.hooks.Specs`), and reaches the offer's owner and the run's wrappers;
    `options` are validated by the offer's model, None for an offer without.
    """

    plugin: Any
    offer: Offer
    hook: Any
    options: Any

    @property
    def capabilities(self) -> frozenset[str]:
        return self.offer.capabilities
