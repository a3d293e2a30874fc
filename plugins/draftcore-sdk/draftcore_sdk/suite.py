"""What all conformance suites share, and how they reach the plugin under test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote

import pytest

from draftcore.contracts.offers import Kind, Offer
from draftcore_sdk.internals import Binding, Plugin, Registry, bind, bring_kinds
from draftcore_sdk.limits import LIMIT, Limit

OURS = "draftcore_sdk."
# Tensors are tiny here: threads are no use, and spinning ones slow down whoever wants the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ.update(ONE_THREAD)
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)
HOOKS = {"store": "feature_store", "graph": "graph_backend", "graph-plugin": "graph_plugin"}
HOOKS |= {"images": "image_processor"}
T = TypeVar("T")


def once(test: T) -> T:
    """Mark a standard test that runs with one set of options: the first of an offer's `examples`.

    As slow ones do. Where an offer has none, those are the suite's own options.
    """
    vars(test)["once"] = True
    return test


class Suite:
    """What all suites share: a subclass says which plugin, which of its offers, which options.

    A standard test that cannot hold is switched off with `pytest.mark.xfail(reason=...)` above an
    override that calls it; overriding it with less raises TypeError where the class is made.
    """

    plugin: ClassVar[str]  # its module, or module:instance; behind it those of wrappers around it
    name: ClassVar[str] = ""  # the offer under test; the plugin's only one of the kind if empty
    options: ClassVar[Mapping[str, Any]] = {}  # the offer's options, as in a run's YAML
    loose: ClassVar[Path | None] = None  # the file of a plugin that is not installed
    limit: ClassVar[float] = LIMIT  # seconds of a test on a quiet machine; of engines more
    began: ClassVar[dict[str, Any]] = {}  # the process's switches before the plugin's first use

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__.startswith(OURS):
            return
        standard = [base for base in cls.__mro__ if base.__module__.startswith(OURS)]
        tests = {name for base in standard for name in vars(base) if name.startswith("test_")}
        for test in sorted(tests):
            # The class that answers may be a mixin to the left of the suite.
            owner = next(base for base in cls.__mro__ if test in vars(base))
            if owner not in standard and not _excused(vars(owner)[test]):
                raise TypeError(
                    f"{owner.__name__}.{test} replaces a standard test\n"
                    "  a test that cannot hold is marked: @pytest.mark.xfail(reason=...) above an "
                    f"override that calls super().{test}(...)"
                )

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def time_of_suite(cls, request: pytest.FixtureRequest) -> Iterator[Limit]:
        limit = Limit(request.config)
        limit.start(cls.limit)
        if memory := sys.modules.get("draftcore_sdk.memory"):
            cls.began = {name: memory.of_the_process()[name] for name in memory.SWITCHES}
        yield limit
        limit.stop()

    @pytest.fixture(autouse=True)
    def time_of_test(self, time_of_suite: Limit) -> Iterator[None]:
        if time_of_suite.ended:
            pytest.skip(f"not tested, as {time_of_suite.ended} had no end")
        time_of_suite.start(self.limit)
        yield
        time_of_suite.start(self.limit)  # for what the next test shares with others

    def open(self, kind: Kind, **given: Any) -> Any:
        """Open the offer under test."""
        return opened(self.plugin, kind, self.name, self.options, **given)

    def said(self, kind: Kind, prefix: str) -> list[str]:
        """What the offer says by its capabilities PREFIX:NAME."""
        words = sorted(offer_of(self.plugin, kind, self.name).capabilities)
        return [word.removeprefix(prefix) for word in words if word.startswith(prefix)]


def _excused(test: Any) -> bool:
    marks = getattr(test, "pytestmark", ())
    return any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)


def slow(test: T) -> T:
    """Mark a standard test that takes long: it is announced, and `check-plugin --quick` leaves it out."""
    vars(test)["slow"] = True
    return test


def registry_of(plugin: str) -> Registry:
    """Return a registry of a plugin, and of the wrappers behind it, given as in their entry points."""
    bring_kinds()
    return Registry([Plugin(one, one, "0", one) for one in plugin.split()])


def offer_of(plugin: str, kind: Kind, name: str) -> Offer:
    """Return what a plugin says of one thing it offers, the only one of its kind for name ''.

    The test fails if it offers no such.
    """
    offers = registry_of(plugin).named(plugin.split()[0]).offers
    same = [offer for offer in offers if offer.kind == kind and name in ("", offer.name)]
    if len(same) == 1:
        return same[0]
    shown = ", ".join(f"{offer.kind} {offer.name}" for offer in offers) or "nothing"
    asked = f"{kind} named {name!r}" if name else f"one {kind}"
    pytest.fail(f"plugin {plugin} does not offer {asked}; it offers: {shown}")


def bound(
    plugin: str, kind: Kind, name: str = "", options: Mapping[str, Any] = MappingProxyType({})
) -> Binding:
    """Bind what a plugin offers with options as in a run's YAML, as a run does; '' is its only one."""
    owner, *wrappers = plugin.split()
    offer = offer_of(plugin, kind, name)
    return bind(registry_of(plugin), kind, offer.name, options, wrappers, owner)


def opened(plugin: str, kind: Kind, name: str, data: Mapping[str, Any], **given: Any) -> Any:
    """Open what a plugin offers through its hook, as a run does; the only one of its kind for ''."""
    binding = bound(plugin, kind, name, data)
    if kind not in ("store", "channel", "source", "images", "prompts"):
        given["options"] = binding.options
    return getattr(binding.hook, HOOKS.get(kind, kind))(name=binding.offer.name, **given)


def path_of(uri: str) -> Path | None:
    """Return the path that a URI names, if it does."""
    text = uri.partition(":")[2].partition("?")[0]
    path = Path(unquote(text))
    return path if path.is_absolute() and not text.startswith("//") else None


def hash_as_elsewhere(plugin: str, patch: pytest.MonkeyPatch) -> None:
    """Let a plugin's modules hash texts as another process does; numbers are the same in all."""

    def elsewhere(value: object) -> int:
        return hash((value, "elsewhere") if {"'", '"'} & {*repr(value)} else value)

    packages = {one.partition(":")[0].partition(".")[0] for one in plugin.split()}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in packages:
            patch.setattr(module, "hash", elsewhere, raising=False)


def child_environment() -> dict[str, str]:
    """Let a child import what this process can, such as a plugin next to the tests, on one thread."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path)}
