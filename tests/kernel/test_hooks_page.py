"""The verb `hooks` and docs/hooks.md say of every hook, also of those of dists, what is specified."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from draftcore_sdk.hooks import hooks, hooks_data
from draftcore_sdk.plugins import CAPABILITIES

from draftcore.plugins.registry import Registry, load_plugins

if TYPE_CHECKING:
    from tests.kernel.conftest import Site

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^### (\w+)\n\n```\n(.*?)\n```\n\n(.*?)(?=^##|\Z)", PAGE, re.S | re.M)


def shown(site: Site, *arguments: str) -> Result:
    """Run the verb in this process, with no plugins but the site's."""
    return CliRunner().invoke(hooks, arguments, obj=site.load())


@pytest.mark.usefixtures("kinds")
def test_the_page_says_of_every_hook_what_the_contract_says() -> None:
    """Its name, signature and who answers: all plugins in the last part, and these two."""
    bringing = Registry(plugin for plugin in load_plugins().installed if plugin.kinds)
    data = {hook["name"]: hook for hook in hooks_data(bringing)["hooks"]}
    assert sorted(name for name, *_ in SECTIONS) == sorted(data)
    last = PAGE[PAGE.index("## Observers") :]
    for name, signature, text in SECTIONS:
        assert signature == data[name]["signature"]
        assert len(text.split()) >= 5, name
        everybody = f"### {name}\n" in last or name in ("describe", "commands")
        assert (data[name]["result"] == "all") == everybody, name


def test_every_capability_that_a_suite_asks_for_is_explained() -> None:
    suites = ROOT / "plugins" / "draftcore-sdk" / "draftcore_sdk"
    text = "".join(file.read_text() for file in suites.glob("*.py"))
    asked = set(re.findall(r'\brequire(?:_absent)?\(\s*"([a-z_-]+)"', text))
    assert {"shared", "durable"} <= asked
    assert {name for name in asked if f"`{name}`" not in PAGE} == set()
    known = {
        word.replace("sglang:", "SERVER:") for words in CAPABILITIES.values() for word in words
    }
    known |= {re.sub(":.*", ":NAME", word) for word in known}
    table = re.findall(r"^\| (?:algorithm|store|capture|graph)\S* \| (.*?) \|", PAGE, re.MULTILINE)
    explained = {word for words in table for word in re.findall("`(.*?)`", words)}
    assert {"durable", "served:NAME"} <= explained <= known


def test_a_hook_is_shown_with_the_fields_of_its_records(site: Site) -> None:
    text = shown(site, "forward_loss").output
    assert "one plugin answers; required of every algorithm; here: none\n" in text
    for record, field in (("DraftBatch", "loss_mask_BT: Tensor"), ("StepContext", "seed: int")):
        assert f"\n{record}: " in text
        assert f"    {field}\n" in text
    assert "union(other: FeatureRequest) -> FeatureRequest" in shown(site, "feature_request").output
    assert "\nProposal: The drafts of a round" in shown(site, "drafter").output
    assert "(did you mean 'forward_loss'?)" in str(shown(site, "forwrd_loss").exception)


def test_hooks_shows_signature_document_and_who_implements(site: Site) -> None:
    site.store("good")
    text = shown(site).output
    assert "feature_store(name: str, uri: str) -> FeatureStore\n" in text
    assert "one plugin answers; required of every store; here: good\n" in text
    listed = json.loads(shown(site, "--json").output)["hooks"]
    data = {hook["name"]: hook for hook in listed}
    assert data["feature_store"]["plugins"] == ["good"]
    assert data["runner"]["plugins"] == []
    assert all(hook["doc"] and hook["signature"].startswith(hook["name"]) for hook in listed)
