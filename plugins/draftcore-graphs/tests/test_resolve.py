"""What a phase's configuration comes to: locked keys, defaults, each rule, each error, the plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from draftcore_graphs.options import GraphsOptions
from draftcore_graphs.resolve import MOST, PLUGIN_RULES, RULES, Facts, Rule, resolve

from draftcore.contracts.runner import PhaseName
from draftcore.errors import UsageError

FACTS = Facts(
    rows=6,
    longest=600,
    device="cpu",
    backends={"any": frozenset(), "gpu": frozenset({"device:cuda", "auto:cuda"})},
)
# What makes each rule refuse, and which backend.
REFUSED = {
    "device": ({}, "gpu"),
    "attention": ({"attention": "flash_attention_2"}, "any"),
    "layer-kinds": ({"layer_kinds": frozenset({"full_attention", "linear_attention"})}, "any"),
    "alibi": ({"model_type": "bloom"}, "any"),
    "rope": ({"rope": frozenset({"dynamic"})}, "any"),
    "experts": ({"experts": "eager"}, "any"),
    "capture": ({"capture": frozenset()}, "any"),
    "sampling": ({"temperature": 0.7}, "any"),
    "drafter-trees": ({"faults": {"drafter-trees": "depth 3"}}, "any"),
    "drafter-state": ({"faults": {"drafter-state": "state.step is a int"}}, "any"),
    "masks": ({"faults": {"masks": "hidden.1 differs"}}, "any"),
}
CASES = [(rule, phase) for rule in RULES for phase in rule.phases]  # a KeyError if one is not above


def test_nothing_set_is_auto_and_needs_no_backend() -> None:
    phase = resolve("decode", GraphsOptions(), replace(FACTS, backends={}))
    assert (phase.backend, phase.rows, phase.lengths) == ("eager", (), ())
    assert list(phase.lines()) == [("backend", "eager", "auto: no backend for cpu")]


def test_defaults_follow_from_the_run() -> None:
    """Long runs have no more buckets than short ones."""
    given = GraphsOptions(backend="any")
    prefill, decode = (resolve(name, given, FACTS) for name in ("prefill", "decode"))
    assert (prefill.rows, decode.rows) == ((6,), (1, 2, 4, 6))
    assert prefill.lengths == decode.lengths == (256, 512, 768)
    every = resolve("decode", GraphsOptions(backend="any", padding=False), FACTS)
    assert every.rows == (1, 2, 3, 4, 5, 6)
    lengths = resolve("prefill", given, replace(FACTS, longest=32_768)).lengths
    assert (len(lengths), lengths[-1]) == (MOST, 32_768)


def test_what_the_user_sets_stays_and_the_plan_says_so() -> None:
    plugins = {"a": {}, "b": {"c": 1}}
    given = GraphsOptions(backend="any", rows=(8, 2, 2), options={"debug": True}, plugins=plugins)
    phase = resolve("decode", given, FACTS)
    assert phase.rows == (2, 8)
    shown = {key: (value, by) for key, value, by in phase.lines() if "rule" not in key}
    assert shown == {
        "backend": ("any", "you"), "options": ("debug=True", "you"), "rows": ("2 8", "you"),
        "lengths": ("256 512 768", "default"), "padding": ("True", "default"),
        "plugins": ("a b={'c': 1}", "you"),
    }  # fmt: skip


def test_the_plan_names_rules_that_judge_only_when_a_phase_runs() -> None:
    facts = replace(FACTS, backends={"chosen": frozenset({"auto:cpu"})})
    for backend, outcome in (("auto", "eager if it refuses"), ("chosen", "an error if it refuses")):
        last = {name: list(resolve(name, GraphsOptions(backend=backend), facts).lines())[-1]
                for name in ("prefill", "decode")}  # fmt: skip
        assert last == {
            "prefill": ("rule masks", outcome, "the first batch"),
            "decode": ("rule drafter-state", outcome, "the draft's state"),
        }


@pytest.mark.parametrize(("rule", "phase"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_rule_refuses_a_locked_backend_and_turns_auto_into_eager(
    rule: Rule, phase: PhaseName
) -> None:
    """Both say its name and reason. A rule of one phase leaves the other alone."""
    changes, backend = REFUSED[rule.name]
    facts = replace(FACTS, **changes)
    locked = f"runner.{phase}.options.backend={backend} was set, and the rule {rule.name!r} refuses"
    with pytest.raises(UsageError, match=re.escape(locked)) as refused:
        resolve(phase, GraphsOptions(backend=backend), facts)
    assert rule.reason in str(refused.value)
    assert str(refused.value).splitlines()[-1].startswith(f"  set runner.{phase}.name=eager")
    able = frozenset({"auto:cpu"} | ({"device:cuda"} if rule.name == "device" else set()))
    chosen = replace(facts, backends={"chosen": able})
    resolved = resolve(phase, GraphsOptions(backend="auto"), chosen)
    assert resolved.backend == "eager"
    ((_, _, by),) = resolved.lines()
    assert by.startswith(f"rule {rule.name}: {rule.reason}")
    if len(rule.phases) == 1:
        other: PhaseName = "decode" if phase == "prefill" else "prefill"
        assert resolve(other, GraphsOptions(backend=backend), facts).backend == backend


def test_rules_are_not_asked_where_nothing_is_to_be_captured() -> None:
    facts = replace(FACTS, temperature=1.0, attention="flash_attention_2")
    assert resolve("decode", GraphsOptions(backend="eager"), facts).backend == "eager"


def test_auto_takes_the_one_that_says_it_fits_the_device() -> None:
    cuda = replace(FACTS, device="cuda")
    phase = resolve("prefill", GraphsOptions(backend="auto"), cuda)
    assert (phase.backend, phase.decided["backend"]) == ("gpu", "auto, for cuda")
    none = resolve("prefill", GraphsOptions(backend="auto"), FACTS)
    assert (none.backend, none.decided["backend"]) == ("eager", "auto: no backend for cpu")
    two = replace(cuda, backends={**FACTS.backends, "new": frozenset({"auto:cuda"})})
    several = resolve("prefill", GraphsOptions(backend="auto"), two)
    assert (several.backend, several.decided["backend"]) == ("eager", "auto: gpu and new for cuda")


# ---------------------------------------------------------------- graph plugins

PLUGINS = replace(
    FACTS,
    backends={"any": frozenset(), "forking": frozenset({"forks"})},
    plugins={
        "forks": frozenset({"forks"}),
        "phase": frozenset({"phase:prefill"}),
        "nothing-captured": frozenset(),
    },
)


@pytest.mark.parametrize("rule", PLUGIN_RULES, ids=lambda rule: rule.name)
def test_a_plugin_is_refused_by_the_name_of_the_rule(rule: Rule) -> None:
    """It is named as the rule that refuses it, in the phase and with the backend that it says."""
    backend = "eager" if rule.name == "nothing-captured" else "any"
    given = GraphsOptions(backend=backend, plugins={rule.name: {}})
    with pytest.raises(UsageError) as refused:
        resolve("decode", given, PLUGINS)
    first, reason, remedy = str(refused.value).splitlines()
    assert first.startswith(
        f"runner.decode.options.plugins.{rule.name} was set, and the rule {rule.name!r}"
    )
    assert first.endswith(f"with the backend {backend!r}")
    assert reason.strip() == rule.reason
    hint = {"forks": "to forking", "nothing-captured": "to any or forking", "phase": "plugin out"}
    assert remedy.endswith(hint[rule.name])


def test_a_plugin_that_no_rule_refuses_is_kept_and_none_is_left_out_silently() -> None:
    given = GraphsOptions(backend="forking", plugins={"forks": {"of": 2}, "phase": {}})
    assert resolve("prefill", given, PLUGINS).plugins == {"forks": {"of": 2}, "phase": {}}
    eager = GraphsOptions(backend="auto", plugins={"forks": {}})
    with pytest.raises(UsageError, match="the rule 'nothing-captured' refuses it"):
        resolve("prefill", eager, PLUGINS)
