"""The graph runners of a run, opened through the plugins that it selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from draftcore.binding import Binding, bind
from draftcore.config import RunConfig
from draftcore.errors import DraftcoreError
from draftcore.evaluation import Drafter
from draftcore.evaluation.decode import EagerRunner, Runner
from draftcore.graphs import GraphBackend, GraphPlugin
from draftcore.graphs.config import PhaseConfig
from draftcore.graphs.decode import DecodeGraphRunner
from draftcore.graphs.prefill import EagerPrefillRunner, PrefillGraphRunner, PrefillRunner
from draftcore.graphs.resolve import AUTO, EAGER, STEP, Facts, Phase, PhaseName, resolve
from draftcore.graphs.runners import Tally
from draftcore.graphs.states import fault
from draftcore.offers import Kind
from draftcore.plugins import Registry
from draftcore.target import TargetModel, TargetSpec, resolve_device

PROBED = (3, 8)  # rows and positions of a state that is looked at; no head count is likely 3


class Graphs:
    """Resolves both phases for a target and opens what they come to."""

    def __init__(self, config: RunConfig, registry: Registry) -> None:
        self.config, self.registry = config, registry
        self._prefill: tuple[TargetModel, PrefillRunner] | None = None
        self._tallies: list[tuple[PhaseName, Tally]] = []  # not the runners: they hold caches
        self._eager: list[tuple[PhaseName, str]] = []

    def resolve(self, name: PhaseName, target: TargetSpec, **known: Any) -> Phase:
        """Resolve a phase by what is known of the run. Raises UsageError as `resolve` does."""
        given: PhaseConfig = getattr(self.config.graphs, name)
        for plugin, options in given.plugins.items():
            self._bind("graph-plugin", plugin).options(options)
        if given.backend == EAGER:  # the target may not even be able to run here
            return resolve(name, given, Facts(rows=0, longest=0, device="", **self._able()))
        if given.backend != AUTO:
            self._bind("graph", given.backend).options(given.options)
        return resolve(name, given, dataclasses.replace(self.facts(name, target), **known))

    def facts(self, name: PhaseName, target: TargetSpec) -> Facts:
        config, model = self.config, target.text_config
        prefill, longest = name == "prefill", config.data.max_length
        return Facts(
            rows=config.capture.batch if prefill else config.eval.batch,
            longest=longest if prefill else longest + config.eval.max_new_tokens + STEP,
            device=resolve_device(target.device).type,
            **self._able(),
            capture=self._offered("capture").get(config.capture.name, frozenset()),
            attention=getattr(model, "_attn_implementation", None),
            layer_kinds=frozenset(getattr(model, "layer_types", None) or ()),
            model_type=str(model.model_type),
            rope=frozenset(_rope_types(getattr(model, "rope_parameters", None) or {})),
            experts=getattr(model, "_experts_implementation", None),
            temperature=config.eval.temperature,
        )

    def _able(self) -> dict[str, Any]:
        return {"backends": self._offered("graph"), "plugins": self._offered("graph-plugin")}

    def _offered(self, kind: Kind) -> dict[str, frozenset[str]]:
        """The capabilities of all usable offers of a kind, by name."""
        offers = (offer for plugin in self.registry.ready for offer in plugin.offers)
        return {offer.name: offer.capabilities for offer in offers if offer.kind == kind}

    def prefill(self, model: TargetModel) -> PrefillRunner:
        """What runs the target for capture: one per model, for all captures of the run."""
        if self._prefill is None or self._prefill[0] is not model:
            self._prefill = model, self._open_prefill(model)
        return self._prefill[1]

    def _open_prefill(self, model: TargetModel) -> PrefillRunner:
        phase = self.resolve("prefill", model.spec)
        self._note(phase)
        if phase.backend == EAGER:
            return EagerPrefillRunner(model)
        backend, able = self._backend(phase)
        plugins = self._plugins(phase)
        runner = PrefillGraphRunner(model, phase, backend, plugins, breaks="breaks" in able)
        self._tallies.append((phase.name, runner.tally))
        return runner

    def decode(self, model: TargetModel, drafter: Drafter, module: nn.Module) -> Runner:
        """What decodes with this draft, whose weights are those of `module`."""
        phase = self.resolve("decode", model.spec)
        if phase.backend != EAGER:
            rows, length = PROBED
            if found := fault(drafter.allocate(rows, length), rows):
                phase = self.resolve("decode", model.spec, faults={"drafter-state": found})
        self._note(phase)
        if phase.backend == EAGER:
            return EagerRunner(model, drafter)
        backend, _ = self._backend(phase)
        plugins = self._plugins(phase)
        runner = DecodeGraphRunner(model, drafter, module, phase, backend, plugins)
        self._tallies.append((phase.name, runner.tally))
        return runner

    def plan(self, target: TargetSpec) -> Iterator[tuple[str, str, str, str]]:
        """Yield phase, key, value and who decided, below a heading."""
        yield "PHASE", "KEY", "VALUE", "DECIDED BY"
        for name in ("prefill", "decode"):
            yield from self.resolve(name, target).lines()

    def report(self) -> Iterator[tuple[str, str]]:
        """Yield each phase that was opened and what became of it, unless eager was asked for."""
        for name, said in self._eager:
            yield f"graphs.{name}", said
        for name, tally in self._tallies:
            counts = ", ".join(f"{count} {what}" for what, count in tally.counts.items())
            yield f"graphs.{name}", f"{tally.captures} captured, {counts or 'unused'}"

    def _note(self, phase: Phase) -> None:
        """Keep who decided on eager, where nobody asked for it."""
        given: PhaseConfig = getattr(self.config.graphs, phase.name)
        said = f"eager, {phase.decided['backend']}"
        if phase.backend == EAGER != given.backend and (phase.name, said) not in self._eager:
            self._eager.append((phase.name, said))

    def _bind(self, kind: Kind, name: str) -> Binding:
        return bind(self.registry, kind, name, self.config.plugins)

    def _backend(self, phase: Phase) -> tuple[GraphBackend, frozenset[str]]:
        binding = self._bind("graph", phase.backend)
        options = binding.options(phase.options)
        backend = binding.hook.graph_backend(name=phase.backend, options=options)
        return _answered(backend, binding, "graph_backend"), binding.capabilities

    def _plugins(self, phase: Phase) -> list[GraphPlugin]:
        """The phase's graph plugins, in the order in which they are named."""
        opened = []
        for name, given in phase.plugins.items():
            binding = self._bind("graph-plugin", name)
            plugin = binding.hook.graph_plugin(name=name, options=binding.options(given))
            opened.append(_answered(plugin, binding, "graph_plugin"))
        return opened


T = TypeVar("T")


def _answered(opened: T | None, binding: Binding, hook: str) -> T:
    if opened is None:
        offer = binding.offer
        raise DraftcoreError(
            f"plugin {binding.plugin} offers the {offer.kind} {offer.name!r} and answers None\n"
            f"  its hook {hook} must return one for every name that it offers"
        )
    return opened


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of rotary embedding, one for all layers or one per kind of layer."""
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _rope_types(value)
        elif name == "rope_type":
            yield str(value)
