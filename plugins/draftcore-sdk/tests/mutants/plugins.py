"""Wrong plugins: one that is installed with its distribution, and what is wrong with each."""

from draftcore_sdk.plugins import PluginSuite

from mutants import Mutants, wrong

PLUGIN = """
import click

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

OPTIONS = "{name}.options:Options"

@hookimpl
def describe():
    return [Offer("store", "{name}", frozenset({"durable", "x-fast"}), OPTIONS)]

@hookimpl
def feature_store(name, uri): ...

@click.command("greet-{name}")
def greet():
    "Say hello."

@hookimpl
def commands():
    return [greet]
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
RIGHT = {
    "{name}/plugin.py": PLUGIN,
    "{name}/options.py": OPTIONS,
    "{name}/py.typed": "",
    "draftcore_{name}-1.0.dist-info/METADATA": METADATA,
    "draftcore_{name}-1.0.dist-info/entry_points.txt": "[draftcore]\n{name} = {name}.plugin\n",
}
BODY = 'plugin = "{name}.plugin"'

WRONG = """
== aptly: passes
@hookimpl
def describe():
    return [Offer("store", "other", options=OPTIONS)]
== fails_at_import: test_it_is_listed_as_ready
import surely_missing
== imports_torch: test_looking_at_it_imports_nothing_heavy
import torch
== imports_numpy_to_describe: test_looking_at_it_imports_nothing_heavy
@hookimpl
def describe():
    import numpy
    return [Offer("store", "{name}", options=OPTIONS)]
== sleeps_at_import: test_looking_at_it_takes_less_than_100_ms
import time; time.sleep(0.15)
== describes_slowly: test_looking_at_it_takes_less_than_100_ms
@hookimpl
def describe():
    import time; time.sleep(0.15)
    return [Offer("store", "{name}", options=OPTIONS)]
== prints_at_import: test_looking_at_it_leaves_the_process_as_it_is
print("hello")
== starts_a_thread_at_import: test_looking_at_it_leaves_the_process_as_it_is
import threading, time; threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
== offers_two_algorithms: test_it_is_listed_as_ready
@hookimpl
def describe():
    return [Offer("algorithm", "one"), Offer("algorithm", "two")]
== spells_a_capability: test_capabilities_are_known_or_begin_with_x
@hookimpl
def describe():
    return [Offer("store", "{name}", frozenset("durable"))]
== mistypes_a_capability: test_capabilities_are_known_or_begin_with_x
-"x-fast"
+"sharde"
== offers_one_thing_twice: test_every_offer_can_be_bound_alone
@hookimpl
def describe():
    return [Offer("store", "{name}"), Offer("store", "{name}", options=OPTIONS)]
== has_no_options_model: test_every_option_is_described
-class Options
+class Choices
== does_not_describe_an_option: test_every_option_is_described
-1, description="how deep"
+1
== renames_an_option: test_every_option_has_a_default
-description="how wide"
+description="how wide", alias="w"
== needs_an_option: test_every_option_has_a_default
-1, description="how wide"
+..., description='w'
== ignores_unknown_options: test_unknown_options_are_refused
-extra="forbid", frozen=True)
+frozen=True)
     width
== ignores_unknown_inner_options: test_unknown_options_are_refused
-extra="forbid", frozen=True)
+frozen=True)
     depth
== has_another_name: test_its_name_is_that_of_an_offer_or_of_its_dist
-{name} = {name}.plugin
+another_{name} = {name}.plugin
== has_no_upper_bound: test_its_dist_bounds_the_core_on_both_sides
->=0.1,<9
+>=0.1
== has_no_lower_bound: test_its_dist_bounds_the_core_on_both_sides
->=0.1,<9
+<9
== is_not_typed: test_its_package_is_typed
-py.typed
+untyped
== has_no_summary: test_its_dist_has_a_summary_and_a_readme
 Version: 1.0
-Summary: A plugin for a test
== has_no_readme: test_its_dist_has_a_summary_and_a_readme
 Requires-Dist: draftcore>=5; extra == "later"
-
-# What it is for
== takes_a_verb_of_the_shell: test_its_verbs_clash_with_none
greet.name = "list-plugins"
== has_a_verb_twice: test_its_verbs_clash_with_none
@hookimpl
def commands():
    return [greet, greet]
== has_a_verb_without_help: test_its_verbs_have_help
greet.help = None
== has_a_verb_whose_help_fails: test_its_verbs_have_help
class Broken(click.Command):
    def get_help(self, ctx):
        raise KeyError("help")

@hookimpl
def commands():
    return [Broken("greet-{name}", help="Say hello.")]
"""

MUTANTS = Mutants(PluginSuite, RIGHT, wrong(WRONG), BODY)
