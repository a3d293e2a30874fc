"""What a dist imports of ours is public (docs/compatibility.md), or of a dist that it requires."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftcore

ROOT = Path(__file__).parents[2]
DISTS = {file.parent.name: file.parent for file in sorted(ROOT.glob("plugins/*/pyproject.toml"))}
PUBLIC = {
    *("errors", "files", "options", "progress", "stopping", "tensors", "uris"),
    "contracts",
}
# The one file that may reach further: the kit tries what the core does with plugins.
INSIDE = ROOT / "plugins" / "draftcore-sdk" / "draftcore_sdk" / "internals.py"


def imported(file: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports, anywhere in it, with what it takes of `draftcore`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = (f"draftcore.{alias.name}" for alias in node.names)
            names = list(inner) if node.module == "draftcore" else [str(node.module)]
        else:
            continue
        yield from (name for name in names if re.match(r"draftcore(_\w+)?(\.|$)", name))


def required(dist: str) -> set[str]:
    """Return the packages of ours that a dist has beside it, its own among them."""
    project = tomllib.loads((DISTS[dist] / "pyproject.toml").read_text())["project"]
    needs = (re.split(r"[^\w-]", line)[0] for line in project["dependencies"])
    others = (required(need) for need in needs if need in DISTS)
    return {dist.replace("-", "_")}.union(*others)


def public(module: str, packages: set[str]) -> bool:
    package, _, rest = module.partition(".")
    if package != "draftcore":
        return package in packages
    parts = rest.split(".")
    return rest in ("", *draftcore.__all__) or any(
        ".".join(parts[:count]) in PUBLIC for count in range(1, len(parts) + 1)
    )


@pytest.mark.parametrize("dist", DISTS)
def test_a_dist_imports_what_is_public_and_what_it_requires(dist: str) -> None:
    packages = required(dist)
    files = set((DISTS[dist] / dist.replace("-", "_")).rglob("*.py")) - {INSIDE}
    assert files
    names = {name for file in files for name in imported(file)}
    assert {name for name in names if not public(name, packages)} == set()
