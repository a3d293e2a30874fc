"""The catalog, which errors name dists from, says what our dists really offer."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

import click
import pytest

from draftcore.contracts.offers import Kind
from draftcore.plugins import catalog
from draftcore.plugins.registry import Plugin, load, register

OURS = {folder.name for folder in (Path(__file__).parents[2] / "plugins").glob("draftcore-*")}


@pytest.fixture(scope="module")
def plugins() -> list[Plugin]:
    return [plugin for plugin in load().ready if plugin.dist in OURS]


def test_every_dist_of_ours_is_in_the_catalog_and_no_other() -> None:
    text = Path(catalog.__file__).with_name("catalog.toml").read_text()
    assert set(tomllib.loads(text)) == OURS


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_catalog_has_every_offer(kind: Kind, plugins: list[Plugin]) -> None:
    offers = {o.name: p.dist for p in plugins for o in p.offers if o.kind == kind}
    assert catalog.ours(kind) == offers


def test_the_catalog_has_every_verb(plugins: list[Plugin]) -> None:
    verbs: dict[str, str] = {}
    for plugin in plugins:
        added: list[list[click.Command]] = list(register([plugin]).hook.commands())
        verbs |= {str(verb.name): plugin.dist for some in added for verb in some}
    assert catalog.ours("verb") == verbs


def test_the_catalog_knows_which_stores_are_as_fast_as_memory(plugins: list[Plugin]) -> None:
    offers = [(offer, plugin.dist) for plugin in plugins for offer in plugin.offers]
    fast = {o.name: dist for o, dist in offers if "memory-speed" in o.capabilities}
    assert catalog.ours("store", "memory-speed") == fast
    assert fast
