"""Conformance suites for plugin authors: subclass one, name the plugin, and run pytest.

    from draftcore.testing.stores import StoreSuite

    class TestMyStore(StoreSuite):
        plugin = "my_package.plugin"

        @pytest.fixture
        def store_uri(self, tmp_path):
            return f"mine:{tmp_path}"

A suite opens everything through the plugin's hooks, as a run does. A standard test that cannot
hold is switched off with `pytest.mark.xfail(reason=...)`, never by overriding it with less. The
suites need pytest: `pip install draftcore[testing]`.
"""

import importlib
from typing import Any, cast

import pluggy
import pytest

from draftcore.hookspecs import Specs
from draftcore.offers import Kind, Offer

# Asserts in a suite explain themselves as those of a test file do.
pytest.register_assert_rewrite("draftcore.testing.stores", "draftcore.testing.channels")


def hooks_of(plugin: str) -> Specs:
    """Return the hooks of one plugin module, alone in a plugin manager of its own."""
    manager = pluggy.PluginManager("draftcore")
    manager.add_hookspecs(Specs)
    manager.register(importlib.import_module(plugin))
    return cast(Specs, manager.hook)


def offer_of(plugin: str, kind: Kind, name: str) -> Offer:
    """Return what a plugin says of one thing it offers; the test fails if it offers no such."""
    offers = [offer for listed in cast(Any, hooks_of(plugin)).describe() for offer in listed]
    for offer in offers:
        if (offer.kind, offer.name) == (kind, name):
            return cast(Offer, offer)
    shown = ", ".join(f"{offer.kind} {offer.name}" for offer in offers) or "nothing"
    pytest.fail(f"plugin {plugin} offers no {kind} named {name!r}; it offers: {shown}")


def default_options(offer: Offer) -> Any:
    """Return an offer's options with their defaults, or None where it has no options model."""
    module, _, name = offer.options.partition(":")
    return getattr(importlib.import_module(module), name)() if name else None
