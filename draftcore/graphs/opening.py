"""The graph runners of a run, opened through the plugins that it selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from draftcore.binding import bind
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
from draftcore.plugins import Registry
from draftcore.target import TargetModel, TargetSpec, resolve_device

PROBED = (3, 8)  # rows and positions of a state that is looked at; no head count is likely 3


class Graphs:
    """Resolves both phases for a target and opens what they come to."""

    def __init__(self, config: RunConfig, registry: Registry) -> None:
        self.config, self.registry = config, registry
        self._prefill: tuple[TargetModel, PrefillRunner] | None = None
        self._tallies: list[tuple[PhaseName, Tally]] = []  # not the runners: they hold caches

    def resolve(self, name: PhaseName, target: TargetSpec, **known: Any) -> Phase:
        """Resolve a phase by what is known of the run. Raises UsageError as `resolve` does."""
        given: PhaseConfig = getattr(self.config.graphs, name)
        for plugin in given.plugins:
            self.registry.find("graph-plugin", plugin)
        if given.backend == EAGER:  # the target may not even be able to run here
            return resolve(name, given, Facts(rows=0, longest=0, device=""))
        if given.backend != AUTO:
            self.registry.find("graph", given.backend)
        return resolve(name, given, dataclasses.replace(self.facts(name, target), **known))

    def facts(self, name: PhaseName, target: TargetSpec) -> Facts:
        config, model = self.config, target.text_config
        offers = [offer for plugin in self.registry.ready for offer in plugin.offers]
        capture = [o for o in offers if (o.kind, o.name) == ("capture", config.capture.name)]
        prefill, longest = name == "prefill", config.data.max_length
        return Facts(
            rows=config.capture.batch if prefill else config.eval.batch,
            longest=longest if prefill else longest + config.eval.max_new_tokens + STEP,
            device=resolve_device(target.device).type,
            backends={o.name: o.capabilities for o in offers if o.kind == "graph"},
            capture=frozenset().union(*(o.capabilities for o in capture)),
            attention=getattr(model, "_attn_implementation", None),
            layer_kinds=frozenset(getattr(model, "layer_types", None) or ()),
            model_type=str(model.model_type),
            rope=frozenset(_rope_types(getattr(model, "rope_parameters", None) or {})),
            experts=getattr(model, "_experts_implementation", None),
            temperature=config.eval.temperature,
        )

    def prefill(self, model: TargetModel) -> PrefillRunner:
        """What runs the target for capture: one per model, for all captures of the run."""
        if self._prefill is None or self._prefill[0] is not model:
            self._prefill = model, self._open_prefill(model)
        return self._prefill[1]

    def _open_prefill(self, model: TargetModel) -> PrefillRunner:
        phase = self.resolve("prefill", model.spec)
        if phase.backend == EAGER:
            return EagerPrefillRunner(model)
        backend, able = self._backend(phase)
        plugins = [self._plugin(name) for name in phase.plugins]
        runner = PrefillGraphRunner(model, phase, backend, plugins, breaks="breaks" in able)
        self._tallies.append((phase.name, runner.tally))
        return runner

    def decode(self, model: TargetModel, drafter: Drafter, module: nn.Module) -> Runner:
        """What decodes with this draft, whose weights are those of `module`."""
        phase = self.resolve("decode", model.spec)
        if phase.backend != EAGER:
            rows, length = PROBED
            state_fault = fault(drafter.allocate(rows, length), rows)
            phase = self.resolve("decode", model.spec, state_fault=state_fault)
        if phase.backend == EAGER:
            return EagerRunner(model, drafter)
        backend, _ = self._backend(phase)
        plugins = [self._plugin(name) for name in phase.plugins]
        runner = DecodeGraphRunner(model, drafter, module, phase, backend, plugins)
        self._tallies.append((phase.name, runner.tally))
        return runner

    def plan(self, target: TargetSpec) -> Iterator[tuple[str, str, str, str]]:
        """Yield phase, key, value and who decided, below a heading."""
        yield "PHASE", "KEY", "VALUE", "DECIDED BY"
        for name in ("prefill", "decode"):
            yield from self.resolve(name, target).lines()

    def report(self) -> Iterator[tuple[str, str]]:
        """Yield each phase that was opened with a backend, and what became of its batches."""
        for name, tally in self._tallies:
            counts = ", ".join(f"{count} {what}" for what, count in tally.counts.items())
            yield f"graphs.{name}", f"{tally.captures} captured, {counts or 'unused'}"

    def _backend(self, phase: Phase) -> tuple[GraphBackend, frozenset[str]]:
        binding = bind(self.registry, "graph", phase.backend, self.config.plugins)
        options = binding.options(phase.options)
        backend = binding.hook.graph_backend(name=phase.backend, options=options)
        if backend is None:
            raise DraftcoreError(
                f"plugin {binding.plugin} offers the graph backend {phase.backend!r} and answers None\n"
                "  its hook graph_backend must return one for every name that it offers"
            )
        return backend, binding.capabilities

    def _plugin(self, name: str) -> GraphPlugin:
        binding = bind(self.registry, "graph-plugin", name, self.config.plugins)
        return binding.hook.graph_plugin(name=name, options=binding.options({}))


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of rotary embedding, one for all layers or one per kind of layer."""
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _rope_types(value)
        elif name == "rope_type":
            yield str(value)
