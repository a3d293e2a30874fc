"""Installed is not selected: a binding holds its owner and what the run chose, nothing else."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from draftcore.errors import DraftcoreError, UsageError
from draftcore.plugins.binding import bind, observers
from tests.kernel.conftest import STORE

if TYPE_CHECKING:
    from tests.kernel.conftest import Site

WRAPPER = """
    @hookimpl(wrapper=True)
    def feature_store(uri):
        return Opened(f"wrapped {yield}")
"""
OBSERVER = """
    seen = []
    @hookimpl
    def step_finished(step):
        seen.append(step)
"""
WITH_OPTIONS = """
    @hookimpl
    def describe():
        return [Offer("capture", "tuned", frozenset({"per-rank"}), f"{__name__}_options:Options")]
    @hookimpl
    def capture(options): ...
"""
OPTIONS = """
    from pydantic import BaseModel

    class Pool(BaseModel):
        pages: int = 4
        page_bytes: int = 4096

    class Options(BaseModel):
        limit_bytes: int
        pool: Pool | None = None
        pools: list[Pool] = []
"""


def open_store(site: Site, name: str, *extras: str, files: tuple[Path, ...] = ()) -> object:
    binding = bind(site.load(files), "store", name, extras=extras)
    return binding.hook.feature_store(name=name, uri="there")


def test_a_binding_calls_its_owner_and_the_wrappers_selected_in_the_order_of_their_names(
    site: Site,
) -> None:
    for name in ("m", "n"):
        site.store(name)
    for name in ("z", "a"):
        site.plugin(name, WRAPPER.replace("wrapped", name))
    assert open_store(site, "m") == "m at there"
    assert open_store(site, "m", "a", "z") == open_store(site, "m", "z", "a") == "z a m at there"


def test_a_loose_file_is_selected_without_being_named_unless_it_offers_something(
    site: Site,
) -> None:
    site.store("a")
    file, mine = (
        site.loose("around", WRAPPER),
        site.loose("my_store", STORE.replace("NAME", "mine")),
    )
    assert open_store(site, "a", files=(file,)) == "wrapped a at there"
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        open_store(site, "a", files=(site.loose("broken_idea", "1 / 0"),))
    assert open_store(site, "a", files=(mine,)) == "a at there"
    assert open_store(site, "mine", files=(mine,)) == "mine at there"


def test_two_owners_of_one_hook_are_refused_when_bound(site: Site) -> None:
    site.store("a")
    site.plugin("b", "@hookimpl\ndef feature_store(name, uri): ...")
    with pytest.raises(UsageError) as caught:
        open_store(site, "a", "b")
    assert "'feature_store' has several owners: a and b" in str(caught.value)
    assert "wrapper=True" in str(caught.value).splitlines()[-1]


def test_observers_are_those_selected_and_the_loose_files(site: Site) -> None:
    for name in ("chosen", "idle"):
        site.plugin(name, OBSERVER)
    registry = site.load([site.loose("at_hand", OBSERVER)])
    observers(registry, ["chosen"]).step_finished(step=3, metrics={})
    seen = {plugin.name: plugin.instance.seen for plugin in registry.plugins}
    assert seen == {"at_hand": [3], "chosen": [3], "idle": []}
    with pytest.raises(UsageError, match=r"no observer 'chozen' .did you mean 'chosen'"):
        observers(registry, ["chozen"])


def test_a_plugin_that_neither_observes_nor_wraps_is_refused_among_the_extras(site: Site) -> None:
    site.store("a")
    site.plugin("verbal", "@hookimpl\ndef commands(): return []")
    for name, offers in (("a", "store a"), ("verbal", "nothing")):
        with pytest.raises(UsageError, match=f"{name} .*no observer and no wrapper\n.* {offers}:"):
            observers(site.load(), [name])


FAILURES = {
    "1 / 0": "raised ZeroDivisionError: division by zero\n  at ",
    "raise SystemExit(0)": "raised SystemExit: 0",
    "raise BaseException": "raised BaseException: ",
    "return 7": "returned a int, and that does not fit",
}


@pytest.mark.parametrize(("fails", "says"), FAILURES.items(), ids=FAILURES)
def test_an_observer_that_fails_is_named_once_and_set_aside(
    site: Site, capsys: pytest.CaptureFixture[str], fails: str, says: str
) -> None:
    site.plugin("good", OBSERVER)
    source = OBSERVER.replace("seen.append(step)", f"seen.append(step); {fails}")
    site.plugin("bad", source + "    @hookimpl\n    def evaluated(): seen.append(0)\n")
    registry = site.load()
    hooks: Any = observers(registry, ["bad", "good"])
    for step in (1, 2):
        assert hooks.step_finished(step=step, metrics={}) == []
    hooks.evaluated(step=2, report={})
    seen = {plugin.name: plugin.instance.seen for plugin in registry.plugins}
    assert seen == {"bad": [1], "good": [1, 2]}
    told = capsys.readouterr().err
    assert told.startswith(f"warning: the hook step_finished of bad (draftcore-bad 0.1) {says}")
    assert told.count("\n  the run goes on without bad\n") == told.count("warning") == 1


@pytest.mark.parametrize("error", ["DraftcoreError('no room')", "KeyboardInterrupt"])
def test_an_observer_ends_a_run_with_an_error_that_is_meant(site: Site, error: str) -> None:
    source = "from draftcore.errors import DraftcoreError\n" + dedent(OBSERVER)
    site.plugin("strict", source.replace("seen.append(step)", f"raise {error}"))
    with pytest.raises((DraftcoreError, KeyboardInterrupt), match=r"^(no room)?$"):
        observers(site.load(), ["strict"]).step_finished(step=3, metrics={})


@pytest.mark.parametrize(("fails", "says"), FAILURES.items(), ids=FAILURES)
@pytest.mark.parametrize("which", ["store", "around"])
def test_a_store_or_wrapper_that_fails_is_named_with_its_hook(
    site: Site, which: str, fails: str, says: str
) -> None:
    """Of both the one that is to blame, and with the traceback."""
    for name, source in {"store": STORE.replace("NAME", "store"), "around": WRAPPER}.items():
        failing = "yield; " * (name == "around") + fails
        site.plugin(name, re.sub("return Opened.*", failing, source) if name == which else source)
    with pytest.raises(DraftcoreError) as caught:
        open_store(site, "store", "around")
    assert says in str(caught.value)
    assert str(caught.value).startswith(
        f"the hook feature_store of {which} (draftcore-{which} 0.1)"
    )
    assert bool(caught.value.__cause__) == ("raise" in says)


def test_an_observer_that_two_plugins_name_is_called_once(site: Site) -> None:
    site.module("fake_twice", "import sys\n" + dedent(OBSERVER) + "me = sys.modules[__name__]\n")
    site.metadata("draftcore-twice", {"one": "fake_twice", "two": "fake_twice:me"})
    registry = site.load()
    observers(registry, ["one", "two"]).step_finished(step=3, metrics={})
    assert registry.named("one").instance.seen == [3]


@pytest.fixture
def tuned(site: Site) -> Site:
    site.module("fake_tuned_options", OPTIONS)
    site.plugin("tuned", WITH_OPTIONS)
    return site


def test_options_become_the_plugins_own_model(tuned: Site) -> None:
    binding = bind(tuned.load(), "capture", "tuned", {"limit_bytes": 9, "pool": {"pages": 2}})
    assert binding.capabilities == {"per-rank"}
    assert (binding.options.limit_bytes, binding.options.pool.pages) == (9, 2)


PAGE = "page: unknown key (did you mean 'pages'?); there are pages, page_bytes"
LIMIT = "limit_byte: unknown key (did you mean 'limit_bytes'?); there are limit_bytes, pool, pools"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"limit_byte": 2, "limit_bytes": 1}, LIMIT),  # though the model would ignore it
        ({"limit_bytes": 1, "pool": {"page": 1}}, f"pool.{PAGE}"),
        ({"limit_bytes": 1, "pools": [{"page": 1}]}, f"pools.0.{PAGE}"),
        ({}, "limit_bytes: is missing"),
        ({"limit_bytes": "many"}, "limit_bytes: Input should be a valid integer, not 'many'"),
    ],
)
def test_what_is_wrong_with_an_option_is_said_with_the_options_of_its_section(
    tuned: Site, options: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        bind(tuned.load(), "capture", "tuned", options)
    where, problem, _ = str(caught.value).splitlines()
    assert "capture 'tuned', plugin tuned (draftcore-tuned 0.1): 1 wrong" in where
    assert problem == f"  {says}"


def test_options_for_an_offer_that_has_none_are_refused(site: Site) -> None:
    site.store("plain")
    assert bind(site.load(), "store", "plain").options is None
    with pytest.raises(UsageError, match="leave out colour"):
        bind(site.load(), "store", "plain", {"colour": "red"})


def test_a_model_that_cannot_be_imported_is_reported(site: Site) -> None:
    site.plugin("tuned", WITH_OPTIONS)
    with pytest.raises(UsageError, match="python -c 'import fake_tuned_options'"):
        bind(site.load(), "capture", "tuned")


# ------------------------------------------------------------ algorithms as classes

FAMILY = """
    @hookimpl
    def describe():
        heads = f"{__name__}_classes:Heads"
        return [
            Offer("algorithm", "tied", options=f"{__name__}_options:Options", implementation=heads),
            Offer("algorithm", "lazy", implementation=f"{__name__}_classes:Lazy"),
            Offer("algorithm", "else", implementation=f"{__name__}_classes:Else"),
        ]
"""
CLASSES = """
    from draftcore.contracts.algorithm import Algorithm, DraftBatch
    from draftcore.contracts.capture import FeatureRequest

    class Lazy(Algorithm):
        def feature_request(self, target):
            return FeatureRequest((target,), True, "float32")

        def build_draft(self, target, data): ...

        def collate(self, samples):
            return samples

    class Heads(Lazy):
        def forward_loss(self, draft, batch, context):
            return draft

        def feature_request(self, target):
            return FeatureRequest((self.options.limit_bytes,), False, "float32")

    class Else: ...
"""


@pytest.fixture
def family(site: Site) -> Site:
    site.module("fake_family_options", OPTIONS)
    site.module("fake_family_classes", CLASSES)
    site.plugin("family", FAMILY)
    return site


def test_methods_of_a_class_answer_the_hooks_and_know_their_options(family: Site) -> None:
    site = family
    site.plugin(
        "around", "@hookimpl(wrapper=True)\ndef feature_request(target):\n    return (yield)"
    )
    bound: Any = bind(site.load(), "algorithm", "tied", {"limit_bytes": 3}, ["around"])
    assert bound.hook.feature_request(target=None, options=bound.options).layers == (3,)
    assert [offer.name for offer in bound.plugin.offers] == ["tied", "lazy", "else"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("lazy", "Lazy lacks forward_loss"), ("else", "Else is no subclass of Algorithm")],
)
def test_a_class_that_is_no_whole_algorithm_is_refused(family: Site, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        bind(family.load(), "algorithm", name)


METHODS = {
    "forward_loss(self, draft, bacth)": "forward_loss has no argument 'bacth' (did you mean 'batch'?)",
    "forward_los(self, draft)": "unknown hook 'forward_los' (did you mean 'forward_loss'?)",
    "drafters(self, draft)": "unknown hook 'drafters' (did you mean 'drafter'?)",
}


@pytest.mark.parametrize(("method", "says"), METHODS.items(), ids=METHODS)
def test_a_wrong_method_is_named_before_its_class_is_imported(
    site: Site, method: str, says: str
) -> None:
    head = "class Heads(Lazy):\n"
    wrong = CLASSES.replace(head, f"{head}        def {method}: ...\n")
    site.module("fake_family_classes", wrong)
    site.plugin("family", FAMILY)
    assert says in site.judged("family").problem
    with pytest.raises(UsageError, match=re.escape(says)):
        bind(site.load(), "algorithm", "tied")
    assert "fake_family_classes" not in sys.modules


def test_a_wrong_method_that_is_inherited_is_named_when_its_class_is_bound(family: Site) -> None:
    family.module("fake_base", CLASSES.replace("batch, context", "ctx"))
    family.module("fake_family_classes", "from fake_base import *\nclass Lazy(Heads): ...")
    assert family.judged("family").state == "ready"
    with pytest.raises(
        UsageError, match=r"Lazy: forward_loss has no argument 'ctx' .did you mean 'context'"
    ):
        bind(family.load(), "algorithm", "lazy")


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("None", "returned None, and that does not fit: it is None, not StepOutput"),
        ("7", "returned a int, and that does not fit: it is a int, not StepOutput"),
        ("StepOutput(1, one, {})", "[0][0] is a int, not Tensor"),
        ("StepOutput(terms=[(one, one, 1.0)] * 2, counts=7)", "its counts is a int, not coll"),
        ("StepOutput(one, one, {'acc': 0.5})", "its counts['acc'] is a float, not tuple[torch.Ten"),
        ("StepOutput(one, one, {'acc': (one, 2)})", "its counts['acc'][1] is a int, not Tensor"),
        ("StepOutput(one, one, {'acc': (one,)})", "its counts['acc'] has 1 parts, not 2"),
    ],
)
def test_what_does_not_fit_the_contract_is_named_with_hook_and_plugin(
    site: Site, returned: str, says: str
) -> None:
    source = f"""
        import torch
        from draftcore.contracts.algorithm import StepOutput
        one = torch.ones(())
        @hookimpl
        def describe(): return [Offer("algorithm", "mine")]
        @hookimpl
        def feature_request(): ...
        @hookimpl
        def build_draft(): ...
        @hookimpl
        def collate(): ...
        @hookimpl
        def forward_loss(options):
            assert options is None
            return {returned}
    """
    site.plugin("mine", source)
    bound: Any = bind(site.load(), "algorithm", "mine")
    with pytest.raises(DraftcoreError) as caught:
        bound.hook.forward_loss(draft=None, batch=None, context=None, options=bound.options)
    first, remedy = str(caught.value).splitlines()
    assert "the hook forward_loss of mine " in first
    assert says in first
    assert remedy.strip().startswith("draftcore hooks forward_loss")
