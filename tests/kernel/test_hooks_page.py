"""docs/hooks.md says of every hook, the core's and our dists', what its specification says: who answers."""

import re
from pathlib import Path

import pytest

from draftcore.listing import hooks_data
from draftcore.plugins.registry import Registry, load_plugins

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^### (\w+)\n\n```\n(.*?)\n```\n\n(.*?)(?=^##|\Z)", PAGE, re.S | re.M)


@pytest.mark.usefixtures("kinds")
def test_the_page_says_of_every_hook_what_the_contract_says() -> None:
    """Its name, signature and who answers: all plugins in the last part, and these two."""
    bringing = Registry(plugin for plugin in load_plugins().installed if plugin.kinds)
    hooks = {hook["name"]: hook for hook in hooks_data(bringing)["hooks"]}
    assert sorted(name for name, *_ in SECTIONS) == sorted(hooks)
    last = PAGE[PAGE.index("## Observers") :]
    for name, signature, text in SECTIONS:
        assert signature == hooks[name]["signature"]
        assert len(text.split()) >= 5, name
        everybody = f"### {name}\n" in last or name in ("describe", "commands")
        assert (hooks[name]["result"] == "all") == everybody, name


def test_every_capability_that_a_suite_asks_for_is_explained() -> None:
    suites = ROOT / "plugins" / "draftcore-sdk" / "draftcore_sdk"
    text = "".join(file.read_text() for file in suites.glob("*.py"))
    asked = set(re.findall(r'\brequire(?:_absent)?\(\s*"([a-z_-]+)"', text))
    assert {"shared", "durable"} <= asked
    assert {name for name in asked if f"`{name}`" not in PAGE} == set()
