"""A dist brings kinds of offers of its own, by hooks that are loaded when one of its kinds is asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from draftcore.errors import DraftcoreError, UsageError
from draftcore.plugins.binding import bind
from tests.kernel.test_cli import invoke
from tests.kernel.test_hooks_page import shown

if TYPE_CHECKING:
    from tests.kernel.conftest import Site

HOOKS = """
    from draftcore import hookspec

    NEEDED = {"tracker": ("tracker",), "store": ()}  # a kind of the core's is not another's to change

    class Specs:
        @hookspec(firstresult=True)
        def tracker(self, name: str) -> str:
            "Open the tracker `name`."

        @hookspec
        def tracked(self, step: int) -> int:
            "Hear of a step."
"""
PLUGIN = """
    @hookimpl
    def describe():
        return [Offer("tracker", "mine")]
    @hookimpl
    def tracker(name):
        return name.upper()
"""


def bring(site: Site, hooks: str = HOOKS, plugin: str = PLUGIN, **more: Any) -> None:
    """Install a dist with a plugin and the kind `tracker`."""
    site.module("fake_hooks", hooks)
    site.module("fake_tracking", plugin)
    points = {"tracking": "fake_tracking"}
    site.metadata("draftcore-tracking", points, kinds={"tracker": "fake_hooks"}, **more)


@pytest.mark.parametrize("way", ["selected", "listed", "shown"])
def test_hooks_that_a_dist_brings_are_loaded_when_their_kind_is_selected_or_listed(
    site: Site, way: str
) -> None:
    site.store("good")
    bring(site)
    registry = site.load()
    bind(registry, "store", "good")
    with pytest.raises(UsageError, match="there is no channel 'tcp'"):
        registry.find("channel", "tcp")
    assert "fake_hooks" not in sys.modules
    if way == "selected":
        bound: Any = bind(registry, "tracker", "mine")
        assert bound.hook.tracker(name="mine") == "MINE"
    elif way == "listed":
        assert "tracker mine" in invoke(site, "list-plugins").output
    else:
        text = shown(site).output
        assert "tracker(name: str) -> str\n  Open the tracker `name`.\n" in text
        assert "one plugin answers; required of every tracker; here: tracking\n" in text
        assert "tracked(step: int) -> int\n  Hear of a step.\n  all plugins are called;" in text
        assert "required of every store; here: good\n" in text
    assert "fake_hooks" in sys.modules


def test_what_a_brought_hook_returns_is_checked_as_the_cores_is(site: Site) -> None:
    bring(site, plugin=PLUGIN.replace("name.upper()", "7"))
    bound: Any = bind(site.load(), "tracker", "mine")
    says = "the hook tracker of tracking .* returned a int, and that does not fit: it is a int, not str"
    with pytest.raises(DraftcoreError, match=says):
        bound.hook.tracker(name="mine")


def test_an_offer_of_a_brought_kind_answers_its_hook(site: Site) -> None:
    bring(site, plugin="@hookimpl\ndef describe():\n    return [Offer('tracker', 'mine')]\n")
    assert site.judged("tracking").problem == "offers the tracker 'mine' without tracker"


@pytest.mark.parametrize("way", ["selected", "listed"])
def test_hooks_that_cannot_be_loaded_break_their_own_plugin_only(
    site: Site, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    site.store("good")
    site.plugin("other", PLUGIN)  # which implements what it does not bring
    bring(site, "print('hello')\n1 / 0")
    registry = site.load()
    if way == "selected":
        with pytest.raises(UsageError) as caught:
            registry.find("tracker", "mine")
        broken = "tracking (draftcore-tracking 0.1): ZeroDivisionError: division by zero"
        assert broken in str(caught.value)
    found = {plugin.name: plugin for plugin in registry.plugins}
    states = {name: plugin.state for name, plugin in found.items()}
    assert states == {"good": "ready", "other": "broken", "tracking": "broken"}
    assert found["tracking"].problem == "ZeroDivisionError: division by zero"
    assert found["tracking"].fix == "python -c 'import fake_hooks'   # shows where it fails"
    assert registry.find("store", "good").name == "good"
    assert shown(site, "feature_store").exit_code == 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("why", ["disabled", "incompatible"])
def test_hooks_of_a_plugin_that_is_not_used_are_not_even_loaded(
    site: Site, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    site.core("0.4.2")
    monkeypatch.setenv("DRAFTCORE_DISABLE", "tracking" if why == "disabled" else "")
    bring(site, requires=["draftcore<0.4"] * (why == "incompatible"))
    with pytest.raises(UsageError, match=f"tracking .draftcore-tracking 0.1. is {why}"):
        site.load().find("tracker", "mine", "tracking")
    assert not {"fake_hooks", "fake_tracking"} & sys.modules.keys()


def test_a_kind_of_ours_is_brought_by_its_owner_alone(site: Site) -> None:
    site.module("fake_hooks", "raise AssertionError('imported')")
    site.module("fake_tracking", PLUGIN)
    site.metadata("thief", {"tracking": "fake_tracking"}, kinds={"channel": "fake_hooks"})
    with pytest.raises(UsageError, match="there is no channel 'mine'"):
        site.load().find("channel", "mine")
    assert site.judged("tracking").problem.startswith("unknown hook 'tracker'")
    assert "fake_hooks" not in sys.modules
