"""The conformance suites catch wrong plugins, each by the test that names its fault."""

from importlib import import_module
from pathlib import Path

import draftcore_sdk
import pytest
from mutants import Mutants

KINDS = [*draftcore_sdk.SUITES, "observers"]
PARTS = {"algorithms": 3, "stores": 2}  # of what takes long: workers divide it


def mutants_of(kind: str) -> Mutants:
    found: Mutants = import_module(f"mutants.{kind}").MUTANTS
    return found


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind in KINDS for part in range(PARTS.get(kind, 1))]
)
def test_right_plugins_pass_and_wrong_ones_are_caught(kind: str, part: int, tmp_path: Path) -> None:
    mutants = mutants_of(kind)
    assert mutants.complaints(tmp_path, mutants.parted[0][part :: PARTS.get(kind, 1)]) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_further_wrong_plugins_are_caught(kind: str, tmp_path: Path) -> None:
    mutants = mutants_of(kind)
    assert not mutants.parted[1] or mutants.complaints(tmp_path, mutants.parted[1]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_standard_test_has_caught_something(kind: str) -> None:
    mutants = mutants_of(kind)
    standard = {name for name in dir(mutants.suite) if name.startswith("test_")}
    caught = {mutant.test for mutant in mutants.wrong.values()} - {""}
    assert caught == standard if mutants.every_test else caught < standard
