"""From the options of a phase to what is run: which backend, which buckets, and who decided.

What the user set is locked, defaults fill the rest, and rules refuse what cannot work. A rule that
refuses a locked backend is an error that names the rule; no other backend is taken. A rule that
refuses what `auto` found makes the phase eager, and the plan shows the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftcore.contracts.runner import PhaseName
from draftcore.errors import UsageError
from draftcore_graphs.buckets import doubling, multiples
from draftcore_graphs.options import GraphsOptions

EAGER, AUTO = "eager", "auto"
STEP = 256  # tokens between two length buckets, unless there are more than MOST of them
MOST = 16


@dataclass(frozen=True)
class Facts:
    """What is known of a run, for the rules to judge by.

    `rows` and `longest` bound the batches of the phase. `backends` and `plugins` map each usable
    graph backend and plugin to its capabilities; `capture` holds those of the run's capture backend.
    `faults` maps a rule to what a running draft or target showed.
    """

    rows: int
    longest: int
    device: str
    backends: Mapping[str, frozenset[str]] = field(default_factory=dict)
    plugins: Mapping[str, frozenset[str]] = field(default_factory=dict)
    capture: frozenset[str] = frozenset({"graphs"})
    attention: str | None = None
    layer_kinds: frozenset[str] = frozenset()
    model_type: str = ""
    rope: frozenset[str] = frozenset()
    experts: str | None = None
    temperature: float = 0.0
    faults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """A resolved phase. `decided` says by key who decided: you, default, auto or a rule."""

    name: PhaseName
    backend: str = EAGER
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    max_bs: int | None = None
    padding: bool = True
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    decided: Mapping[str, str] = field(default_factory=dict, compare=False)
    breaks: str = ""  # why a backend that has them makes none

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield key, value and who decided it, and the rules that judge later."""
        yield "backend", self.backend, self.decided["backend"]
        if self.backend == EAGER:
            return
        for key in ("options", "rows", "lengths", "max_bs", "padding", "plugins"):
            yield key, _shown(getattr(self, key)), self.decided[key]
        if self.breaks:
            yield "breaks", self.breaks, self.backend
        outcome = "an error" if self.decided["backend"] == "you" else "eager"
        for rule in RULES:
            if self.name in rule.phases and rule.judges_later_by:
                yield f"rule {rule.name}", f"{outcome} if it refuses", rule.judges_later_by


def _shown(value: Any) -> str:
    if value is None:
        return "what memory holds"
    if isinstance(value, Mapping):
        value = tuple(f"{key}={of}" if of != {} else key for key, of in value.items())
    return (" ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


BOTH: tuple[PhaseName, ...] = ("prefill", "decode")
NO_BREAKS = "none: a round of decoding is one graph, as with full"
KINDS = frozenset({"full_attention", "sliding_attention"})
ALIBI = frozenset({"bloom", "falcon", "mpt"})


@dataclass(frozen=True)
class Rule:
    """A reason why a phase cannot run through graphs, and what the user can do about it.

    A rule that can judge only when the phase runs says by what, in `judges_later_by`; its fact is one
    of `Facts.faults`. `_refusing` judges by the others.
    """

    name: str
    reason: str
    remedy: str = ""
    phases: tuple[PhaseName, ...] = BOTH
    judges_later_by: str = ""

    def why(self, faults: Mapping[str, str]) -> str:
        return f"{self.reason}: {faults[self.name]}" if self.name in faults else self.reason

    def error(self, phase: PhaseName, backend: str, faults: Mapping[str, str]) -> UsageError:
        """Return the error for a backend that the user named and this rule refuses."""
        also = f", or {self.remedy}" if self.remedy else ""
        return UsageError(
            f"runner.{phase}.options.backend={backend} was set, and the rule {self.name!r} "
            f"refuses it\n  {self.why(faults)}\n  set runner.{phase}.name=eager{also}"
        )


MASKS = Rule(
    "masks", "the target does not keep to masks that a graph can hold", "", ("prefill",),
    "the first batch",
)  # fmt: skip
RULES: tuple[Rule, ...] = (
    Rule("device", "the backend does not run on the target's device", "set target.device"),
    Rule("phase", "the backend does not work in this phase", "name another backend"),
    Rule(
        "attention",
        "its attention takes no mask that a graph could hold; sdpa and eager attention do",
    ),
    Rule(
        "layer-kinds",
        "the target has layers that neither attend to all tokens nor to a window of them",
    ),
    Rule("alibi", "the target computes its positions from the mask of the padding"),
    Rule("rope", "the target chooses its rotary frequencies on the host, by the longest row"),
    Rule(
        "experts", "the target asks the host which experts to run",
        "leave experts_implementation out of the target's config.json",
    ),
    Rule(
        "capture", "this capture backend does not run the target's forward here",
        "set capture.name=hf", ("prefill",),
    ),
    Rule(
        "sampling", "drafts and verdicts are drawn from a generator that is seeded for every batch",
        "set eval.temperature=0", ("decode",),
    ),
    Rule(
        "offloaded", "some weights of the target are moved to its device only when they are needed", "",
        BOTH, "the target's weights",
    ),
    Rule(
        "adapters", "layers of the target choose on the host which adapters they add",
        "merge the adapters into the target's weights", BOTH, "the target's layers",
    ),
    Rule(
        "drafter-trees", "the algorithm drafts trees, and a round of those is not recorded", "",
        ("decode",), "the drafter",
    ),
    Rule(
        "drafter-state", "the algorithm's decoding state cannot lie in static buffers", "",
        ("decode",), "the draft's state",
    ),
    MASKS,
)  # fmt: skip
PLUGIN_RULES: tuple[Rule, ...] = (
    Rule(
        "nothing-captured", "a graph plugin sees captures and replays, and in eager there are none"
    ),
    Rule("phase", "the plugin does not work in this phase"),
    Rule("forks", "the plugin forks streams off, which the backend cannot record"),
)


def _lacks(kind: str, value: str, words: frozenset[str]) -> bool:
    """Say whether capabilities name values of a kind, such as `device:cuda`, and this is none of them."""
    return any(word.startswith(f"{kind}:") for word in words) and f"{kind}:{value}" not in words


def _refusing(phase: PhaseName, backend: str, facts: Facts) -> Rule | None:
    """Return the first rule that refuses a backend."""
    able = facts.backends.get(backend, frozenset())
    refused = {
        "device": _lacks("device", facts.device, able),
        "phase": _lacks("phase", phase, able),
        "attention": facts.attention not in (None, "sdpa", "eager"),
        "layer-kinds": not facts.layer_kinds <= KINDS,
        "alibi": facts.model_type in ALIBI,
        "rope": any("dynamic" in kind or kind == "longrope" for kind in facts.rope),
        "experts": facts.experts == "eager",
        "capture": "graphs" not in facts.capture,
        "sampling": facts.temperature > 0,
        **dict.fromkeys(facts.faults, True),
    }
    found = (rule for rule in RULES if phase in rule.phases and refused.get(rule.name))
    return next(found, None)


def _refusing_plugin(phase: PhaseName, plugin: str, backend: str, facts: Facts) -> Rule | None:
    """Return the first rule that refuses a graph plugin beside a backend."""
    words = facts.plugins.get(plugin, frozenset())
    able = facts.backends.get(backend, frozenset())
    refused = {
        "nothing-captured": backend == EAGER,
        "phase": _lacks("phase", phase, words),
        "forks": "forks" in words - able,
    }
    return next((rule for rule in PLUGIN_RULES if refused[rule.name]), None)


def resolve(name: PhaseName, given: GraphsOptions, facts: Facts) -> Phase:
    """Resolve one phase. Raises UsageError where a rule refuses a backend or plugin that was set."""
    decided = {
        key: "default"
        if getattr(given, key) is None or key not in given.model_fields_set
        else "you"
        for key in GraphsOptions.model_fields
    }
    backend = given.backend
    if backend == AUTO:
        backend, decided["backend"] = _fitting(facts)
    if backend != EAGER and (rule := _refusing(name, backend, facts)):
        if given.backend != AUTO:
            raise rule.error(name, backend, facts.faults)
        backend, decided["backend"] = EAGER, f"rule {rule.name}: {rule.why(facts.faults)}"
    _check_plugins(name, given, backend, facts)
    if backend == EAGER:
        return Phase(name, decided=decided)
    rows: tuple[int, ...] = (facts.rows,)  # all capture groups but the last are of one size
    if name == "decode":  # its rows end one by one
        rows = doubling(facts.rows) if given.padding else tuple(range(1, facts.rows + 1))
    step = STEP * max(1, -(-facts.longest // (STEP * MOST)))
    broken = name == "decode" and "breaks" in facts.backends.get(backend, ())
    return Phase(
        name,
        backend,
        given.options,
        tuple(sorted({min(size, given.max_bs or size) for size in given.rows or rows})),
        tuple(sorted(set(given.lengths or multiples(step, facts.longest)))),
        given.max_bs,
        given.padding,
        given.plugins,
        decided,
        NO_BREAKS * broken,
    )


def _fitting(facts: Facts) -> tuple[str, str]:
    """Return the only backend that claims this device for `auto`, or eager; and who decided."""
    claim = f"auto:{facts.device}"
    claiming = sorted(name for name, words in facts.backends.items() if claim in words)
    if len(claiming) == 1:
        return claiming[0], f"auto, for {facts.device}"
    return EAGER, f"auto: {' and '.join(claiming) or 'no backend'} for {facts.device}"


def _check_plugins(name: PhaseName, given: GraphsOptions, backend: str, facts: Facts) -> None:
    """Raise UsageError for a plugin that a rule refuses: what the user set is never left out."""
    for plugin in given.plugins:
        if rule := _refusing_plugin(name, plugin, backend, facts):
            others = sorted(
                b for b in facts.backends if not _refusing_plugin(name, plugin, b, facts)
            )
            also = f", or set runner.{name}.options.backend to {' or '.join(others)}"
            raise UsageError(
                f"runner.{name}.options.plugins.{plugin} was set, and the rule {rule.name!r} "
                f"refuses it with the backend {backend!r}\n  {rule.reason}\n"
                f"  leave the plugin out{also * bool(others)}"
            )
