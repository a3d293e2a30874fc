"""From the options of a phase to what is run: which backend, which buckets, and who decided.

What the user set is locked, defaults fill the rest, and rules refuse what cannot work. A rule that
refuses a locked backend is an error that names the rule; no other backend is taken. A rule that
refuses what `auto` found makes the phase eager, and the plan shows the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    padding: bool = True
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    decided: Mapping[str, str] = field(default_factory=dict, compare=False)

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield key, value and who decided it, and the rules that judge later."""
        yield "backend", self.backend, self.decided["backend"]
        if self.backend == EAGER:
            return
        for key in ("options", "rows", "lengths", "padding", "plugins"):
            yield key, _shown(getattr(self, key)), self.decided[key]
        outcome = "an error" if self.decided["backend"] == "you" else "eager"
        for rule in RULES:
            if self.name in rule.phases and rule.judges_later_by:
                yield f"rule {rule.name}", f"{outcome} if it refuses", rule.judges_later_by


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        value = tuple(f"{key}={of}" if of != {} else key for key, of in value.items())
    return (" ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Rule:
    """A reason why a phase cannot run through graphs, and what the user can do about it.

    `refuses` judges by the facts and by the capabilities of the backend. A rule that can judge only
    when the phase runs says by what, in `judges_later_by`; its fact is one of `Facts.faults`.
    """

    name: str
    phases: tuple[PhaseName, ...]
    refuses: Callable[[Facts, frozenset[str]], bool]
    reason: str
    remedy: str = ""
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


BOTH: tuple[PhaseName, ...] = ("prefill", "decode")
KINDS = frozenset({"full_attention", "sliding_attention"})
ALIBI = frozenset({"bloom", "falcon", "mpt"})
MASKS = Rule(
    "masks",
    ("prefill",),
    lambda facts, backend: "masks" in facts.faults,
    "the target does not keep to masks that a graph can hold",
    judges_later_by="the first batch",
)

RULES: tuple[Rule, ...] = (
    Rule(
        "device",
        BOTH,
        lambda facts, backend: (
            any(word.startswith("device:") for word in backend)
            and f"device:{facts.device}" not in backend
        ),
        "the backend does not run on the target's device",
        "set target.device",
    ),
    Rule(
        "attention",
        BOTH,
        lambda facts, backend: facts.attention not in (None, "sdpa", "eager"),
        "its attention takes no mask that a graph could hold; sdpa and eager attention do",
    ),
    Rule(
        "layer-kinds",
        BOTH,
        lambda facts, backend: not facts.layer_kinds <= KINDS,
        "the target has layers that neither attend to all tokens nor to a window of them",
    ),
    Rule(
        "alibi",
        BOTH,
        lambda facts, backend: facts.model_type in ALIBI,
        "the target computes its positions from the mask of the padding",
    ),
    Rule(
        "rope",
        BOTH,
        lambda facts, backend: any("dynamic" in kind or kind == "longrope" for kind in facts.rope),
        "the target chooses its rotary frequencies on the host, by the longest row",
    ),
    Rule(
        "experts",
        BOTH,
        lambda facts, backend: facts.experts == "eager",
        "the target asks the host which experts to run",
        "leave experts_implementation out of the target's config.json",
    ),
    Rule(
        "capture",
        ("prefill",),
        lambda facts, backend: "graphs" not in facts.capture,
        "this capture backend does not run the target's forward here",
        "set capture.name=hf",
    ),
    Rule(
        "sampling",
        ("decode",),
        lambda facts, backend: facts.temperature > 0,
        "drafts and verdicts are drawn from a generator that is seeded for every batch",
        "set eval.temperature=0",
    ),
    Rule(
        "drafter-trees",
        ("decode",),
        lambda facts, backend: "drafter-trees" in facts.faults,
        "the algorithm drafts trees, and a round of those is not recorded",
        judges_later_by="the drafter",
    ),
    Rule(
        "drafter-state",
        ("decode",),
        lambda facts, backend: "drafter-state" in facts.faults,
        "the algorithm's decoding state cannot lie in static buffers",
        judges_later_by="the draft's state",
    ),
    MASKS,
)


@dataclass(frozen=True)
class PluginRule:
    """A reason why a graph plugin cannot work in a phase.

    `refuses` judges by the phase, and by the capabilities of the plugin and of the backend, None for
    eager.
    """

    name: str
    refuses: Callable[[PhaseName, frozenset[str], frozenset[str] | None], bool]
    reason: str


PLUGIN_RULES: tuple[PluginRule, ...] = (
    PluginRule(
        "nothing-captured",
        lambda phase, plugin, backend: backend is None,
        "a graph plugin sees captures and replays, and in eager there are none",
    ),
    PluginRule(
        "phase",
        lambda phase, plugin, backend: (
            any(word.startswith("phase:") for word in plugin) and f"phase:{phase}" not in plugin
        ),
        "the plugin does not work in this phase",
    ),
    PluginRule(
        "forks",
        lambda phase, plugin, backend: "forks" in plugin and "forks" not in (backend or ()),
        "the plugin forks streams off, which the backend cannot record",
    ),
)


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
    capabilities = facts.backends.get(backend, frozenset())
    refusing = (r for r in RULES if name in r.phases and r.refuses(facts, capabilities))
    if backend != EAGER and (rule := next(refusing, None)):
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
    return Phase(
        name,
        backend,
        given.options,
        tuple(sorted(set(given.rows or rows))),
        tuple(sorted(set(given.lengths or multiples(step, facts.longest)))),
        given.padding,
        given.plugins,
        decided,
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

    def refusing(plugin: str, backend: str) -> PluginRule | None:
        words = facts.plugins.get(plugin, frozenset())
        able = None if backend == EAGER else facts.backends.get(backend, frozenset())
        return next((rule for rule in PLUGIN_RULES if rule.refuses(name, words, able)), None)

    for plugin in given.plugins:
        if rule := refusing(plugin, backend):
            others = sorted(other for other in facts.backends if not refusing(plugin, other))
            also = f", or set runner.{name}.options.backend to {' or '.join(others)}"
            raise UsageError(
                f"runner.{name}.options.plugins.{plugin} was set, and the rule {rule.name!r} "
                f"refuses it with the backend {backend!r}\n  {rule.reason}\n"
                f"  leave the plugin out{also * bool(others)}"
            )
