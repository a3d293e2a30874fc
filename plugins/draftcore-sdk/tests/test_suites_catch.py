"""The conformance suites catch wrong plugins, and none of their tests is lost in silence."""

from importlib import import_module
from pathlib import Path
from typing import Any

import draftcore_sdk
import pytest
from draftcore_sdk.channels import ChannelSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.stores import StoreSuite
from mutants import Mutants

KINDS = [*draftcore_sdk.SUITES, "observers"]
PARTS = {"algorithms": 3, "stores": 2}  # of what takes long: workers divide it
TEST = "test_get_after_free_raises_and_free_twice_is_harmless"


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


class TestBuiltin(PluginSuite):
    """The core's own plugin passes what every plugin must pass."""

    plugin = "draftcore.verbs"


class Mine(StoreSuite):
    plugin = "mine"


def override(**marks: str) -> Any:
    """Return an override of a standard test that does nothing, with this mark."""

    def test(self: object, store: object) -> None: ...

    for name, reason in marks.items():
        test = getattr(pytest.mark, name)(reason=reason)(test)
    return test


@pytest.mark.parametrize("suite", [StoreSuite, Mine])
@pytest.mark.parametrize(
    "test",
    [override(), None, pytest.mark.xfail(override()), override(xfail=""), override(skip="slow")],
)
def test_a_standard_test_that_is_lost_is_refused_and_xfail_needs_a_reason(
    suite: type, test: object
) -> None:
    with pytest.raises(TypeError) as caught:
        type("Other", (suite,), {TEST: test})
    assert str(caught.value).startswith(f"Other.{TEST} replaces a standard test")
    assert "@pytest.mark.xfail(reason=...)" in str(caught.value).splitlines()[-1]


def test_a_mixin_replaces_no_standard_test_and_further_tests_are_free() -> None:
    mixin = type("Mixin", (), {"test_a_heartbeat_is_heard": override()})
    with pytest.raises(TypeError, match=r"^Mixin.test_a_heartbeat_is_heard replaces a standard"):
        type("Other", (mixin, ChannelSuite), {})
    free = {TEST: override(xfail="frees late"), "store_uri": "another", "test_mine": override()}
    assert free.keys() <= vars(type("Other", (StoreSuite,), free)).keys()
