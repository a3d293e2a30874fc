"""Installed is not selected: a binding holds its owner and what the run chose, nothing else."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from draftcore.errors import UsageError
from draftcore.plugins.binding import bind, observers

if TYPE_CHECKING:
    from tests.kernel.conftest import Site

WRAPPER = """
    @hookimpl(wrapper=True)
    def feature_store(uri):
        return f"wrapped {yield}"
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
        return [Offer("store", "tuned", frozenset({"durable"}), f"{__name__}_options:Options")]
    @hookimpl
    def feature_store(uri, options):
        return options
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
    binding = bind(site.load(files), "store", name, extras)
    return binding.hook.feature_store(name=name, uri="there", options=None)


def test_a_binding_calls_its_owner_and_no_other_installed_plugin(site: Site) -> None:
    site.store("a")
    site.store("b")
    site.plugin("wrapper", WRAPPER)
    assert open_store(site, "a") == "a at there"


def test_a_selected_wrapper_goes_around_the_owner(site: Site) -> None:
    site.store("a")
    site.plugin("wrapper", WRAPPER)
    assert open_store(site, "a", "wrapper") == "wrapped a at there"


def test_wrappers_nest_in_the_order_of_their_names_however_they_are_chosen(site: Site) -> None:
    site.store("m")
    for name in ("z", "a"):
        site.plugin(name, WRAPPER.replace("wrapped", name))
    results = {open_store(site, "m", "a", "z"), open_store(site, "m", "z", "a")}
    assert results == {"z a m at there"}


def test_a_loose_file_is_selected_without_being_named(site: Site, tmp_path: Path) -> None:
    site.store("a")
    file = tmp_path / "around.py"
    site.module("around", WRAPPER).rename(file)
    assert open_store(site, "a", files=(file,)) == "wrapped a at there"


def test_a_loose_file_with_an_offer_is_chosen_by_that_offer_alone(
    site: Site, tmp_path: Path
) -> None:
    site.store("a")
    file = tmp_path / "my_store.py"
    source = "@hookimpl\ndef describe():\n    return [Offer('store', 'mine')]\n"
    source += "@hookimpl\ndef feature_store(uri):\n    return 'mine'\n"
    site.module("my_store", source).rename(file)
    assert open_store(site, "a", files=(file,)) == "a at there"
    assert open_store(site, "mine", files=(file,)) == "mine"


def test_a_broken_loose_file_fails_the_run_that_asks_for_it(site: Site, tmp_path: Path) -> None:
    site.store("a")
    file = tmp_path / "broken_idea.py"
    file.write_text("1 / 0")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        open_store(site, "a", files=(file,))


def test_two_owners_of_one_hook_are_refused_when_bound(site: Site) -> None:
    site.store("a")
    site.store("b")
    with pytest.raises(UsageError) as caught:
        open_store(site, "a", "b")
    assert "'feature_store' has several owners: a and b" in str(caught.value)
    assert "wrapper=True" in str(caught.value).splitlines()[-1]


def test_an_observer_that_is_not_installed_is_refused(site: Site) -> None:
    site.store("a")
    site.plugin("tracker", OBSERVER)
    with pytest.raises(UsageError, match=r"no plugin 'traker' .did you mean 'tracker'"):
        bind(site.load(), "store", "a", ["traker"])


def test_observers_are_those_selected_and_the_loose_files(site: Site, tmp_path: Path) -> None:
    for name in ("chosen", "idle"):
        site.plugin(name, OBSERVER)
    file = tmp_path / "at_hand.py"
    site.module("at_hand", OBSERVER).rename(file)
    registry = site.load([file])
    observers(registry, ["chosen"]).step_finished(step=3, metrics={})
    seen = {plugin.name: plugin.instance.seen for plugin in registry.plugins}
    assert seen == {"at_hand": [3], "chosen": [3], "idle": []}


def test_an_observer_that_two_plugins_name_is_called_once(site: Site) -> None:
    site.module("fake_twice", "import sys\n" + dedent(OBSERVER) + "me = sys.modules[__name__]\n")
    site.metadata("draftcore-twice", {"one": "fake_twice", "two": "fake_twice:me"})
    registry = site.load()
    observers(registry, ["one", "two"]).step_finished(step=3, metrics={})
    assert registry.named("one").instance.seen == [3]


def test_capabilities_are_those_of_the_offer(site: Site) -> None:
    site.plugin("tuned", WITH_OPTIONS)
    assert bind(site.load(), "store", "tuned").capabilities == {"durable"}


# ------------------------------------------------------------ options


@pytest.fixture
def tuned(site: Site) -> Site:
    site.module("fake_tuned_options", OPTIONS)
    site.plugin("tuned", WITH_OPTIONS)
    return site


def refusal(site: Site, data: dict[str, object]) -> list[str]:
    with pytest.raises(UsageError) as caught:
        bind(site.load(), "store", "tuned").options(data)
    lines = str(caught.value).splitlines()
    assert "store 'tuned', plugin tuned (draftcore-tuned 0.1)" in lines[0]
    return lines[1:]


def test_options_become_the_plugins_own_model(tuned: Site) -> None:
    options = bind(tuned.load(), "store", "tuned").options({"limit_bytes": 9, "pool": {"pages": 2}})
    assert (options.limit_bytes, options.pool.pages) == (9, 2)


def test_an_unknown_option_is_refused_though_the_model_would_ignore_it(tuned: Site) -> None:
    assert refusal(tuned, {"limit_bytes": 1, "limit_byte": 2})[0] == (
        "  limit_byte: unknown key (did you mean 'limit_bytes'?);"
        " there are limit_bytes, pool, pools"
    )


@pytest.mark.parametrize(
    ("options", "path"), [({"pool": {"page": 1}}, "pool"), ({"pools": [{"page": 1}]}, "pools.0")]
)
def test_an_unknown_nested_option_is_compared_with_its_own_section(
    tuned: Site, options: dict[str, object], path: str
) -> None:
    assert refusal(tuned, {"limit_bytes": 1, **options})[0] == (
        f"  {path}.page: unknown key (did you mean 'pages'?); there are pages, page_bytes"
    )


def test_a_missing_and_a_wrong_option_are_both_reported(tuned: Site) -> None:
    lines = refusal(tuned, {"pool": {"pages": "many"}})
    assert lines[0] == "  limit_bytes: is missing"
    assert lines[1].startswith("  pool.pages: ")
    assert lines[1].endswith("not 'many'")


def test_options_for_an_offer_that_has_none_are_refused(site: Site) -> None:
    site.store("plain")
    binding = bind(site.load(), "store", "plain")
    assert binding.options({}) is None
    with pytest.raises(UsageError, match="leave out colour"):
        binding.options({"colour": "red"})


def test_a_model_that_cannot_be_imported_is_reported(site: Site) -> None:
    site.plugin("tuned", WITH_OPTIONS)
    assert refusal(site, {})[0].startswith("  python -c 'import fake_tuned_options'")
