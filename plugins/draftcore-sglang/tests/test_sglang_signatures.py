"""A sglang that moved is refused by name, by whatever of this dist is asked to use it.

Its launcher's flags may move too: those that our READMEs tell people to type are looked up.
"""

import argparse
import re
from pathlib import Path

import pytest
from draftcore_sglang import internals
from draftcore_sglang.internals import disagg, server
from draftcore_sglang.internals.signatures import require_sglang

from draftcore.errors import UsageError

pytestmark = pytest.mark.sglang
USED = {"capture": internals.SIGNATURES, "server": server.SIGNATURES, "disagg": disagg.SIGNATURES}


@pytest.mark.smoke
@pytest.mark.parametrize("use", USED)
def test_the_sglang_that_is_installed_is_as_tested(use: str) -> None:
    require_sglang(USED[use])


def test_a_server_whose_sglang_moved_takes_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of each is behind the check."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = dict(HookRegistry._hooks)
    monkeypatch.setattr(HookRegistry, "register", staticmethod(lambda target, hook: None))
    with pytest.raises(UsageError, match=r"HookRegistry\.register\(target, hook\)"):
        server.install("shm:none", (), 1 << 20)
    assert HookRegistry._hooks == before


# What stands in the same pages for other programs.
OTHERS = {
    "--target", "--speculative-config", "--server", "--prompts",
    "--run", "--device", "--json", "--row", "--steps", "--minutes", "--lr", "--draft", "--only",
    "--shm-size",
}  # fmt: skip


def test_every_flag_that_our_readmes_give_is_one_of_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    pages = [*Path(__file__).parents[3].glob("plugins/*/README.md")]
    pages = [page for page in pages if "sglang.launch_server" in page.read_text()]
    assert len(pages) > 3
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"(?<![-\w])--[a-z][a-z-]+", text)) - OTHERS
    assert len(named) > 12
    assert named - known == set()
