"""Fake distributions on disk: real metadata and real modules, no mocks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import pytest

import draftcore
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import Registry, load_plugins
from draftcore.plugins.specs import NEEDED, SPECS

HEADER = """\
from draftcore import hookimpl
from draftcore.contracts.offers import Offer

class Opened(str):  # a text that has the members of a store
    put = put_many = get = get_many = lookup = free = abort = stats = close = uri = None

"""
STORE = """
    @hookimpl
    def describe():
        return [Offer("store", "NAME")]

    @hookimpl
    def feature_store(name, uri):
        return Opened(f"{name} at {uri}")
"""


class Site:
    """A folder like site-packages, with what pip would have written into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str, source: str, folder: Path | None = None) -> Path:
        """Write a module; hookimpl and Offer are imported for it."""
        file = (folder or self.folder) / f"{name}.py"
        file.write_text(HEADER + dedent(source))
        return file

    def loose(self, name: str, source: str) -> Path:
        """Write a one-file plugin beside the site."""
        return self.module(name, source, self.folder.parent)

    def metadata(
        self,
        dist: str,
        entry_points: Mapping[str, str],
        *,
        version: str = "0.1",
        requires: Sequence[str] = (),
        kinds: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Path:
        """Write a dist-info folder; `kinds` of offers are brought by modules of hooks."""
        info = (folder or self.folder) / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {dist}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = {"draftcore": entry_points, "draftcore.hooks": kinds or {}}
        text = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in groups.items()
        )
        (info / "entry_points.txt").write_text(text)
        return info

    def plugin(self, name: str, source: str, *, requires: Sequence[str] = ()) -> None:
        """Install the dist draftcore-NAME with the plugin NAME in the module fake_NAME."""
        self.module(f"fake_{name}", source)
        self.metadata(f"draftcore-{name}", {name: f"fake_{name}"}, requires=requires)

    def store(self, name: str) -> None:
        """Install a good plugin that offers the store NAME."""
        self.plugin(name, STORE.replace("NAME", name))

    def core(self, version: str = "0.4.2") -> None:
        """Install draftcore itself in this version, with one built-in plugin, a module of its own."""
        (self.folder / "draftcore").mkdir(exist_ok=True)
        self.module("fake_builtin", STORE.replace("NAME", "builtin"), self.folder / "draftcore")
        self.metadata("draftcore", {"builtin": "draftcore.fake_builtin"}, version=version)

    def load(self, files: Sequence[Path] = (), *more: Path) -> Registry:
        return load_plugins(files=files, path=[str(self.folder), *map(str, more)])

    def judged(self, name: str) -> Plugin:
        """Load everything and return what became of one plugin."""
        (plugin,) = [plugin for plugin in self.load().plugins if plugin.name == name]
        return plugin


@pytest.fixture
def kinds() -> Iterator[None]:
    """Take away again what kinds of offers a test brings."""
    needed, brought = dict(NEEDED), list(SPECS)
    yield
    NEEDED.clear()
    NEEDED.update(needed)
    SPECS[:] = brought


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: None) -> Iterator[Site]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    # What pip lines say depends on where the core is from; here it is a release, whatever it is.
    released = Site(tmp_path / "released").metadata("draftcore", {}, version=version("draftcore"))
    (released / "entry_points.txt").unlink()
    monkeypatch.setattr(sys, "path", [str(folder), str(released.parent), *sys.path])
    own = [*draftcore.__path__, str(folder / "draftcore")]
    monkeypatch.setattr(draftcore, "__path__", own)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
