"""What a dist imports of ours is public (docs/compatibility.md), or of a dist that it requires."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import draftcore

ROOT = Path(__file__).parents[2]
OURS = {file.parent.name: file.parent for file in sorted(ROOT.glob("plugins/*/pyproject.toml"))}
EXAMPLES = {
    file.parent.name: file.parent for file in ROOT.glob("examples/plugins/*/pyproject.toml")
}
DISTS = {**OURS, **EXAMPLES}
PUBLIC = {
    *("errors", "files", "options", "progress", "stopping", "tensors", "uris"),
    "contracts",
}
# The one file that may reach further: the kit tries what the core does with plugins.
INSIDE = ROOT / "plugins" / "draftcore-sdk" / "draftcore_sdk" / "internals.py"
ALGORITHMS = {f"draftcore_{name}" for name in ("eagle3", "dflash", "domino")}


@cache
def named(file: Path) -> tuple[set[str], set[str]]:
    """Return the modules of ours that a file imports, with what it takes of `draftcore`, and the

    packages of ours that its strings name, as in `package.module:Class`.
    """
    modules, packages = set[str](), set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            inner = {f"draftcore.{alias.name}" for alias in node.names}
            modules |= inner if node.module == "draftcore" else {str(node.module)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            packages |= set(re.findall(r"\bdraftcore_\w+", node.value))
    return {name for name in modules if re.match(r"draftcore(_\w+)?(\.|$)", name)}, packages


def project_of(dist: str) -> dict[str, Any]:
    return tomllib.loads((DISTS[dist] / "pyproject.toml").read_text())


def packages_of(lines: list[str]) -> set[str]:
    """Return the packages of ours that requirements name, whatever these require in turn."""
    names = {re.split(r"[^\w-]", line)[0] for line in lines} & DISTS.keys()
    deeper = (packages_of(project_of(name)["project"]["dependencies"]) for name in names)
    return {name.replace("-", "_") for name in names}.union(*deeper)


def files_of(dist: str) -> Iterator[Path]:
    yield from (DISTS[dist] / dist.replace("-", "_")).rglob("*.py")


def public(module: str, packages: set[str]) -> bool:
    package, _, rest = module.partition(".")
    if package != "draftcore":
        return package in packages
    parts = rest.split(".")
    return rest in ("", *draftcore.__all__) or any(
        ".".join(parts[:count]) in PUBLIC for count in range(1, len(parts) + 1)
    )


@pytest.mark.parametrize("dist", DISTS)
def test_a_dist_imports_what_is_public_and_names_what_it_requires(dist: str) -> None:
    """Its strings may name what an extra brings besides, and its tests what their group does."""
    project, own = project_of(dist), dist.replace("-", "_")
    required = packages_of(project["project"]["dependencies"]) | {own}
    modules = set[str]().union(*(named(file)[0] for file in set(files_of(dist)) - {INSIDE}))
    assert modules
    assert {name for name in modules if not public(name, required)} == set()
    extras = project["project"].get("optional-dependencies", {}).values()
    known = {name.replace("-", "_") for name in DISTS}
    allowed = required.union(*map(packages_of, extras))
    assert set[str]().union(*(named(file)[1] for file in files_of(dist))) & known <= allowed
    allowed |= packages_of(project["dependency-groups"]["test"])
    for file in (DISTS[dist] / "tests").rglob("*.py"):
        packages = {name.partition(".")[0] for name in named(file)[0]} | named(file)[1]
        assert packages & known <= allowed, file


def test_of_the_algorithms_dflash_alone_is_known_to_another_dist_which_is_domino() -> None:
    known = {
        (package, dist)
        for dist in DISTS
        for file in files_of(dist)
        for package in {name.partition(".")[0] for name in named(file)[0]} | named(file)[1]
        if package in ALGORITHMS - {dist.replace("-", "_")}
    }
    assert known == {("draftcore_dflash", "draftcore-domino")}


def test_the_examples_took_no_line_outside_their_folders() -> None:
    """Not in code, not in configuration: whatever runs, builds or checks has no word of them."""
    kinds = ("*.py", "*.toml", "*.txt", "*.yaml", "*.json")
    folders = [ROOT / name for name in ("draftcore", "plugins", "benchmarks")]
    files = [file for kind in kinds for folder in folders for file in folder.rglob(kind)]
    files += [file for kind in kinds for file in ROOT.glob(kind)]
    assert len(files) > 50
    names = "|".join(name.removeprefix("draftcore-") for name in EXAMPLES)
    assert not [f for f in files if re.search(f"draftcore.({names})", f.read_text())]
