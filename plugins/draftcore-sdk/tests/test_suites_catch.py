"""The conformance suites catch wrong plugins, each by the test that names its fault."""

from collections.abc import Callable
from functools import cache

import pytest
from mutants import Mutants
from mutants.algorithms import ALGORITHMS
from mutants.captures import CAPTURES
from mutants.channels import CHANNELS
from mutants.graph_plugins import GRAPH_PLUGINS
from mutants.graphs import GRAPHS
from mutants.plugins import PLUGINS
from mutants.runners import RUNNERS
from mutants.stores import STORES

SUITES = {
    "algorithms": ALGORITHMS,
    "captures": CAPTURES,
    "channels": CHANNELS,
    "graph_plugins": GRAPH_PLUGINS,
    "graphs": GRAPHS,
    "plugins": PLUGINS,
    "runners": RUNNERS,
    "stores": STORES,
}
CASES = {
    f"{suite}-{name}": (suite, name)
    for suite, mutants in SUITES.items()
    for name in mutants.plugins
}
# A mutant that fails by one of these is not wrong but broken.
SLIPS = ("NameError", "SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError")
Outcomes = Callable[[str], dict[str, dict[str, str]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What became of a suite's plugins; the suite is run when it is asked for first."""
    return cache(lambda suite: SUITES[suite].run(tmp_path_factory.mktemp(suite)))


@pytest.mark.parametrize(("suite", "name"), CASES.values(), ids=CASES)
def test_who_passes_and_who_is_caught(suite: str, name: str, outcomes: Outcomes) -> None:
    lines, caught_by = outcomes(suite)[name], SUITES[suite].plugins[name].caught_by
    if not caught_by:
        assert lines
        assert [line for line in lines.values() if not line.startswith("PASSED ")] == []
        return
    assert list(lines) == [caught_by]
    assert not lines[caught_by].startswith("PASSED ")
    assert not any(f" - {slip}" in lines[caught_by] for slip in SLIPS)


@pytest.mark.parametrize(
    "mutants",
    [one for one in SUITES.values() if one.every_test],
    ids=lambda one: one.suite.__name__,
)
def test_every_standard_test_has_caught_something(mutants: Mutants) -> None:
    standard = {name for name in dir(mutants.suite) if name.startswith("test_")}
    assert standard == {
        mutant.caught_by.partition("[")[0] for mutant in mutants.wrong.values() if mutant.caught_by
    }
