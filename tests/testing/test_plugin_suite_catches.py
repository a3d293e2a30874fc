"""The plugin suite catches plugins that are wrong, each by the test that names the fault."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.testing.conftest import RunSuites

PLUGIN = """
from draftcore import hookimpl
from draftcore.offers import Offer
import click

@hookimpl
def describe():
    return [Offer("store", "{name}", frozenset({"durable", "layout:serving"}), OPTIONS)]

@hookimpl
def feature_store(name, uri): ...

@click.command("greet-{name}")
def greet():
    "Say hello."

@hookimpl
def commands():
    return [greet]

OPTIONS = "{name}.options:Options"
"""
OPTIONS = """
from pydantic import BaseModel, ConfigDict, Field

class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    depth: int = Field(1, description="how deep")

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    width: int = Field(1, description="how wide")
    inner: list[Inner] | None = Field(None, description="what is inside")
"""
METADATA = """\
Metadata-Version: 2.1
Name: draftcore-{name}
Version: 1.0
Summary: A plugin for a test
Requires-Dist: draftcore>=0.1,<9
Requires-Dist: draftcore>=5; extra == "later"

# What it is for
"""
GRAPH = """
@hookimpl
def describe():
    return [Offer("graph", "{name}")]

@hookimpl
def graph_backend(name, options):
    return ANSWER
"""


class Wrong:
    """A good plugin as files, and what is wrong with it: a replacement or an addition."""

    def __init__(
        self,
        test: str,
        *,
        plugin: str = "",
        options: tuple[str, str] = ("", ""),
        metadata: tuple[str, str] = ("", ""),
        entry: str = "{name}",
        typed: bool = True,
    ) -> None:
        self.test, self.entry, self.typed = test, entry, typed
        self.files = {
            "plugin.py": PLUGIN + dedent(plugin),
            "options.py": OPTIONS.replace(*options),
            "METADATA": METADATA.replace(*metadata),
        }

    def write(self, folder: Path, name: str) -> str:
        """Write the plugin and its distribution; return the suite's source."""
        package, info = folder / name, folder / f"draftcore_{name}-1.0.dist-info"
        package.mkdir()
        info.mkdir()
        for file, text in self.files.items():
            place = info if file == "METADATA" else package
            (place / file).write_text(text.replace("{name}", name))
        entry = self.entry.replace("{name}", name)
        (info / "entry_points.txt").write_text(f"[draftcore]\n{entry} = {name}.plugin\n")
        if self.typed:
            (package / "py.typed").touch()
        return (
            "from draftcore.testing.plugins import PluginSuite\n"
            f"class TestSuite(PluginSuite):\n    plugin = '{name}.plugin'\n"
        )


CAUGHT = {
    "is_right": Wrong(""),
    "is_right_about_graphs": Wrong("", plugin=GRAPH.replace("ANSWER", "object()")),
    "aptly": Wrong(
        "",
        plugin="""
        @hookimpl
        def describe():
            return [Offer("store", "other", options=OPTIONS)]
        """,
    ),
    "fails_at_import": Wrong("test_it_is_listed_as_ready", plugin="import surely_missing"),
    "imports_torch": Wrong("test_looking_at_it_imports_nothing_heavy", plugin="import torch"),
    "imports_numpy_to_describe": Wrong(
        "test_looking_at_it_imports_nothing_heavy",
        plugin="""
        @hookimpl
        def describe():
            import numpy
            return [Offer("store", "{name}", options=OPTIONS)]
        """,
    ),
    "sleeps_at_import": Wrong(
        "test_importing_it_takes_less_than_100_ms", plugin="import time; time.sleep(0.15)"
    ),
    "offers_two_algorithms": Wrong(
        "test_it_offers_at_most_one_algorithm",
        plugin="""
        @hookimpl
        def describe():
            return [Offer("algorithm", "one"), Offer("algorithm", "two")]
        """,
    ),
    "spells_a_capability": Wrong(
        "test_capabilities_are_words",
        plugin="""
        @hookimpl
        def describe():
            return [Offer("store", "{name}", frozenset("durable"))]
        """,
    ),
    "offers_one_thing_twice": Wrong(
        "test_every_offer_can_be_bound_alone",
        plugin="""
        @hookimpl
        def describe():
            return [Offer("store", "{name}"), Offer("store", "{name}", options=OPTIONS)]
        """,
    ),
    "answers_none": Wrong("test_a_graph_offer_is_opened", plugin=GRAPH.replace("ANSWER", "None")),
    "has_no_options_model": Wrong(
        "test_every_option_is_described", options=("class Options", "class Choices")
    ),
    "does_not_describe_an_option": Wrong(
        "test_every_option_is_described", options=('1, description="how deep"', "1")
    ),
    "needs_an_option": Wrong(
        "test_every_option_has_a_default",
        options=('1, description="how wide"', "..., description='w'"),
    ),
    "has_a_wrong_default": Wrong(
        "test_every_option_has_a_default",
        options=('1, description="how wide"', "None, validate_default=True, description='w'"),
    ),
    "ignores_unknown_options": Wrong(
        "test_unknown_options_are_refused",
        options=('extra="forbid", frozen=True)\n    width', "frozen=True)\n    width"),
    ),
    "ignores_unknown_inner_options": Wrong(
        "test_unknown_options_are_refused",
        options=('extra="forbid", frozen=True)\n    depth', "frozen=True)\n    depth"),
    ),
    "has_another_name": Wrong(
        "test_its_name_is_that_of_an_offer_or_of_its_dist", entry="another_{name}"
    ),
    "has_no_upper_bound": Wrong(
        "test_its_dist_bounds_the_core_on_both_sides", metadata=(">=0.1,<9", ">=0.1")
    ),
    "has_no_lower_bound": Wrong(
        "test_its_dist_bounds_the_core_on_both_sides", metadata=(">=0.1,<9", "<9")
    ),
    "does_not_require_the_core": Wrong(
        "test_its_dist_bounds_the_core_on_both_sides",
        metadata=("Requires-Dist: draftcore>=0.1,<9\n", ""),
    ),
    "is_not_typed": Wrong("test_its_package_is_typed", typed=False),
    "has_no_summary": Wrong(
        "test_its_dist_has_a_summary_and_a_readme", metadata=("Summary: A plugin for a test\n", "")
    ),
    "has_no_readme": Wrong(
        "test_its_dist_has_a_summary_and_a_readme", metadata=("# What it is for\n", "")
    ),
    "takes_a_verb_of_the_shell": Wrong(
        "test_its_verbs_clash_with_none", plugin='greet.name = "list-plugins"'
    ),
    "takes_a_verb_of_a_built_in_plugin": Wrong(
        "test_its_verbs_clash_with_none", plugin='greet.name = "train"'
    ),
    "has_a_verb_twice": Wrong(
        "test_its_verbs_clash_with_none",
        plugin="""
        @hookimpl
        def commands():
            return [greet, greet]
        """,
    ),
    "has_a_verb_without_help": Wrong("test_its_verbs_have_help", plugin="greet.help = None"),
}


@pytest.fixture(scope="module")
def failures(wrong_folder: Path, run_suites: RunSuites) -> dict[str, set[str]]:
    return run_suites(
        {name: (wrong.write(wrong_folder, name), wrong.test) for name, wrong in CAUGHT.items()}
    )


@pytest.mark.parametrize("name", [name for name, wrong in CAUGHT.items() if wrong.test])
def test_a_wrong_plugin_is_caught_by_name(name: str, failures: dict[str, set[str]]) -> None:
    assert CAUGHT[name].test in failures[name]


@pytest.mark.parametrize("name", [name for name, wrong in CAUGHT.items() if not wrong.test])
def test_a_right_plugin_passes(name: str, failures: dict[str, set[str]]) -> None:
    assert failures[name] == set()
