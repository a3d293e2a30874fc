"""The runner `graphs`: which mechanism runs a phase, opened through the plugins that the run selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from draftcore.contracts.algorithm import Drafter
from draftcore.contracts.offers import Bound
from draftcore.contracts.runner import (
    DecodeRunner,
    GraphBackend,
    GraphPlugin,
    RunnerContext,
)
from draftcore.contracts.target import PrefillRunner, TargetModel, TargetSpec
from draftcore.errors import DraftcoreError
from draftcore.evaluation.decode import EagerRunner
from draftcore.target import EagerPrefillRunner
from draftcore.tensors import resolve_device
from draftcore_graphs.config import PhaseConfig
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.resolve import AUTO, EAGER, STEP, Facts, Phase, resolve
from draftcore_graphs.runners import Tally
from draftcore_graphs.states import fault

PROBED = (3, 8)  # rows and positions of a state that is looked at; no head count is likely 3


class Graphs:
    """The runner `graphs`: replays a phase through a graph backend; see `contracts.runner.Runner`."""

    def __init__(self, context: RunnerContext, given: PhaseConfig) -> None:
        self.context, self.given, self.name = context, given, context.phase
        self._prefill: tuple[TargetModel, PrefillRunner] | None = None
        self._tallies: list[Tally] = []  # not the runners: they hold caches
        self._eager: list[str] = []  # who decided on eager, where nobody asked for it

    def check(self, target: TargetSpec) -> None:
        self._resolve(target)

    def plan(self, target: TargetSpec) -> Iterator[tuple[str, str, str]]:
        yield from self._resolve(target).lines()

    def prefill(self, model: TargetModel) -> PrefillRunner:
        if self._prefill is None or self._prefill[0] is not model:
            self._prefill = model, self._open_prefill(model)
        return self._prefill[1]

    def decode(self, model: TargetModel, drafter: Drafter, module: nn.Module) -> DecodeRunner:
        phase = self._resolve(model.spec)
        if phase.backend != EAGER:
            rows, length = PROBED
            if found := fault(drafter.allocate(rows, length), rows):
                phase = self._resolve(model.spec, faults={"drafter-state": found})
        self._note(phase)
        if phase.backend == EAGER:
            return EagerRunner(model, drafter)
        backend, _ = self._backend(phase)
        runner = DecodeGraphRunner(model, drafter, module, phase, backend, self._plugins(phase))
        self._tallies.append(runner.tally)
        return runner

    def report(self) -> Iterator[str]:
        yield from self._eager
        for tally in self._tallies:
            counts = ", ".join(f"{count} {what}" for what, count in tally.counts.items())
            yield f"{tally.captures} captured, {counts or 'unused'}"

    def _open_prefill(self, model: TargetModel) -> PrefillRunner:
        phase = self._resolve(model.spec)
        self._note(phase)
        if phase.backend == EAGER:
            return EagerPrefillRunner(model)
        backend, able = self._backend(phase)
        plugins = self._plugins(phase)
        runner = PrefillGraphRunner(model, phase, backend, plugins, breaks="breaks" in able)
        self._tallies.append(runner.tally)
        return runner

    def _resolve(self, target: TargetSpec, **known: Any) -> Phase:
        """Resolve the phase by what is known of the run. Raises UsageError as `resolve` does."""
        given, context, model = self.given, self.context, target.text_config
        for plugin, options in given.plugins.items():
            context.bind("graph-plugin", plugin).options(options)
        backends, plugins = context.offered("graph"), context.offered("graph-plugin")
        if given.backend == EAGER:  # the target may not even be able to run here
            return resolve(self.name, given, Facts(0, 0, "", backends, plugins))
        if given.backend != AUTO:
            context.bind("graph", given.backend).options(given.options)
        facts = Facts(
            rows=context.rows,
            longest=context.longest + (STEP if self.name == "decode" else 0),
            device=resolve_device(target.device).type,
            backends=backends,
            plugins=plugins,
            capture=context.offered("capture").get(context.capture, frozenset()),
            attention=getattr(model, "_attn_implementation", None),
            layer_kinds=frozenset(getattr(model, "layer_types", None) or ()),
            model_type=str(model.model_type),
            rope=frozenset(_rope_types(getattr(model, "rope_parameters", None) or {})),
            experts=getattr(model, "_experts_implementation", None),
            temperature=context.temperature,
        )
        return resolve(self.name, given, dataclasses.replace(facts, **known))

    def _note(self, phase: Phase) -> None:
        said = f"eager, {phase.decided['backend']}"
        if phase.backend == EAGER != self.given.backend and said not in self._eager:
            self._eager.append(said)

    def _backend(self, phase: Phase) -> tuple[GraphBackend, frozenset[str]]:
        bound = self.context.bind("graph", phase.backend)
        options = bound.options(phase.options)
        backend = bound.hook.graph_backend(name=phase.backend, options=options)
        return _answered(backend, bound, "graph_backend"), bound.capabilities

    def _plugins(self, phase: Phase) -> list[GraphPlugin]:
        """The phase's graph plugins, in the order in which they are named."""
        opened = []
        for name, given in phase.plugins.items():
            bound = self.context.bind("graph-plugin", name)
            plugin = bound.hook.graph_plugin(name=name, options=bound.options(given))
            opened.append(_answered(plugin, bound, "graph_plugin"))
        return opened


T = TypeVar("T")


def _answered(opened: T | None, bound: Bound, hook: str) -> T:
    if opened is None:
        offer = bound.offer
        raise DraftcoreError(
            f"plugin {bound.plugin} offers the {offer.kind} {offer.name!r} and answers None\n"
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
