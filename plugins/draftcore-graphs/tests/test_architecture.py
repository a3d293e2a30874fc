"""Runners and mechanisms stay apart, what is declared is used, and only what was resolved is read."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import draftcore_graphs
import pytest
from draftcore_graphs.decode import DecodeGraphRunner, GraphRows
from draftcore_graphs.options import GraphsOptions
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Facts, Phase, resolve
from draftcore_graphs.runners import GraphRunner
from pydantic import ValidationError

import draftcore
from draftcore.config import EvalConfig
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import GraphBackend, GraphPlugin, PhaseName
from draftcore.contracts.target import TargetModel
from draftcore.evaluation.decode import evaluate_prompts, right_padded

CORE, PACKAGE = (Path(str(module.__file__)).parent for module in (draftcore, draftcore_graphs))
FILES = {file.stem: file for file in sorted(PACKAGE.glob("*.py"))}
RUNNERS = ("buffers", "decode", "prefill", "runners")
PHASES = (*RUNNERS, "graphs", "resolve")
# `plugin` opens them all, each under its name.
MECHANISMS = [name for name in FILES if name not in (*PHASES, "plugin")]
RECORD = {"backend", "cuda", "piecewise", "recording", "segments"}


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("name", RUNNERS)
def test_a_runner_knows_no_mechanism(name: str) -> None:
    """A limit of a mechanism is its `can_run`, never a look at its type."""
    assert not {f"draftcore_graphs.{module}" for module in RECORD} & imported(FILES[name])
    text = FILES[name].read_text()
    assert "isinstance(self.backend" not in text
    assert "isinstance(backend" not in text


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_knows_no_phase(name: str) -> None:
    assert set(MECHANISMS) >= RECORD
    assert not {f"draftcore_graphs.{phase}" for phase in PHASES} & imported(FILES[name])


def attributes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_the_options_of_a_runner_are_read_where_they_are_resolved_and_nowhere_else() -> None:
    """But for what a store remembers and `--plan` prints, which is what the user set."""
    readers = {
        file.relative_to(CORE).as_posix()
        for file in CORE.rglob("*.py")
        for path in attributes(ast.parse(file.read_text()))
        if path.endswith("config.runner")
    }
    assert readers == {"features/provenance.py", "run.py", "verbs.py"}
    options = "draftcore_graphs.options.GraphsOptions"
    assert {name for name, file in FILES.items() if options in imported(file)} == {
        "graphs",
        "resolve",
    }


@pytest.mark.parametrize("contract", [GraphBackend, GraphPlugin])
def test_every_method_of_a_contract_has_a_caller_in_the_runners(contract: Any) -> None:
    called = {
        path.rpartition(".")[2]
        for name in RUNNERS
        for path in attributes(ast.parse(FILES[name].read_text()))
    }
    assert contract.__abstractmethods__ <= called


def test_there_are_six_methods_of_a_backend_and_two_of_a_plugin_and_no_state() -> None:
    contracts: tuple[tuple[Any, int], ...] = ((GraphBackend, 6), (GraphPlugin, 2))
    for contract, count in contracts:
        own = {name for name in vars(contract) if not name.startswith("_")}
        assert own == contract.__abstractmethods__
        assert len(own) == count


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_every_key_can_be_left_out_is_shown_by_the_plan_and_is_no_other(name: PhaseName) -> None:
    assert GraphsOptions.model_validate({}) == GraphsOptions()
    facts = Facts(2, 256, "cpu", backends={"any": frozenset()})
    shown = {key for key, _, _ in resolve(name, GraphsOptions(backend="any"), facts).lines()}
    assert shown >= GraphsOptions.model_fields.keys()
    with pytest.raises(ValidationError, match="max_bs"):
        GraphsOptions.model_validate({"max_bs": 3})


def test_every_override_of_a_runner_is_reached(
    target: TargetModel, drafter: Any, prompts: list[list[int]]
) -> None:
    """A method that nobody calls any more would go on looking as if it mattered."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    request = FeatureRequest((1,), True, "float32")
    sizes: dict[str, Any] = {"rows": (1, 2, 4), "lengths": (32, 64)}
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        prefill = PrefillGraphRunner(target, Phase("prefill", "any", **sizes), RecordingBackend())
        prefill.features(*right_padded(prompts, "cpu"), request)
        phase = Phase("decode", "any", **sizes)
        decode = DecodeGraphRunner(target, drafter, drafter.module, phase, RecordingBackend())
        evaluate_prompts(decode, prompts, EvalConfig(max_new_tokens=12, batch=4))
        decode.forget()
        assert (decode.captures, decode.counts.keys()) != (0, set())
    finally:
        sys.setprofile(before)
    for owner in (GraphRunner, PrefillGraphRunner, DecodeGraphRunner, GraphRows):
        methods = {
            name: getattr(value, "__wrapped__", value)
            for name, value in vars(owner).items()
            if callable(value) and name not in getattr(owner, "__abstractmethods__", ())
        }
        missed = {n for n, m in methods.items() if getattr(m, "__code__", None) not in called}
        assert not missed, owner.__name__
