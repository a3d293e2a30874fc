"""Which dist's files name another dist's package: read from the syntax trees of all of them."""

import ast
import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTSIDE = {"draftcore_medusa", "draftcore_mlpspec", "draftcore_tinylm"}
ALGORITHMS = {"draftcore_eagle3", "draftcore_dflash", "draftcore_domino", *OUTSIDE}
FOLDERS = [*ROOT.glob("plugins/*/"), *ROOT.glob("examples/plugins/*/")]
PACKAGES = {ROOT: "draftcore"} | {
    folder: folder.name.replace("-", "_")
    for folder in FOLDERS
    if (folder / "pyproject.toml").exists()
}


def ours(requirements: list[str]) -> set[str]:
    names = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requirements}
    return {name for name in names if name.startswith("draftcore")}


def named(folder: Path) -> set[str]:
    """The packages of ours that files import, anywhere in them, or name as in `package.module`."""
    names = set()
    for node in chain(*(ast.walk(ast.parse(f.read_text())) for f in folder.rglob("*.py"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"\bdraftcore_\w+", node.value))
    return {name.partition(".")[0] for name in names} & set(PACKAGES.values())


def test_a_dist_names_only_packages_that_it_requires() -> None:
    """And its tests those of its group `test` besides. The core requires, and names, none.

    What an extra of a dist brings counts: a module of its own may need it, as `served` does; the core's are
    names for pip. Of the algorithms only DFlash is known to another dist, and that is Domino.
    """
    known = set()
    for folder, package in PACKAGES.items():
        data = tomllib.loads((folder / "pyproject.toml").read_text())
        extras = data["project"].get("optional-dependencies", {}).values() if folder != ROOT else ()
        required = ours([*data["project"]["dependencies"], *chain(*extras)]) | {package}
        assert named(folder / package) <= required, package
        if folder == ROOT:
            assert required == {package}
            continue
        assert named(folder / "tests") <= required | ours(data["dependency-groups"]["test"]), (
            package
        )
        known |= {(one, package) for one in named(folder / package) & ALGORITHMS - {package}}
    assert known == {("draftcore_dflash", "draftcore_domino")}


def test_the_examples_took_no_line_outside_their_folders() -> None:
    """Not in code, not in configuration: whatever runs, builds or checks has no word of them."""
    kinds = ("*.py", "*.toml", "*.txt", "*.yaml", "*.json")
    folders = [ROOT / name for name in ("draftcore", "plugins", "benchmarks")]
    files = [file for kind in kinds for folder in folders for file in folder.rglob(kind)]
    files += [file for kind in kinds for file in ROOT.glob(kind)]
    assert len(files) > 50
    named = re.compile("draftcore.(medusa|mlpspec|tinylm)")
    assert not [file for file in files if named.search(file.read_text())]
