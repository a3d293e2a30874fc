"""The conformance suites catch wrong plugins, each by the test that names its fault."""

from importlib import import_module
from pathlib import Path

import draftcore_sdk
import pytest
from mutants import Mutants


@pytest.fixture(params=[*draftcore_sdk.SUITES, "observers"])
def mutants(request: pytest.FixtureRequest) -> Mutants:
    found: Mutants = import_module(f"mutants.{request.param}").MUTANTS
    return found


def test_right_plugins_pass_and_wrong_ones_are_caught(mutants: Mutants, tmp_path: Path) -> None:
    assert mutants.complaints(tmp_path) == []


def test_every_standard_test_has_caught_something(mutants: Mutants) -> None:
    standard = {name for name in dir(mutants.suite) if name.startswith("test_")}
    caught = {mutant.caught_by.partition("[")[0] for mutant in mutants.wrong.values()} - {""}
    assert caught == standard if mutants.every_test else caught < standard
