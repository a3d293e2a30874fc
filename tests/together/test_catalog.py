"""The catalog, which errors name dists from, says what our dists really offer."""

import tomllib
from collections import defaultdict
from pathlib import Path

from draftcore.plugins import catalog
from draftcore.plugins.registry import load_plugins, register

PLUGINS = Path(__file__).parents[2] / "plugins"
OURS = {f.parents[1].name for f in PLUGINS.glob("*/draftcore_*/plugin.py")}  # draftcore-nn has none


def test_the_catalog_has_every_offer_and_verb_of_our_dists_and_no_other() -> None:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for plugin in (plugin for plugin in load_plugins().ready if plugin.dist in OURS):
        for offer in plugin.offers:
            found[offer.kind][offer.name] = plugin.dist
        for verbs in register([plugin]).hook.commands():
            found["verb"] |= {str(verb.name): plugin.dist for verb in verbs}
    assert {dist for dists in found.values() for dist in dists.values()} == OURS
    text = Path(catalog.__file__).with_name("catalog.toml").read_text()
    assert tomllib.loads(text) == found
