"""The two axes stay apart, what is declared is used, and only what was resolved is read."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
from draftcore_graphs.config import GraphsConfig, PhaseConfig
from draftcore_graphs.decode import DecodeGraphRunner, GraphRows
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Facts, Phase, resolve
from draftcore_graphs.runners import GraphRunner
from pydantic import ValidationError

import draftcore
from draftcore.config import EvalConfig
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import GraphBackend, GraphPlugin
from draftcore.evaluation.decode import evaluate_prompts, right_padded

CORE = Path(draftcore.__file__).parent
PLUGIN = CORE.parent / "plugins" / "draftcore-graphs" / "draftcore_graphs"
RUNNERS = ("buffers", "decode", "prefill", "runners")
PHASES = ("decode", "prefill", "runners", "resolve", "buffers", "opening")


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("name", RUNNERS)
def test_a_runner_knows_no_mechanism(name):
    """A limit of a mechanism is its `can_run`, never a look at its type."""
    file = CORE / "graphs" / f"{name}.py"
    assert not {m for m in imported(file) if "recording" in m and "breaks" not in m}
    text = file.read_text()
    assert "isinstance(self.backend" not in text
    assert "isinstance(backend" not in text


@pytest.mark.parametrize(
    "file", [CORE / "graphs" / "recording.py", *sorted(PLUGIN.glob("*.py"))], ids=lambda f: f.stem
)
def test_a_mechanism_knows_no_phase(file):
    assert not {f"draftcore_graphs.{phase}" for phase in PHASES} & imported(file)


def attributes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_the_configuration_of_graphs_is_read_where_it_is_resolved_and_nowhere_else():
    """But for what a store remembers, which is what the user set."""
    readers = {
        file.relative_to(CORE).as_posix()
        for file in CORE.rglob("*.py")
        for path in attributes(ast.parse(file.read_text()))
        if path.endswith("config.graphs")
    }
    assert readers == {"graphs/opening.py", "provenance.py"}


@pytest.mark.parametrize("contract", [GraphBackend, GraphPlugin])
def test_every_method_of_a_contract_has_a_caller_in_the_core(contract):
    files = [CORE / "graphs" / f"{name}.py" for name in RUNNERS]
    called = {
        path.rpartition(".")[2] for f in files for path in attributes(ast.parse(f.read_text()))
    }
    assert contract.__abstractmethods__ <= called


def test_there_are_six_methods_of_a_backend_and_two_of_a_plugin_and_no_state():
    for contract, count in ((GraphBackend, 6), (GraphPlugin, 2)):
        own = {name for name in vars(contract) if not name.startswith("_")}
        assert own == contract.__abstractmethods__
        assert len(own) == count


def test_every_key_can_be_left_out_is_shown_by_the_plan_and_is_no_other():
    assert GraphsConfig.model_validate({}) == GraphsConfig()
    facts = Facts(2, 256, "cpu", backends={"any": frozenset()})
    for name in ("prefill", "decode"):
        shown = {key for _, key, _, _ in resolve(name, PhaseConfig(backend="any"), facts).lines()}
        assert shown >= PhaseConfig.model_fields.keys()
    with pytest.raises(ValidationError, match="max_bs"):
        PhaseConfig(max_bs=3)


def test_every_override_of_a_runner_is_reached(target, drafter, prompts):
    """A method that nobody calls any more would go on looking as if it mattered."""
    called: set[CodeType] = set()

    def note(frame, event, arg):
        if event == "call":
            called.add(frame.f_code)

    request = FeatureRequest((1,), True, "float32")
    sizes = {"rows": (1, 2, 4), "lengths": (32, 64)}
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        prefill = PrefillGraphRunner(target, Phase("prefill", "any", **sizes), RecordingBackend())
        prefill.features(*right_padded(prompts, "cpu"), request)
        phase = Phase("decode", "any", **sizes)
        decode = DecodeGraphRunner(target, drafter, drafter.module, phase, RecordingBackend())
        evaluate_prompts(target, drafter, prompts, EvalConfig(max_new_tokens=12, batch=4), decode)
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
