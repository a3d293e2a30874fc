"""Which dist's files name another dist's package: read from the syntax trees of all of them."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALGORITHMS = {"draftcore_eagle3", "draftcore_dflash", "draftcore_domino", "draftcore_medusa"}
Named = dict[str, set[str]]


def projects() -> Iterator[tuple[Path, str, set[str], set[str]]]:
    """Yield each dist's folder, its package, and the packages of ours that it and its tests require.

    What an extra brings counts: a module of its own may need it, as `served` does.
    """
    patterns = ("pyproject.toml", "plugins/*/pyproject.toml", "examples/plugins/*/pyproject.toml")
    for file in (file for pattern in patterns for file in sorted(ROOT.glob(pattern))):
        data = tomllib.loads(file.read_text())
        project, tests = data["project"], data.get("dependency-groups", {}).get("test", [])
        extras = project.get("optional-dependencies", {}).values()
        required = ours([*project["dependencies"], *chain(*extras)])
        yield file.parent, project["name"].replace("-", "_"), required, required | ours(tests)


def ours(requirements: list[str]) -> set[str]:
    names = {re.split(r"[^\w-]", line)[0] for line in requirements}
    return {name.replace("-", "_") for name in names if name.startswith("draftcore")}


def packages_named(file: Path) -> set[str]:
    """The packages of ours that a file imports, anywhere in it, or names as in `package.module`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"\bdraftcore_\w+", node.value))
    return {name.partition(".")[0] for name in names if name.startswith("draftcore")}


@cache
def named_by_dist(part: str) -> Named:
    """For each dist's package, the packages of ours that its files name; `part` is package or tests."""
    found: Named = defaultdict(set)
    known = {package for _, package, _, _ in projects()}
    for folder, package, _, _ in projects():
        if part == "tests" and folder == ROOT:
            continue
        for file in (folder / (package if part == "package" else "tests")).rglob("*.py"):
            found[package] |= (packages_named(file) & known) - {package}
    return found


def test_a_dist_names_only_packages_that_it_requires() -> None:
    """And its tests those of its group `test` besides. The core requires, and names, none."""
    assert not named_by_dist("package")["draftcore"]
    for _, package, required, required_by_tests in projects():
        assert named_by_dist("package")[package] <= required, package
        assert named_by_dist("tests")[package] <= required_by_tests, package


def test_of_the_algorithms_only_dflash_is_known_to_another_and_only_to_domino() -> None:
    known = {
        algorithm: {
            package for package, named in named_by_dist("package").items() if algorithm in named
        }
        for algorithm in ALGORITHMS
    }
    assert known == {**{one: set() for one in ALGORITHMS}, "draftcore_dflash": {"draftcore_domino"}}
    required = {package: needs for _, package, needs, _ in projects()}
    assert "draftcore_dflash" in required["draftcore_domino"]


def test_the_example_took_no_line_outside_its_folder() -> None:
    """Not in code, not in configuration: whatever runs, builds or checks has no word of it."""
    places = (
        "draftcore",
        "plugins",
        "benchmarks",
        "noxfile.py",
        "pyproject.toml",
        "constraints.txt",
    )
    files = [
        file
        for place in places
        for file in ((ROOT / place).rglob("*") if (ROOT / place).is_dir() else [ROOT / place])
        if file.suffix in (".py", ".toml", ".txt", ".yaml", ".json")
    ]
    assert len(files) > 50
    assert not [file for file in files if re.search("draftcore.medusa", file.read_text())]
