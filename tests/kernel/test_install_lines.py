"""Errors name what brings the missing dist: by its name, or by folders where the core is from a checkout."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from draftcore.errors import UsageError
from draftcore.plugins.registry import load_plugins

if TYPE_CHECKING:
    from tests.kernel.conftest import Site

FOLDERS: Mapping[str, Sequence[str]] = {
    "draftcore-eagle3": ["draftcore-absent>=0.1,<0.2", "torch>=2"],
    "draftcore-absent": ["draftcore>=0.1"],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "our checkout"
    (root / "requirements").mkdir(parents=True)
    (root / "requirements" / "standard.txt").touch()
    for dist, needs in FOLDERS.items():
        (root / "plugins" / dist).mkdir(parents=True)
        text = f"[project]\ndependencies = {json.dumps(needs)}\n"
        (root / "plugins" / dist / "pyproject.toml").write_text(text)
    return root


def last_line(site: Site, kind: Any, name: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_plugins(path=[str(site.folder)]).find(kind, name)
    return str(caught.value).splitlines()[-1].strip()


def test_a_release_is_completed_by_names(site: Site) -> None:
    site.metadata("draftcore", {}, version="0.4.2")
    assert last_line(site, "algorithm", "eagle3") == "pip install draftcore-eagle3"
    assert last_line(site, "target", "hf") == "pip install 'draftcore[standard]'"
    said = r"no observer 'wandb'\n.*\n  pip install draftcore-trackers$"
    with pytest.raises(UsageError, match=said):
        load_plugins(path=[str(site.folder)]).extras(["wandb"])


@pytest.mark.parametrize("editable", [False, True])
def test_a_checkout_is_completed_by_its_folders(site: Site, checkout: Path, editable: bool) -> None:
    core = site.metadata("draftcore", {}, version="0.4.2")
    origin = {"url": checkout.as_uri(), "dir_info": {"editable": editable}}
    (core / "direct_url.json").write_text(json.dumps(origin))
    there = f"cd {shlex.quote(str(checkout))} && pip install"
    lacking = "plugins/draftcore-eagle3 plugins/draftcore-absent"
    assert last_line(site, "algorithm", "eagle3") == f"{there} {lacking}"
    assert last_line(site, "target", "hf") == f"{there} -r requirements/standard.txt"
    # It has no such folder.
    assert last_line(site, "store", "mooncake") == "pip install draftcore-mooncake"
    site.plugin("bad", "import surely_missing")
    with pytest.raises(UsageError, match=r"\n  pip install surely_missing$"):
        load_plugins(path=[str(site.folder)]).named("bad")


def test_a_folder_that_is_no_checkout_of_ours_is_never_named(site: Site, tmp_path: Path) -> None:
    core = site.metadata("draftcore", {}, version="0.4.2")
    (core / "direct_url.json").write_text(json.dumps({"url": tmp_path.as_uri(), "dir_info": {}}))
    assert last_line(site, "target", "hf") == "pip install 'draftcore[standard]'"
