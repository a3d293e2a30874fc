"""What keeps the kernel a kernel: its size, what it imports, and whom it has never heard of."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftcore

CORE = Path(draftcore.__file__).parent
ROOT = CORE.parent
KERNEL = ("hookspecs", "offers", "records", "plugins", "binding", "config", "cli")
HELPERS = (
    "__init__",
    "errors",
    "explain",
    "dists",
    "graphs/__init__",
    "graphs/config",
    "listing",
    "overrides",
    "uris",
)  # all else the kernel may import
HEAVY = ("torch", "transformers", "numpy", "pydantic", "rich", "yaml")
KNOWN_PLUGINS = ("eagle3", "dflash", "domino", "mooncake", "sglang", "cudagraph", "redis")


def read(name: str) -> ast.AST:
    return ast.parse((CORE / f"{name}.py").read_text())


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the modules imported at run time, inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node)


def plugin_names() -> set[str]:
    """The names of our own plugins, entry points and offers alike, read from their metadata."""
    names = set(KNOWN_PLUGINS)
    for file in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        names |= {project["name"], project["name"].replace("-", "_")}
        names |= project["entry-points"]["draftcore"].keys()
    return names - {"tools"}  # an ordinary word, in chat templates for one; its dist is searched


def test_the_kernel_has_at_most_1200_lines() -> None:
    lines = {name: len((CORE / f"{name}.py").read_text().splitlines()) for name in KERNEL}
    assert sum(lines.values()) <= 1200, lines


@pytest.mark.parametrize("name", [*KERNEL, *HELPERS])
def test_the_kernel_reaches_into_nothing_that_stands_on_it(name: str) -> None:
    imported = {tuple(module.split(".")) for module in imports(read(name))}
    modules = {file.stem for file in CORE.iterdir()}
    ours = {path[1:] for path in imported if path[0] == "draftcore" and path[1:2] != ()}
    allowed = {tuple(helper.split("/")) for helper in (*KERNEL, *HELPERS)}
    beyond = {path for path in ours if not {path[:1], path[:2]} & allowed and path[0] in modules}
    assert not beyond
    assert "torch" not in {path[0] for path in imported}


def test_no_plugins_name_occurs_in_the_core() -> None:
    names = "|".join(sorted(map(re.escape, plugin_names())))
    pattern = re.compile(rf"(?<![a-z0-9])({names})(?![a-z0-9])", re.IGNORECASE)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted([*CORE.rglob("*.py"), *CORE.rglob("*.txt")])
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("verb", ["list-plugins", "hooks", "--help"])
def test_looking_around_imports_nothing_heavy(verb: str) -> None:
    """Counts the plugins installed in this environment too: theirs must not either."""
    code = (
        "import sys, contextlib, draftcore.cli\n"
        f"with contextlib.suppress(SystemExit): draftcore.cli.main([{verb!r}])\n"
        "print('modules', *sys.modules)"
    )
    run = [sys.executable, "-c", code]
    output = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    modules = set(output.splitlines()[-1].split())
    assert "draftcore.plugins" in modules
    assert not modules & set(HEAVY)
