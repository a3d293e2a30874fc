"""The runner `graphs`: opens what runs one phase, through the graph backend that its options name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from draftcore_eval.decode import EagerRunner
from draftcore_eval.runner import DecodeRunner
from draftcore_hf.decoder import decoder_model
from torch import nn

from draftcore.contracts.algorithm import Drafter
from draftcore.contracts.runner import GraphBackend, RunnerContext
from draftcore.contracts.target import PrefillRunner, TargetModel, TargetSpec
from draftcore.errors import UsageError
from draftcore.tensors import resolve_device
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.graph_plugin import GraphPlugin
from draftcore_graphs.options import GraphsOptions
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.resolve import AUTO, EAGER, STEP, Facts, Phase, resolve
from draftcore_graphs.runners import Tally
from draftcore_graphs.states import fault

PROBED = (3, 8)  # rows and positions of the state that `fault` looks at; no head count is likely 3


class Graphs:
    """Opens a graph runner for one phase, or the eager one; see `contracts.runner.Runner`."""

    def __init__(self, context: RunnerContext, options: GraphsOptions) -> None:
        self.context, self.options = context, options
        self._prefill: tuple[TargetModel, PrefillRunner] | None = None
        self._tallies: list[Tally] = []  # the runners themselves would keep their caches alive
        self._said: list[str] = []  # what differs from what the options name

    def check(self, target: TargetSpec) -> None:
        phase = self._resolve(target)
        if phase.backend != EAGER:
            self._backend(phase)

    def plan(self, target: TargetSpec) -> Iterator[tuple[str, str, str]]:
        """Yield key, value and who decided it; raises UsageError as `check` does."""
        self.check(target)
        yield from self._resolve(target).lines()

    def prefill(self, model: TargetModel) -> PrefillRunner:
        if self._prefill is None or self._prefill[0] is not model:
            self._prefill = model, self._open_prefill(model)
        return self._prefill[1]

    def _open_prefill(self, model: TargetModel) -> PrefillRunner:
        phase = self._resolve(model.spec)
        if phase.backend != EAGER and (faults := target_faults(model)):
            phase = self._resolve(model.spec, faults=faults)
        if phase.backend == EAGER:
            self._note_eager(phase)
            return model
        backend, able = self._backend(phase)
        plugins = self._plugins(phase)
        runner = PrefillGraphRunner(model, phase, backend, plugins, breaks="breaks" in able)
        self._tallies.append(runner.tally)
        return runner

    def decode(self, model: TargetModel, drafter: Drafter, module: nn.Module) -> DecodeRunner:
        phase = self._resolve(model.spec)
        if phase.backend != EAGER:
            rows, length = PROBED
            found = target_faults(model) | {
                "drafter-trees": "" if not hasattr(drafter, "depth") else f"depth {drafter.depth}",
                "drafter-state": fault(drafter.allocate(rows, length), rows),
            }
            if faults := {rule: why for rule, why in found.items() if why}:
                phase = self._resolve(model.spec, faults=faults)
        if phase.backend == EAGER:
            self._note_eager(phase)
            return EagerRunner(model, drafter)
        backend, _ = self._backend(phase)
        if phase.breaks:
            self._said.append(f"breaks of {phase.backend}: {phase.breaks}")
        runner = DecodeGraphRunner(model, drafter, module, phase, backend, self._plugins(phase))
        self._tallies.append(runner.tally)
        return runner

    def report(self) -> Iterator[str]:
        yield from dict.fromkeys(self._said)
        for tally in self._tallies:
            counts = ", ".join(f"{count} {what}" for what, count in tally.counts.items())
            yield f"{tally.captures} captured, {counts or 'unused'}"

    def _resolve(self, target: TargetSpec, **known: Any) -> Phase:
        """Resolve the phase by what is known of the run. Raises UsageError for what cannot work."""
        given, context, model = self.options, self.context, target.text_config
        for plugin, options in given.plugins.items():
            with self._naming(f"plugins.{plugin}"):
                context.bind("graph-plugin", plugin, options)
        backends, plugins = context.offered("graph"), context.offered("graph-plugin")
        if given.backend == EAGER:  # the target may not even be able to run here
            return resolve(context.phase, given, Facts(0, 0, "", backends, plugins))
        if given.backend != AUTO:
            with self._naming("backend"):
                context.bind("graph", given.backend, given.options)
        facts = Facts(
            rows=context.rows,
            longest=context.longest + (STEP if context.phase == "decode" else 0),
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
        return resolve(context.phase, given, dataclasses.replace(facts, **known))

    @contextmanager
    def _naming(self, key: str) -> Iterator[None]:
        """Begin the message of a UsageError with the key of the configuration that it is about."""
        try:
            yield
        except UsageError as error:
            raise UsageError(f"runner.{self.context.phase}.options.{key}: {error}") from None

    def _note_eager(self, phase: Phase) -> None:
        if self.options.backend != EAGER:
            self._said.append(f"eager, {phase.decided['backend']}")

    def _backend(self, phase: Phase) -> tuple[GraphBackend, frozenset[str]]:
        bound = self.context.bind("graph", phase.backend, phase.options)
        with self._naming("backend"):
            backend = bound.hook.graph_backend(name=phase.backend, options=bound.options)
        return backend, bound.capabilities

    def _plugins(self, phase: Phase) -> list[GraphPlugin]:
        """Open the phase's graph plugins, in the order in which they are named."""
        opened = []
        for name, given in phase.plugins.items():
            bound = self.context.bind("graph-plugin", name, given)
            opened.append(bound.hook.graph_plugin(name=name, options=bound.options))
        return opened


def target_faults(model: TargetModel) -> dict[str, str]:
    """Return by rule why no graph can read the weights of a running target."""
    module = decoder_model(model, "the runner 'graphs'").model
    home = torch.empty(0, device=model.device).device
    weights = itertools.chain(module.named_parameters(), module.named_buffers())
    away = [f"{name} is on {weight.device}" for name, weight in weights if weight.device != home]
    # What every layer of peft's has.
    adapted = [name for name, m in module.named_modules() if hasattr(m, "adapter_layer_names")]
    found = {"offloaded": away, "adapters": adapted}
    return {
        rule: f"{names[0]}, and {len(names) - 1} more" for rule, names in found.items() if names
    }


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of rotary embedding: one for all layers, or one per kind of layer."""
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _rope_types(value)
        elif name == "rope_type":
            yield str(value)
