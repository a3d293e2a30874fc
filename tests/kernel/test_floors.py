"""What keeps the house small and in order: sizes, floors, names it must not know; what dists import is

public (docs/compatibility.md), or of a dist that they require; and files are read in one way.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import draftcore

ROOT = Path(__file__).parents[2]
CORE = ROOT / "draftcore"
# From the ground up. A module imports lower floors and its own room (module or package) only.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", ""),  # and the package itself: its two markers
    ("uris", "files", "stopping", "phases", "progress", "tensors"),
    ("contracts", "options"),
    ("plugins",),
    ("config",),
    ("data",),
    ("training",),
    ("features", "listing"),
    ("cli",),
    ("run", "__main__"),
    ("drafts",),
    ("api",),
    ("verbs",),
)
KERNEL = ("contracts", "plugins", "cli", "listing", "config", "options", "uris", "errors")
HEAVY = ("torch", "transformers", "numpy", "pydantic", "rich", "yaml")
# Ordinary words, keys, a capability, a place of every Linux: what they name is found by the import test.
WORDS = {"graphs", "sdk", "tools", "data", "eval", "file", "disagg"}
# Files that write without `no_link`, how often, and why no link can lie there.
ELSEWHERE = {
    "draftcore/files.py": (1, "a name with this process' id"),
    "draftcore/stopping.py": (1, "/dev/null"),
    "draftcore/training/checkpoint.py": (3, "a folder just made"),
    "draftcore-data/draftcore_data/regenerate.py": (2, "files that the command line names"),
    "draftcore-eval/draftcore_eval/plots.py": (1, "memory"),
    "draftcore-file/draftcore_file/store.py": (
        3,
        "a descriptor, a file to lock, a mark without content",
    ),
    "draftcore-mtp/draftcore_mtp/serving.py": (2, "a folder just made"),
    "draftcore-nn/draftcore_nn/serving.py": (2, "a folder just made"),
    "draftcore-ray/draftcore_ray/launcher.py": (1, "a mark without content"),
    "draftcore-sharedfs/draftcore_sharedfs/channel.py": (2, "a random name; by `open` there"),
    "draftcore-vllm/draftcore_vllm/internals/draftcore_connector.py": (
        1,
        "a folder just made, or one that whoever started a server named",
    ),
    "draftcore-tools/draftcore_tools/overfit.py": (2, "a folder just made"),
    "draftcore-tools/draftcore_tools/recipes.py": (1, "a folder just made"),
    "draftcore-tools/draftcore_tools/suggest.py": (1, "a folder just made"),
}
NO_CODE = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
CORE_LINES, KERNEL_LINES = 4300, 1750  # may fall, never rise
# Raw lines. That of tests rises with a new dist or verb, by its code lines at most; that of the kit, which
# authors run, with wrong plugins that it catches for the first time.
TEST_LINES, KIT_LINES = 34550, 10433


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def module_of(file: Path, top: Path) -> str:
    """`draftcore.data.plan` of a file below the package `top`; a package is named by its folder."""
    parts = file.relative_to(top.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, known: set[str]) -> Iterator[str]:
    """Yield our modules that a file imports, anywhere in it: for types alone and late ones too."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: write the whole name of what is imported"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in known else str(node.module) for name in inner} & known


def code_lines(file: Path) -> int:
    """Count the lines with code: no blank ones, no comments, no docstrings."""
    docs: set[int] = set()
    for node in ast.walk(parsed(file)):
        value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            docs |= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    code = (token for token in tokens if tokenize.tok_name[token.type] not in NO_CODE)
    return len({n for token in code for n in range(token.start[0], token.end[0] + 1)} - docs)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


FILES = {module_of(file, CORE): file for file in sorted(CORE.rglob("*.py"))}
ARROWS = {
    module: set(imports(file, set(FILES))) - {module, "draftcore"} for module, file in FILES.items()
}


def test_every_room_has_its_floor() -> None:
    placed = [name for floor in FLOORS for name in floor]
    assert sorted(placed) == sorted({room(module) for module in FILES})


def test_no_import_runs_upwards() -> None:
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    wrong = [
        f"{module} imports {other}"
        for module, others in ARROWS.items()
        for other in sorted(others)
        if room(module) != room(other) and floor_of[room(module)] <= floor_of[room(other)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", [CORE, *sorted(ROOT.glob("plugins/*/draftcore_*"))])
def test_no_module_imports_itself_by_way_of_others(package: Path) -> None:
    files = {module_of(file, package): file for file in sorted(package.rglob("*.py"))}
    arrows = {name: set(imports(file, set(files))) - {name} for name, file in files.items()}
    TopologicalSorter(arrows).prepare()


def test_core_kernel_and_tests_stay_small() -> None:
    lines = {module: code_lines(file) for module, file in FILES.items()}
    assert sum(lines.values()) <= CORE_LINES, lines
    kernel = {module: count for module, count in lines.items() if room(module) in KERNEL}
    assert sum(kernel.values()) <= KERNEL_LINES, kernel
    for limit, *places in (
        (TEST_LINES, "tests/**/*.py", "plugins/*/tests/**/*.py"),
        (KIT_LINES, "plugins/draftcore-sdk/draftcore_sdk/**/*.py"),
    ):
        files = {file for place in places for file in ROOT.glob(place)}
        assert sum(file.read_text().count("\n") for file in files) <= limit


def test_the_kernel_imports_no_torch() -> None:
    for file in (file for module, file in FILES.items() if room(module) in KERNEL):
        for node in parsed(file).body:  # at import; what a function imports, its caller pays for
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert "torch" not in {name.partition(".")[0] for name in names}, file


def test_a_run_imports_torch_and_nothing_heavy_beside_it() -> None:
    code = "import sys, draftcore.run.train\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = {module.partition(".")[0] for module in done.stdout.split()}
    assert "torch" in packages
    assert not packages & {"transformers", "tokenizers", "datasets", "matplotlib", "loky", "PIL"}


def private_names(file: Path, reached: bool) -> set[str]:
    """Return the names with one leading underscore that a file makes, or reaches for in others."""
    names = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            of_others = owner not in ("self", "cls")
            if (reached and of_others) or (not reached and isinstance(node.ctx, ast.Store)):
                names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if reached}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not reached:
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not reached:
            names.add(node.id)
    return {name for name in names if re.match("_[a-z]", name)} - {"_replace"}  # a namedtuple's


def test_no_test_knows_a_private_name_of_ours() -> None:
    places = (*FILES.values(), *ROOT.glob("plugins/*/draftcore_*/**/*.py"))
    ours = set().union(*(private_names(file, reached=False) for file in places))
    tests = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]
    known = {
        str(file.relative_to(ROOT)): names
        for file in tests
        if (names := ours & private_names(file, reached=True))
    }
    assert known == {}


def test_no_plugins_name_occurs_in_the_core() -> None:
    """Not that of a dist, of its package or of an entry point."""
    names: set[str] = set()
    for file in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        names |= {project["name"], project["name"].replace("-", "_")}
        names |= project.get("entry-points", {}).get("draftcore", {}).keys()
    either = "|".join(sorted(map(re.escape, names - WORDS)))
    pattern = re.compile(rf"(?<![a-z0-9])({either})(?![a-z0-9])", re.IGNORECASE)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in FILES.values()
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def writes(file: Path) -> Iterator[str]:
    """Yield the calls of a file that would write through a link."""
    opened, guarded = r"'[rb]*[wax+]|O_(WRONLY|RDWR|CREAT)", "no_link|O_NOFOLLOW"
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call):
            name, text = ast.unparse(node.func).rpartition(".")[2], ast.unparse(node)
            opens = name == "open" and re.search(opened, text) and not re.search(guarded, text)
            if opens or name in {"write_text", "write_bytes", "savefig", "save_file", "touch"}:
                yield text


def test_nothing_is_written_where_a_link_may_lie() -> None:
    files = {f"draftcore/{file.relative_to(CORE)}": file for file in FILES.values()}
    for file in (ROOT / "plugins").glob("*/draftcore_*/**/*.py"):
        if "draftcore_sdk" not in file.parts:  # the kit's files are its tests' own
            files[str(file.relative_to(ROOT / "plugins"))] = file
    found = {name: len(calls) for name, file in files.items() if (calls := list(writes(file)))}
    assert found == {name: number for name, (number, _) in ELSEWHERE.items()}


READS = re.compile(r"(read_text|read_bytes|load_file|safe_open|\.open|\bopen)\((?!\))")
# Elsewhere than in a folder of the user's: /proc, metadata, what was written or checked just before.
OWN = {"dists.py", "catalog.py", "engine.py", "selftest.py", "overfit.py", "segment.py", "host.py"}
OWN |= {"verify.py", "recipes.py"}
# Of those: written to, a descriptor, no file, or a plugin's own method.
OTHERWISE = re.compile(
    r'regular\(|"(a|wb|r\+b|a\+b)"\)|(os|self|questions|Image|Store|Channel|Backend)\.open|'
    r"no_link|parts\.needed|cached|\.open\(uri|def |class |channel"
)


def test_whatever_is_read_may_be_a_pipe_or_a_device_and_goes_by_one_function() -> None:
    """Who adds a line that reads a file writes `regular(file)`, or says here why not."""
    dists = (file for dist in OURS for file in files_of(dist) if dist != "draftcore-sdk")
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in [*FILES.values(), *dists]
        for line in file.read_text().splitlines() * (file.name not in OWN)
        if READS.search(line) and not OTHERWISE.search(line)
    ]
    assert found == []


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
    assert "draftcore.plugins.registry" in modules
    assert not modules & set(HEAVY)


# ------------------------------------------------------------ what dists import

OURS = {file.parent.name: file.parent for file in sorted(ROOT.glob("plugins/*/pyproject.toml"))}
EXAMPLES = {
    file.parent.name: file.parent for file in ROOT.glob("examples/plugins/*/pyproject.toml")
}
DISTS = {**OURS, **EXAMPLES}
PUBLIC = {"errors", "files", "options", "progress", "stopping", "tensors", "uris", "contracts"}
# The one file that may reach further: the kit tries what the core does with plugins.
INSIDE = ROOT / "plugins" / "draftcore-sdk" / "draftcore_sdk" / "internals.py"
NAMES = "eagle3", "dflash", "dflash2", "domino", "dspark", "mtp", "peagle"
ALGORITHMS = {f"draftcore_{name}" for name in NAMES}


@cache
def named(file: Path) -> tuple[set[str], set[str]]:
    """Return the modules of ours that a file imports, with what it takes of `draftcore`, and the

    packages of ours that its strings name, as in `package.module:Class`.
    """
    modules, packages = set[str](), set[str]()
    for node in ast.walk(parsed(file)):
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
    """It may name what an extra brings besides, and its tests what their group does."""
    project, own = project_of(dist), dist.replace("-", "_")
    required = packages_of(project["project"]["dependencies"]) | {own}
    extras = project["project"].get("optional-dependencies", {}).values()
    allowed = required.union(*map(packages_of, extras))
    modules = set[str]().union(*(named(file)[0] for file in set(files_of(dist)) - {INSIDE}))
    assert modules
    assert {name for name in modules if not public(name, allowed)} == set()
    known = {name.replace("-", "_") for name in DISTS}
    assert set[str]().union(*(named(file)[1] for file in files_of(dist))) & known <= allowed
    allowed |= packages_of(project["dependency-groups"]["test"])
    for file in (DISTS[dist] / "tests").rglob("*.py"):
        packages = {name.partition(".")[0] for name in named(file)[0]} | named(file)[1]
        assert packages & known <= allowed, file


def test_of_the_algorithms_two_are_known_to_others_that_are_made_of_them() -> None:
    known = {
        (package, dist)
        for dist in DISTS
        for file in files_of(dist)
        for package in {name.partition(".")[0] for name in named(file)[0]} | named(file)[1]
        if package in ALGORITHMS - {dist.replace("-", "_")}
    }
    assert known == {
        *(("draftcore_dflash", f"draftcore-{name}") for name in ("dflash2", "domino", "dspark")),
        *(("draftcore_eagle3", f"draftcore-{name}") for name in ("mtp", "peagle")),
    }


def test_the_examples_took_no_line_outside_their_folders() -> None:
    """Not in code, not in configuration: whatever runs, builds or checks has no word of them."""
    kinds = ("*.py", "*.toml", "*.txt", "*.yaml", "*.json")
    folders = [ROOT / name for name in ("draftcore", "plugins", "benchmarks")]
    files = [file for kind in kinds for folder in folders for file in folder.rglob(kind)]
    files += [file for kind in kinds for file in ROOT.glob(kind)]
    assert len(files) > 50
    names = "|".join(name.removeprefix("draftcore-") for name in EXAMPLES)
    assert not [f for f in files if re.search(f"draftcore.({names})", f.read_text())]
