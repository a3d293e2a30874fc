"""What every plugin must be, whatever it offers. See `draftcore_sdk` for how to use it.

A subclass sets `plugin`, and `loose` for a one-file plugin that is not installed. What concerns
its distribution is skipped for a loose file, and for the built-in plugins of draftcore itself.

A plugin's name is that of an offer, or its distribution's without `draftcore-`: whoever reads a
configuration or a requirements file knows what to look for in the other.
"""

import functools
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, cast, get_args

import click
import pytest
from click.testing import CliRunner
from importlib_metadata import distribution
from packaging.requirements import Requirement
from pydantic import BaseModel, ValidationError

from draftcore.contracts.offers import Offer
from draftcore.errors import nearest
from draftcore_sdk.internals import CORE, Plugin, Registry, bind, load_plugins, main, register
from draftcore_sdk.suite import Suite, child_environment, registry_of

HEAVY = ("torch", "transformers", "numpy", "pydantic")
BUDGET_MS = 100.0
TOLD = ("target", "verb")  # kinds of offers that have to be told something
SERVERS = ("llamacpp", "sglang", "vllm")
PHASES = ("phase:decode", "phase:prefill")
# What an offer of a kind may promise, as docs/hooks.md explains it. NAME is any name.
CAPABILITIES: dict[str, tuple[str, ...]] = {
    "algorithm": (
        "compile", "cross_entropy", "disagg", "disagg-stateless", "distils", "layout:NAME", "parallel",
        "split_dependent", "split_dependent:NAME", "stop_gradient", "stop_gradient:NAME",
        *(f"{server}:NAME" for server in SERVERS), *(f"served:{server}" for server in SERVERS),
    ),
    "store": ("durable", "shared"),
    "capture": ("embeddings", "graphs", "images", "per-rank", "tensor-parallel", "topk"),
    "graph": ("auto:NAME", "breaks", "device:NAME", "forks", *PHASES),
    "graph-plugin": ("forks", *PHASES),
}  # fmt: skip
LOOK = """
import json, logging, os, random, signal, sys, threading, time, warnings
import draftcore.cli
from draftcore.plugins import specs
from importlib import import_module

ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "draftcore"]
names = {module: list(vars(module)) for module in ours}
done = []

def state():
    return {
        "os.environ": dict(os.environ), "the random state": random.getstate(),
        "the filters of warnings": list(warnings.filters),
        "the logging of others": (logging.root.level, list(logging.root.handlers)),
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "the threads": threading.active_count(), "processes and connections": list(done),
        "the core": [id(getattr(m, name, None)) for m in ours for name in names[m]],
    }

def heard(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect"):
        done.append(event)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.addaudithook(heard)
module, _, instance = sys.argv[1].partition(":")
manager, before, began = specs.manager(), state(), time.perf_counter()
found = import_module(module)
manager.register(getattr(found, instance) if instance else found)
offers = manager.hook.describe()
took = 1e3 * (time.perf_counter() - began)
manager.hook.commands()
again = [manager.hook.describe() for _ in range(9)]
changed = ["what describe() says"] * (again != [offers] * 9)
changed += [name for name, value in state().items() if value != before[name]]
modules = sorted({name.partition(".")[0] for name in sys.modules})
print("\\n" + json.dumps({"took": took, "modules": modules, "changed": changed}))
"""


class PluginSuite(Suite):
    """What list-plugins, pip and a person who chooses a plugin rely on."""

    @pytest.fixture
    def found(self) -> Plugin:
        """The plugin as the registry has it, ready or not."""
        plugins = loaded(self.loose, tuple(sys.path))
        same = [plugin for plugin in plugins if plugin.module == self.plugin]
        if len(same) == 1:
            return same[0]
        modules = ", ".join(sorted(plugin.module for plugin in plugins))
        pytest.fail(f"{len(same)} plugins have the module {self.plugin!r}; there are {modules}")

    @pytest.fixture
    def offers(self, found: Plugin) -> tuple[Offer, ...]:
        offers = tuple(offer for offer in found.offers if offer.kind != "verb")
        if not offers:
            pytest.skip("it offers nothing but verbs")
        return offers

    @pytest.fixture
    def models(self, offers: tuple[Offer, ...]) -> list[type[BaseModel]]:
        """The options models of all offers. The test fails for one that is not there."""
        models = [options_model(offer) for offer in offers if offer.options]
        if not models:
            pytest.skip("its offers have no options")
        return models

    @pytest.fixture
    def dist(self, found: Plugin) -> Any:
        """The metadata of the plugin's distribution."""
        if found.loose:
            pytest.skip("a loose file has no distribution")
        if found.dist == CORE:
            pytest.skip("a built-in plugin has no distribution of its own")
        return distribution(found.dist).metadata

    @pytest.fixture
    def verbs(self, found: Plugin) -> list[click.Command]:
        verbs = verbs_of(self.plugin)
        if not verbs:
            pytest.skip("it adds no verbs")
        odd = [str(verb) for verb in verbs if not (isinstance(verb, click.Command) and verb.name)]
        assert not odd, f"no click.Command with a name: {', '.join(odd)}"
        return verbs

    def test_it_is_listed_as_ready(self, found: Plugin) -> None:
        assert found.state == "ready", f"{found.problem}\n{found.fix}"
        package, _, instance = self.plugin.split()[0].partition(":")
        spec = None if instance else importlib.util.find_spec(package)
        beside = iter_modules((spec and spec.submodule_search_locations) or [])
        for name in {module.name for module in beside}.intersection(found.hooks):
            pytest.fail(
                f"the module {package}.{name} takes the place of the hook {name} once it is imported\n"
                "rename it, or write the hooks in a module of their own"
            )

    def test_looking_at_it_imports_nothing_heavy(self, found: Plugin) -> None:
        """In a process of its own: the module, `describe` and `commands`."""
        heavy = [name for name in HEAVY if name in looked_at(self.plugin)["modules"]]
        assert not heavy, (
            f"{self.plugin} imports {', '.join(heavy)}: do that inside the hooks that need it\n"
            f"python -X importtime -c 'import {self.plugin.partition(':')[0]}' shows by what way"
        )

    def test_looking_at_it_takes_less_than_100_ms(self, found: Plugin) -> None:
        """Beyond what draftcore imports, in the best of up to five tries: machines are noisy."""
        tries = (looked_at(self.plugin, attempt)["took"] for attempt in range(5))
        quick = any(took < BUDGET_MS for took in tries)
        took = looked_at(self.plugin)["took"]
        slow = f"{self.plugin} takes {took:.0f} ms to import and describe, in the best of five"
        assert quick, slow

    def test_looking_at_it_leaves_the_process_as_it_is(self, found: Plugin) -> None:
        """Every verb imports plugins that it may not need; `print` would break what reads stdout."""
        looked = looked_at(self.plugin)
        assert not looked["changed"], f"its import changes {', '.join(looked['changed'])}"
        assert not looked["said"], f"its import prints: {looked['said']}"

    def test_capabilities_are_known_or_begin_with_x(self, offers: tuple[Offer, ...]) -> None:
        """A misspelt one turns off the tests that it would be held to."""
        for offer in offers:
            assert isinstance(offer.capabilities, frozenset), offer
            whose = f"the {offer.kind} {offer.name!r} has the capability"
            for word in sorted(offer.capabilities):
                assert re.fullmatch(r"\w[\w.:-]+", word), f'{whose} {word!r}: frozenset({{"one"}})'
                known = CAPABILITIES.get(offer.kind, (word,))
                fits = any(fnmatchcase(word, name.replace("NAME", "?*")) for name in known)
                assert fits or re.match("(served:)?x-", word), (
                    f"{whose} {word!r}{nearest(word, known)}\n"
                    f"known are {', '.join(known)}; words of your own begin with x-"
                )

    def test_every_offer_can_be_bound_alone(self, found: Plugin, offers: tuple[Offer, ...]) -> None:
        for (kind, name), count in Counter((o.kind, o.name) for o in offers).items():
            assert count == 1, f"the {kind} {name!r} is offered {count} times"
            if kind not in TOLD:
                assert bind(Registry((found,)), kind, name).plugin is found

    def test_every_option_is_described(self, models: list[type[BaseModel]]) -> None:
        inner = [section for model in models for section in sections(model)]
        fields = [(section, *item) for section in inner for item in section.model_fields.items()]
        empty = [one for one in fields if not (one[2].description or "").strip()]
        bare = [f"{section.__name__}.{name}" for section, name, _ in empty]
        assert not bare, f"without Field(description=...): {', '.join(bare)}"

    def test_every_option_has_a_default(self, found: Plugin, models: list[type[BaseModel]]) -> None:
        """The name of an offer must be enough to try it; a target has to be told where it lies."""
        alone = [offer for offer in found.offers if offer.kind not in TOLD]
        for model in [options_model(offer) for offer in alone if offer.options]:
            needed = [name for name, field in model.model_fields.items() if field.is_required()]
            assert not needed, f"{model.__name__} has no default for {', '.join(needed)}"
            renamed = [name for name, field in model.model_fields.items() if field.validation_alias]
            assert not renamed, f"set by another name than its own: {', '.join(renamed)}"
        for offer in alone:
            bind(Registry((found,)), offer.kind, offer.name)

    def test_unknown_options_are_refused(self, models: list[type[BaseModel]]) -> None:
        """Sections inside the options too: a misspelt key must not be ignored."""
        say = 'say model_config = ConfigDict(extra="forbid", frozen=True)'
        for model in (inner for outer in models for inner in sections(outer)):
            assert refuses_unknown(model), f"{model.__name__} takes unknown keys\n{say}"

    def test_its_name_is_that_of_an_offer_or_of_its_dist(self, found: Plugin, dist: Any) -> None:
        known = {offer.name for offer in found.offers}
        known |= {found.dist, found.dist.removeprefix("draftcore-")}
        says = f"the entry point is named {found.name!r}; name it one of {', '.join(sorted(known))}"
        assert found.name in known, says

    def test_its_dist_bounds_the_core_on_both_sides(self, found: Plugin, dist: Any) -> None:
        """A core of another minor version may have other hooks."""
        operators = {
            part.operator
            for need in map(Requirement, dist.get_all("Requires-Dist") or ())
            if need.name.lower() == "draftcore"
            and (need.marker is None or need.marker.evaluate({"extra": ""}))
            for part in need.specifier
        }
        say = "say draftcore>=X.Y,<X.(Y+1) in the dependencies of pyproject.toml"
        for side, able in {"lower": ">= > ~= ==", "upper": "< <= ~= =="}.items():
            bound = operators & set(able.split())
            assert bound, f"{found.dist} has no {side} bound on draftcore\n{say}"

    def test_its_package_is_typed(self, found: Plugin, dist: Any) -> None:
        name = found.module.partition(":")[0].partition(".")[0]
        spec = importlib.util.find_spec(name)
        folders = (spec and spec.submodule_search_locations) or []
        assert folders, f"{name} is a single module; only a package can say that it is typed"
        typed = any((Path(folder) / "py.typed").is_file() for folder in folders)
        assert typed, f"there is no file {name}/py.typed in {found.dist}\nan empty one will do"

    def test_its_dist_has_a_summary_and_a_readme(self, found: Plugin, dist: Any) -> None:
        assert dist.get("Summary"), f"{found.dist} has no `description` in pyproject.toml"
        assert dist.get("Description"), f"{found.dist} has no `readme` in pyproject.toml"

    def test_its_verbs_clash_with_none(self, found: Plugin, verbs: list[click.Command]) -> None:
        others = [p for p in load_plugins().ready if p.dist == CORE and p.name != found.name]
        core = {*main.commands, *(verb.name for p in others for verb in verbs_of(p.module))}
        for name, count in Counter(verb.name for verb in verbs).items():
            assert name not in core, f"draftcore has a verb {name!r}"
            assert count == 1, f"it has {count} verbs {name!r}"

    def test_its_verbs_have_help(self, verbs: list[click.Command]) -> None:
        silent = [str(verb.name) for verb in verbs if not verb.get_short_help_str()]
        assert not silent, f"without a docstring: {', '.join(silent)}"
        for verb in verbs:
            shown = CliRunner().invoke(verb, ["--help"])
            assert shown.exit_code == 0, f"{verb.name} --help fails: {shown.exception!r}"


@functools.cache
def loaded(loose: Path | None, path: Sequence[str]) -> tuple[Plugin, ...]:
    """Load all plugins, once for all tests."""
    return load_plugins(files=[loose] if loose else [], path=path).plugins


@functools.cache
def looked_at(plugin: str, attempt: int = 0) -> dict[str, Any]:
    """Import a plugin in a fresh process and ask what it offers.

    Returns how many milliseconds that takes, every top-level module that is there then, and what
    it has changed in its process and printed.
    """
    command = [sys.executable, "-c", LOOK, plugin]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    assert done.returncode == 0, f"looking at {plugin} fails\n{done.stderr.strip()}"
    *said, found = done.stdout.splitlines()
    return {**json.loads(found), "said": "\n".join(said).strip()}


def options_model(offer: Offer) -> type[BaseModel]:
    module, _, name = offer.options.partition(":")
    where = f"options of the {offer.kind} {offer.name!r}"
    try:
        model = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{where}: {error}")
    assert isinstance(model, type), f"{where}: {offer.options} is no class"
    assert issubclass(model, BaseModel), f"{where}: {offer.options} is no pydantic model"
    return model


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return a model and those of its fields, at any depth."""
    found = [model]
    for section in found:
        for field in section.model_fields.values():
            found += [inner for inner in models_in(field.annotation) if inner not in found]
    return found


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inside in get_args(annotation) for model in models_in(inside)]


def refuses_unknown(model: type[BaseModel]) -> bool:
    try:
        model.model_validate({"no_such_option_anywhere": 1})
    except ValidationError as error:
        return any(problem["type"] == "extra_forbidden" for problem in error.errors())
    return False


def verbs_of(plugin: str) -> list[click.Command]:
    answers = cast(Any, register(registry_of(plugin).plugins).hook).commands()
    return [verb for some in answers for verb in some]
