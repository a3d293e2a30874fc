"""What the configuration of a phase comes to, and who decided what.

It goes one way: what the user set is locked, defaults fill the rest, rules refuse what cannot
work, and only the result is read from then on. A rule is a line of a table: a name, a predicate
and a reason. A locked backend that a rule refuses is an error that names the rule, never another
backend; with `auto` it is eager, and the plan shows the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftcore.contracts.runner import PhaseName
from draftcore.errors import UsageError
from draftcore_graphs.buckets import doubling, multiples
from draftcore_graphs.config import PhaseConfig

EAGER, AUTO = "eager", "auto"
STEP = 256  # tokens between two length buckets, unless there are more than MOST of them
MOST = 16


@dataclass(frozen=True)
class Facts:
    """What the rules judge by.

    `rows` and `longest` bound the batches of the phase. `backends` and `plugins` map each usable
    graph backend and plugin to its capabilities, `capture` are those of the run's capture backend.
    `faults` says, by rule, what only a running draft or target shows.
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
    """A resolved phase; `decided` says by key who decided: you, default, or a rule."""

    name: PhaseName
    backend: str = EAGER
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    padding: bool = True
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    decided: Mapping[str, str] = field(default_factory=dict, compare=False)

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield key, value and who decided it, for `--plan`, and the rules that are judged later."""
        yield "backend", self.backend, self.decided["backend"]
        if self.backend == EAGER:
            return
        for key in ("options", "rows", "lengths", "padding", "plugins"):
            yield key, _shown(getattr(self, key)), self.decided[key]
        outcome = "an error" if self.decided["backend"] == "you" else "eager"
        for rule in RULES:
            if self.name in rule.phases and rule.judge:
                yield f"rule {rule.name}", f"{outcome} if it refuses", rule.judge


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        value = tuple(f"{key}={of}" if of != {} else key for key, of in value.items())
    return (" ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Rule:
    """A reason why a phase cannot run through graphs, and what the user may do about it.

    `judge` is what gives it its fact, where that is known only when the phase runs.
    """

    name: str
    phases: tuple[PhaseName, ...]
    refuses: Callable[[Facts, frozenset[str]], bool]
    reason: str
    remedy: str = ""
    judge: str = ""


@dataclass(frozen=True)
class PluginRule:
    """A reason why a graph plugin cannot work, by its capabilities and those of the backend."""

    name: str
    refuses: Callable[[PhaseName, frozenset[str], frozenset[str] | None], bool]
    reason: str


BOTH: tuple[PhaseName, ...] = ("prefill", "decode")
KINDS = frozenset({"full_attention", "sliding_attention"})
ALIBI = frozenset({"bloom", "falcon", "mpt"})

# Refused is what the predicate says of the facts and of the backend's capabilities.
RULES: tuple[Rule, ...] = (
    Rule(
        "device",
        BOTH,
        lambda facts, able: (
            any(word.startswith("device:") for word in able)
            and f"device:{facts.device}" not in able
        ),
        "the backend does not run on the target's device",
        "set target.device",
    ),
    Rule(
        "attention",
        BOTH,
        lambda facts, able: facts.attention not in (None, "sdpa", "eager"),
        "its attention takes no mask that a graph could hold; sdpa and eager attention do",
    ),
    Rule(
        "layer-kinds",
        BOTH,
        lambda facts, able: not facts.layer_kinds <= KINDS,
        "the target has layers that neither attend to all tokens nor to a window of them",
    ),
    Rule(
        "alibi",
        BOTH,
        lambda facts, able: facts.model_type in ALIBI,
        "the target computes its positions from the mask of the padding",
    ),
    Rule(
        "rope",
        BOTH,
        lambda facts, able: any("dynamic" in kind or kind == "longrope" for kind in facts.rope),
        "the target chooses its rotary frequencies on the host, by the longest row",
    ),
    Rule(
        "experts",
        BOTH,
        lambda facts, able: facts.experts == "eager",
        "the target asks the host which experts to run",
        "leave experts_implementation out of the target's config.json",
    ),
    Rule(
        "capture",
        ("prefill",),
        lambda facts, able: "graphs" not in facts.capture,
        "this capture backend does not run the target's forward here",
        "set capture.name=hf",
    ),
    Rule(
        "sampling",
        ("decode",),
        lambda facts, able: facts.temperature > 0,
        "drafts and verdicts are drawn from a generator that is seeded for every batch",
        "set eval.temperature=0",
    ),
    Rule(
        "drafter-state",
        ("decode",),
        lambda facts, able: "drafter-state" in facts.faults,
        "the algorithm's decoding state cannot lie in static buffers",
        judge="the draft's state",
    ),
    Rule(
        "masks",
        ("prefill",),
        lambda facts, able: "masks" in facts.faults,
        "the target does not keep to masks that a graph can hold",
        judge="the first batch",
    ),
)

# Refused is what the predicate says of the phase, the plugin and the backend, None for eager.
PLUGIN_RULES: tuple[PluginRule, ...] = (
    PluginRule(
        "nothing-captured",
        lambda phase, words, able: able is None,
        "a graph plugin sees captures and replays, and in eager there are none",
    ),
    PluginRule(
        "phase",
        lambda phase, words, able: (
            any(word.startswith("phase:") for word in words) and f"phase:{phase}" not in words
        ),
        "the plugin does not work in this phase",
    ),
    PluginRule(
        "forks",
        lambda phase, words, able: "forks" in words and "forks" not in (able or ()),
        "the plugin forks streams off, which the backend cannot record",
    ),
)


def resolve(name: PhaseName, given: PhaseConfig, facts: Facts) -> Phase:
    """Resolve one phase. Raises UsageError where a rule refuses the backend that the user named."""
    decided = {key: _who(given, key) for key in PhaseConfig.model_fields}
    backend = given.backend
    if backend == AUTO:
        backend, decided["backend"] = _fitting(facts)
    able = facts.backends.get(backend, frozenset())
    rule = _refusing(name, facts, able)
    if backend != EAGER and rule is not None:
        if given.backend != AUTO:
            raise UsageError(conflict(name, backend, rule, facts.faults))
        backend, decided["backend"] = EAGER, f"rule {rule.name}: {_reason(rule, facts.faults)}"
    _check_plugins(name, given, backend, None if backend == EAGER else able, facts)
    if backend == EAGER:
        return Phase(name, decided=decided)
    return Phase(
        name,
        backend,
        given.options,
        _ascending(given.rows) or _rows(name, given, facts),
        _ascending(given.lengths) or multiples(_step(facts.longest), facts.longest),
        given.padding,
        given.plugins,
        decided,
    )


def _who(given: PhaseConfig, key: str) -> str:
    return "you" if key in given.model_fields_set and getattr(given, key) is not None else "default"


def _fitting(facts: Facts) -> tuple[str, str]:
    """The backend that says it is the one for this device, and who decided."""
    word = f"auto:{facts.device}"
    able = sorted(name for name, words in facts.backends.items() if word in words)
    if len(able) == 1:
        return able[0], f"auto, for {facts.device}"
    return EAGER, f"auto: {' and '.join(able) or 'no backend'} for {facts.device}"


def _refusing(name: PhaseName, facts: Facts, able: frozenset[str]) -> Rule | None:
    rules = (rule for rule in RULES if name in rule.phases and rule.refuses(facts, able))
    return next(rules, None)


def _reason(rule: Rule, faults: Mapping[str, str]) -> str:
    return ": ".join((rule.reason, *(why for name, why in faults.items() if name == rule.name)))


def conflict(name: str, backend: str, rule: Rule, faults: Mapping[str, str]) -> str:
    """Say that a rule refuses the backend that the user named."""
    also = f", or {rule.remedy}" if rule.remedy else ""
    return (
        f"runner.{name}.options.backend={backend} was set, and the rule {rule.name!r} refuses it\n"
        f"  {_reason(rule, faults)}\n"
        f"  set runner.{name}.name=eager{also}"
    )


def _check_plugins(
    name: PhaseName, given: PhaseConfig, backend: str, able: frozenset[str] | None, facts: Facts
) -> None:
    """Raise UsageError for a plugin that a rule refuses: what the user set is never left out."""
    for plugin in given.plugins:
        words = facts.plugins.get(plugin, frozenset())
        rule = _refusing_plugin(name, words, able)
        if rule is not None:
            others = (
                b for b, can in facts.backends.items() if not _refusing_plugin(name, words, can)
            )
            also = " or ".join(sorted(others))
            raise UsageError(
                f"runner.{name}.options.plugins.{plugin} was set, and the rule {rule.name!r} refuses it "
                f"with the backend {backend!r}\n  {rule.reason}\n"
                f"  leave the plugin out{f', or set runner.{name}.options.backend to {also}' * bool(also)}"
            )


def _refusing_plugin(
    name: PhaseName, words: frozenset[str], able: frozenset[str] | None
) -> PluginRule | None:
    return next((rule for rule in PLUGIN_RULES if rule.refuses(name, words, able)), None)


def _rows(name: PhaseName, given: PhaseConfig, facts: Facts) -> tuple[int, ...]:
    """Capture groups are of one size, but for the last; rows that are decoded end one by one."""
    if name == "prefill":
        return (facts.rows,)
    return doubling(facts.rows) if given.padding else tuple(range(1, facts.rows + 1))


def _step(longest: int) -> int:
    """The tokens between two buckets, of which there are at most MOST."""
    return STEP * max(1, -(-longest // (STEP * MOST)))


def _ascending(sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(sorted(set(sizes or ())))
