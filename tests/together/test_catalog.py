"""The catalog, which gives our dists their names, says what they really offer."""

import tomllib
from collections import defaultdict
from pathlib import Path

from draftcore.plugins import catalog
from draftcore.plugins.registry import load_plugins

PLUGINS = Path(__file__).parents[2] / "plugins"
OURS = {f.parents[1].name for f in PLUGINS.glob("*/draftcore_*/plugin.py")}  # draftcore-nn has none


def test_the_catalog_has_every_offer_kind_and_verb_of_our_dists_and_no_other() -> None:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for plugin in (p for p in load_plugins().ready if p.dist in {"draftcore", *OURS}):
        for offer in plugin.offers:
            found[offer.kind][offer.name] = plugin.dist
        found["kind"] |= dict.fromkeys(plugin.kinds, plugin.dist)
    assert {dist for dists in found.values() for dist in dists.values()} == {"draftcore", *OURS}
    listed = tomllib.loads(Path(catalog.__file__).with_name("catalog.toml").read_text())
    defaults = listed.pop("defaults")
    assert listed == found
    assert [kind for kind, name in defaults.items() if name not in listed[kind]] == []
