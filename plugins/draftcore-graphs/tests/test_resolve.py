"""What a phase's configuration comes to: locked keys, defaults, each rule, each error, the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from draftcore_graphs.config import PhaseConfig
from draftcore_graphs.resolve import MOST, PLUGIN_RULES, RULES, Facts, resolve

from draftcore.errors import UsageError

FACTS = Facts(
    rows=6,
    longest=600,
    device="cpu",
    backends={"any": frozenset(), "gpu": frozenset({"device:cuda", "auto:cuda"})},
)
# What makes each rule speak, and for which backend.
SPEAKS = {
    "device": ({}, "gpu"),
    "attention": ({"attention": "flash_attention_2"}, "any"),
    "layer-kinds": ({"layer_kinds": frozenset({"full_attention", "linear_attention"})}, "any"),
    "alibi": ({"model_type": "bloom"}, "any"),
    "rope": ({"rope": frozenset({"dynamic"})}, "any"),
    "experts": ({"experts": "eager"}, "any"),
    "capture": ({"capture": frozenset()}, "any"),
    "sampling": ({"temperature": 0.7}, "any"),
    "drafter-state": ({"faults": {"drafter-state": "state.step is a int"}}, "any"),
    "masks": ({"faults": {"masks": "hidden.1 differs"}}, "any"),
}
CASES = [(rule, phase) for rule in RULES for phase in rule.phases]


def test_nothing_set_is_eager_and_needs_no_backend():
    phase = resolve("decode", PhaseConfig(), replace(FACTS, backends={}))
    assert (phase.backend, phase.rows, phase.lengths) == ("eager", (), ())
    assert [line[1:] for line in phase.lines()] == [("backend", "eager", "default")]


def test_defaults_follow_from_the_run():
    prefill, decode = (
        resolve(name, PhaseConfig(backend="any"), FACTS) for name in ("prefill", "decode")
    )
    assert prefill.rows == (6,)
    assert decode.rows == (1, 2, 4, 6)
    assert prefill.lengths == decode.lengths == (256, 512, 768)
    every = resolve("decode", PhaseConfig(backend="any", padding=False), FACTS)
    assert every.rows == (1, 2, 3, 4, 5, 6)


def test_long_runs_have_no_more_buckets_than_short_ones():
    phase = resolve("prefill", PhaseConfig(backend="any"), replace(FACTS, longest=32_768))
    assert len(phase.lengths) == MOST
    assert phase.lengths[-1] == 32_768


def test_what_the_user_sets_stays_and_the_plan_says_so():
    given = PhaseConfig(backend="any", rows=(8, 2, 2), padding=False)
    phase = resolve("decode", given, FACTS)
    assert phase.rows == (2, 8)
    who = {key: by for _, key, _, by in phase.lines()}
    assert who == {
        "backend": "you", "options": "default", "rows": "you", "lengths": "default",
        "padding": "you", "plugins": "default", "rule drafter-state": "the draft's state",
    }  # fmt: skip


def test_the_plan_names_rules_that_speak_only_when_a_phase_runs():
    facts = replace(FACTS, backends={"chosen": frozenset({"auto:cpu"})})
    for backend, outcome in (("auto", "eager if it speaks"), ("chosen", "an error if it speaks")):
        last = {name: list(resolve(name, PhaseConfig(backend=backend), facts).lines())[-1]
                for name in ("prefill", "decode")}  # fmt: skip
        assert last == {
            "prefill": ("prefill", "rule masks", outcome, "the first batch"),
            "decode": ("decode", "rule drafter-state", outcome, "the draft's state"),
        }


def test_the_plan_names_options_and_plugins_with_theirs():
    given = PhaseConfig(backend="any", options={"debug": True}, plugins={"a": {}, "b": {"c": 1}})
    shown = {key: value for _, key, value, _ in resolve("decode", given, FACTS).lines()}
    assert (shown["options"], shown["plugins"]) == ("debug=True", "a b={'c': 1}")


def test_there_is_a_case_for_every_rule():
    assert SPEAKS.keys() == {rule.name for rule in RULES}


@pytest.mark.parametrize(("rule", "phase"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_rule_refuses_a_locked_backend_by_its_name(rule, phase):
    changes, backend = SPEAKS[rule.name]
    with pytest.raises(UsageError) as refused:
        resolve(phase, PhaseConfig(backend=backend), replace(FACTS, **changes))
    text = str(refused.value)
    assert f"graphs.{phase}.backend={backend} was set, and the rule {rule.name!r} refuses" in text
    assert rule.reason in text
    assert text.splitlines()[-1].startswith(f"  set graphs.{phase}.backend=eager")


@pytest.mark.parametrize(("rule", "phase"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_rule_turns_auto_into_eager_and_is_noted(rule, phase):
    changes, _ = SPEAKS[rule.name]
    able = frozenset({"auto:cpu"} | ({"device:cuda"} if rule.name == "device" else set()))
    facts = replace(FACTS, backends={"chosen": able}, **changes)
    resolved = resolve(phase, PhaseConfig(backend="auto"), facts)
    assert resolved.backend == "eager"
    ((_, _, _, by),) = resolved.lines()
    assert by.startswith(f"rule {rule.name}: {rule.reason}")


@pytest.mark.parametrize("rule", [r for r in RULES if len(r.phases) == 1], ids=lambda r: r.name)
def test_a_rule_of_one_phase_leaves_the_other_alone(rule):
    other = "decode" if rule.phases == ("prefill",) else "prefill"
    changes, backend = SPEAKS[rule.name]
    assert resolve(other, PhaseConfig(backend=backend), replace(FACTS, **changes)).backend == "any"


def test_rules_are_not_asked_where_nothing_is_to_be_captured():
    facts = replace(FACTS, temperature=1.0, attention="flash_attention_2")
    assert resolve("decode", PhaseConfig(backend="eager"), facts).backend == "eager"


def test_auto_takes_the_one_that_says_it_fits_the_device():
    cuda = replace(FACTS, device="cuda")
    phase = resolve("prefill", PhaseConfig(backend="auto"), cuda)
    assert (phase.backend, phase.decided["backend"]) == ("gpu", "auto, for cuda")
    none = resolve("prefill", PhaseConfig(backend="auto"), FACTS)
    assert (none.backend, none.decided["backend"]) == ("eager", "auto: no backend for cpu")
    two = replace(cuda, backends={**FACTS.backends, "new": frozenset({"auto:cuda"})})
    several = resolve("prefill", PhaseConfig(backend="auto"), two)
    assert (several.backend, several.decided["backend"]) == ("eager", "auto: gpu and new for cuda")


def test_emitting_only_differences_locks_nothing_more():
    given = PhaseConfig(backend="any", rows=(4,))
    emitted = given.model_dump(exclude_defaults=True)
    assert emitted == {"backend": "any", "rows": (4,)}
    assert resolve("decode", PhaseConfig(**emitted), FACTS) == resolve("decode", given, FACTS)
    assert PhaseConfig().model_dump(exclude_defaults=True) == {}


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
def test_a_plugin_is_refused_by_the_name_of_the_rule(rule):
    """It is named as the rule that refuses it, in the phase and with the backend that it says."""
    backend = "eager" if rule.name == "nothing-captured" else "any"
    given = PhaseConfig(backend=backend, plugins={rule.name: {}})
    with pytest.raises(UsageError) as refused:
        resolve("decode", given, PLUGINS)
    first, reason, remedy = str(refused.value).splitlines()
    assert first.startswith(
        f"graphs.decode.plugins.{rule.name} was set, and the rule {rule.name!r}"
    )
    assert first.endswith(f"with the backend {backend!r}")
    assert reason.strip() == rule.reason
    hint = {"forks": "to forking", "nothing-captured": "to any or forking", "phase": "plugin out"}
    assert remedy.endswith(hint[rule.name])


def test_a_plugin_that_nothing_speaks_against_is_kept_with_its_options():
    given = PhaseConfig(backend="forking", plugins={"forks": {"of": 2}, "phase": {}})
    assert resolve("prefill", given, PLUGINS).plugins == {"forks": {"of": 2}, "phase": {}}


def test_auto_that_comes_to_eager_leaves_out_no_plugin_without_a_word():
    given = PhaseConfig(backend="auto", plugins={"forks": {}})
    with pytest.raises(UsageError, match="the rule 'nothing-captured' refuses it"):
        resolve("prefill", given, PLUGINS)
