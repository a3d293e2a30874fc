"""docs/hooks.md says of every hook what the contract says: name, order, signature, who answers."""

import re
from pathlib import Path

import pytest

from draftcore.listing import hooks_data
from draftcore.plugins.registry import Registry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^### (\w+)\n\n```\n(.*?)\n```\n\n(.*?)(?=^##|\Z)", PAGE, re.S | re.M)
HOOKS = hooks_data(Registry(()))["hooks"]


def test_the_page_has_every_hook_and_no_other() -> None:
    assert sorted(name for name, _, _ in SECTIONS) == sorted(hook["name"] for hook in HOOKS)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["name"])
def test_signature_and_meaning_are_those_of_the_contract(hook: dict[str, str]) -> None:
    (section,) = [section for section in SECTIONS if section[0] == hook["name"]]
    assert section[1] == hook["signature"]
    assert len(section[2].split()) >= 5


def test_observers_are_called_on_all_and_nothing_else_is() -> None:
    """The page says of its last part, of `describe` and of `commands` that all plugins are called."""
    part = PAGE[PAGE.index("## Observers") :]
    for hook in HOOKS:
        everybody = f"### {hook['name']}\n" in part or hook["name"] in ("describe", "commands")
        assert (hook["result"] == "all") == everybody, hook["name"]


def test_every_capability_that_a_suite_asks_for_is_explained() -> None:
    suites = ROOT / "plugins" / "draftcore-sdk" / "draftcore_sdk"
    text = "".join(file.read_text() for file in suites.glob("*.py"))
    asked = set(re.findall(r'\brequire(?:_absent)?\(\s*"([a-z_-]+)"', text))
    assert {"shared", "durable"} <= asked
    assert {name for name in asked if f"`{name}`" not in PAGE} == set()
