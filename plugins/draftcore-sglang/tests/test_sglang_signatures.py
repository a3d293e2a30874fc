"""A sglang that moved is refused by name, by whatever of this dist is asked to use it.

Its launcher's flags may move too: those that our READMEs tell people to type are looked up.
"""

import argparse
import functools
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftcore_sglang import internals
from draftcore_sglang.internals import disagg, server
from draftcore_sglang.internals.signatures import require_sglang

from draftcore.errors import UsageError

pytestmark = pytest.mark.sglang
USED = {"capture": internals.SIGNATURES, "server": server.SIGNATURES, "disagg": disagg.SIGNATURES}
NAMES = [(use, name) for use, signatures in USED.items() for name in signatures]


@pytest.mark.smoke
@pytest.mark.parametrize("use", USED)
def test_the_sglang_that_is_installed_is_as_tested(use: str) -> None:
    require_sglang(USED[use])


def takes(parameters: str) -> Callable[..., Any]:
    made: dict[str, Any] = {}
    exec(f"def other({parameters}): ...", made)
    return made["other"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("use", "name"), NAMES)
def test_what_moved_is_named(monkeypatch: pytest.MonkeyPatch, use: str, name: str) -> None:
    """Gone, and with a parameter more, given or not."""
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    owner: Any = functools.reduce(getattr, owners, pkgutil.resolve_name(module))
    given = ", ".join(inspect.signature(getattr(owner, last)).parameters)
    more = [takes(f"new, {given}".strip(", ")), takes(f"{given}, new=None".strip(", "))]
    for replacement in more:
        with monkeypatch.context() as patch:
            patch.setattr(
                owner, last, staticmethod(replacement) if inspect.isclass(owner) else replacement
            )
            with pytest.raises(UsageError, match="new") as caught:
                require_sglang(USED[use])
            assert name in str(caught.value)
    with monkeypatch.context() as patch:
        patch.delattr(owner, last)
        with pytest.raises(UsageError) as caught:
            require_sglang(USED[use])
        assert name in str(caught.value)


def test_a_server_whose_sglang_moved_takes_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of each is behind the check."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = dict(HookRegistry._hooks)
    monkeypatch.setattr(HookRegistry, "register", staticmethod(takes("target, hook")))
    with pytest.raises(UsageError, match=r"HookRegistry\.register\(target, hook\)"):
        server.install("shm:none", (), 1 << 20)
    assert HookRegistry._hooks == before


# What stands in the same pages for other programs.
OTHERS = {
    "--no-deps", "--role", "--target", "--plan", "--speculative-config", "--server", "--prompts",
    "--run", "--device", "--json", "--row", "--steps", "--minutes", "--lr", "--draft",
}  # fmt: skip


def test_every_flag_that_our_readmes_give_is_one_of_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    pages = [*Path(__file__).parents[3].glob("plugins/*/README.md")]
    pages = [page for page in pages if "sglang" in page.read_text()]
    assert len(pages) > 3
    named = {
        flag for page in pages for flag in re.findall(r"(?<![-\w])--[a-z][a-z-]+", page.read_text())
    }
    assert len(named - OTHERS) > 12
    assert named - OTHERS - known == set()
