"""What a phase's configuration comes to: locked keys, defaults, each rule, each error, the plan."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from draftcore_graphs.options import GraphsOptions
from draftcore_graphs.resolve import MOST, PLUGIN_RULES, RULES, Facts, Rule, resolve
from pydantic import ValidationError

from draftcore.contracts.runner import PhaseName
from draftcore.errors import UsageError

FACTS = Facts(
    rows=6, longest=600, device="cpu",
    backends={
        "any": frozenset(), "gpu": frozenset({"device:cuda", "auto:cuda"}),
        "broken": frozenset({"breaks"}), "elsewhere": frozenset({"phase:none"}),
    },
)  # fmt: skip
# What makes each rule refuse, which backend, and what that can do beside.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({}, "gpu"),
    "phase": ({}, "elsewhere"),
    "attention": ({"attention": "flash_attention_2"}, "any"),
    "layer-kinds": ({"layer_kinds": frozenset({"full_attention", "linear_attention"})}, "any"),
    "alibi": ({"model_type": "bloom"}, "any"),
    "rope": ({"rope": frozenset({"dynamic"})}, "any"),
    "experts": ({"experts": "eager"}, "any"),
    "capture": ({"capture": frozenset()}, "any"),
    "sampling": ({"temperature": 0.7}, "any"),
    **{
        rule.name: ({"faults": {rule.name: "x is so"}}, "any")
        for rule in RULES
        if rule.judges_later_by
    },
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


@pytest.mark.parametrize(
    ("rows", "max_bs", "buckets"),
    [(None, 3, (1, 2, 3)), ((8, 2, 2), None, (2, 8)), ((9, 2), 8, (2, 8))],
)
def test_no_bucket_has_more_rows_than_max_bs(
    rows: tuple[int, ...] | None, max_bs: int | None, buckets: tuple[int, ...]
) -> None:
    given = GraphsOptions(backend="any", rows=rows, max_bs=max_bs)
    assert resolve("decode", given, FACTS).rows == buckets


def test_every_key_can_be_left_out_and_the_plan_shows_each_with_who_decided() -> None:
    """And that a backend of breaks has none in decoding; no other key is taken."""
    plugins = {"a": {}, "b": {"c": 1}}
    given = GraphsOptions(backend="broken", rows=(8, 2), options={"debug": True}, plugins=plugins)
    plans = [
        {
            key: (value, by)
            for key, value, by in resolve(name, given, FACTS).lines()
            if "rule" not in key
        }
        for name in ("decode", "prefill")
    ]
    why = ("none: a round of decoding is one graph, as with full", "broken")
    shown = {
        "backend": ("broken", "you"), "options": ("debug=True", "you"), "rows": ("2 8", "you"),
        "lengths": ("256 512 768", "default"), "max_bs": ("what memory holds", "default"),
        "padding": ("True", "default"), "plugins": ("a b={'c': 1}", "you"),
    }  # fmt: skip
    assert plans == [{**shown, "breaks": why}, shown]
    assert shown.keys() == GraphsOptions.model_validate({}).model_dump().keys()
    with pytest.raises(ValidationError, match="max_rows"):
        GraphsOptions.model_validate({"max_rows": 3})


def test_the_plan_names_rules_that_judge_only_when_a_phase_runs() -> None:
    facts = replace(FACTS, backends={"chosen": frozenset({"auto:cpu"})})
    later = {"offloaded": "the target's weights", "adapters": "the target's layers"}
    own: dict[PhaseName, dict[str, str]] = {
        "prefill": {"masks": "the first batch"},
        "decode": {"drafter-trees": "the drafter", "drafter-state": "the draft's state"},
    }
    for backend, outcome in (("auto", "eager if it refuses"), ("chosen", "an error if it refuses")):
        for name, more in own.items():
            lines = resolve(name, GraphsOptions(backend=backend), facts).lines()
            rules = {key: rest for key, *rest in lines if "rule" in key}
            assert rules == {f"rule {rule}": [outcome, by] for rule, by in (later | more).items()}


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
    able = FACTS.backends[backend] | {"auto:cpu"}
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
