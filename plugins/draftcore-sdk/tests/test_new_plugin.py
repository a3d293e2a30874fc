"""`draftcore new-plugin`: what it refuses, and that what it writes is tidy and typed.

That a written plugin works is shown where it is built and installed: `nox -s authors`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import draftcore_disagg
import draftcore_hf
import draftcore_nn
import pytest
from click.testing import CliRunner, Result
from draftcore_sdk.internals import Plugin, Registry, main
from draftcore_sdk.new_plugin import LONGEST, NEEDS, PLACEHOLDERS, bounds, plugin_name, require_free

import draftcore
from draftcore.contracts.offers import Offer
from draftcore.errors import UsageError

ROOT = Path(__file__).parents[3]
KINDS = sorted(NEEDS)
OURS = (draftcore, draftcore_disagg, draftcore_hf, draftcore_nn)  # that what is written imports
NAMES = ("x", "my-2nd-idea", "abcdefgh-" + "i" * (LONGEST - 9))


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["new-plugin", *map(str, arguments)])


def written(folder: Path, kind: str, name: str = "my-idea") -> Path:
    """Write a plugin and return its folder."""
    result = invoke(name, "--kind", kind, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder / f"draftcore-{name}"


def run(folder: Path, *command: str, **env: str) -> None:
    """Run a tool on a folder; its output is shown where it complains."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "name", ["", "3d", "a b", "naïve", "-", "a-", "a/b", "../a", "draftcore-", "a" * (LONGEST + 1)]
)
def test_a_bad_name_is_refused_with_the_rule(name: str, tmp_path: Path) -> None:
    result = invoke("--kind", "store", "--out", tmp_path, "--", name)
    assert result.exit_code == 2
    assert f"error: {name!r} cannot be the name of a plugin\n" in result.output
    assert "choose one like my-plugin" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["my-idea", "My_Idea", "my.idea", "draftcore-my-idea"])
def test_a_name_is_normalised(name: str) -> None:
    assert plugin_name(name) == "my-idea"


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    """By a plugin, by its dist, by what it offers, and by an entry point that is spelt otherwise."""
    result = invoke("SDK", "--kind", "store", "--out", tmp_path)
    assert result.exit_code == 2
    assert "the name 'sdk' is taken here by the plugin " in result.output
    assert not list(tmp_path.iterdir())
    fast = Plugin(
        "fast", "draftcore-tiny", "1.0", "x", state="ready", offers=(Offer("store", "ram"),)
    )
    broken = Plugin("half_done", "half-done", "1.0", "x", state="broken", problem="ImportError")
    registry = Registry((fast, broken))
    for name in ("fast", "tiny", "ram", "half-done"):
        with pytest.raises(UsageError, match="is taken here by the plugin"):
            require_free(name, "store", registry)
    require_free("ram", "channel", registry)  # a store and a channel of one name do not meet


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    note = tmp_path / "draftcore-my-idea" / "note"
    note.parent.mkdir()
    written(tmp_path, "store")
    before = {file: file.read_bytes() for file in note.parent.rglob("*") if file.is_file()}
    result = invoke("my-idea", "--kind", "channel", "--out", tmp_path)
    assert result.exit_code == 2
    assert "is there already\n  remove it, or choose another place with --out" in result.output
    assert {f: f.read_bytes() for f in note.parent.rglob("*") if f.is_file()} == before


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = invoke("my-idea", "--kind", "store", "--out", tmp_path / "file" / "below")
    assert result.exit_code == 1
    assert re.search(r"error: cannot write (.|\n)*choose another place with --out", result.output)


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_announced_and_none_holds_a_placeholder(kind: str, tmp_path: Path) -> None:
    result = invoke("my-idea", "--kind", kind, "--out", tmp_path)
    folder = tmp_path / "draftcore-my-idea"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    announced, commands = result.output.split("next:\n")
    assert announced.splitlines()[1:] == [f"  {file}" for file in files]
    assert [line.split()[0] for line in commands.splitlines()] == ["pip", "draftcore", "python"]
    package = {"__init__.py", "plugin.py", "py.typed"}
    assert {f"draftcore_my_idea/{name}" for name in package} <= set(files)
    assert {"README.md", "pyproject.toml", "noxfile.py", ".gitignore"} <= set(files)
    assert {"tests/test_conformance.py", ".github/workflows/tests.yml"} <= set(files)
    left = "|".join(PLACEHOLDERS)
    for file in files:
        assert not re.search(left, file + (folder / file).read_text()), file


@pytest.mark.parametrize("kind", KINDS)
def test_its_metadata_says_what_it_imports_and_what_the_core_says(
    kind: str, tmp_path: Path
) -> None:
    """The floors of what both need are the core's, which are the ones that are tested."""
    folder = written(tmp_path, kind)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bound, *floors = project["dependencies"]
    minor = bounds(core["version"])
    assert bound == f"draftcore{minor}"
    ours = {f"{need}{minor}" for need in NEEDS[kind] if need.startswith("draftcore-")}
    assert set(floors) <= {*core["dependencies"], *ours}
    assert len(floors) == len(NEEDS[kind])
    code = "\n".join(file.read_text() for file in folder.glob("draftcore_*/*.py"))
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", code, re.MULTILINE))
    known = {"draftcore_my_idea", *sys.stdlib_module_names}
    assert imported - known == {"draftcore", *(need.replace("-", "_") for need in NEEDS[kind])}
    assert project["entry-points"]["draftcore"] == {"my-idea": "draftcore_my_idea.plugin"}
    assert project["requires-python"] == core["requires-python"]
    assert project["keywords"] == ["draftcore-plugin"]


@pytest.mark.parametrize(
    ("version", "requirement"),
    [("0.1.0", ">=0.1,<0.2"), ("0.9.12.dev3", ">=0.9,<0.10"), ("1.2.3", ">=1.2,<2")],
)
def test_the_core_is_bound_to_one_contract(version: str, requirement: str) -> None:
    assert bounds(version) == requirement


def test_it_is_formatted_and_free_of_lint(tmp_path: Path) -> None:
    """By our own rules and by those that each brings, however long its name is."""
    for kind in KINDS:
        for name in NAMES:
            written(tmp_path / kind, kind, name)
    ours = ("--config", str(ROOT / "pyproject.toml"), "--config", "src = ['*/*']")
    for settings in (ours, ()):
        run(tmp_path, "ruff", "check", "--no-cache", *settings)
        run(tmp_path, "ruff", "format", "--check", "--no-cache", *settings)


def test_every_kind_passes_mypy_strict(tmp_path: Path) -> None:
    folders = [written(tmp_path, kind, f"my-{kind}") for kind in KINDS]
    packages = [str(next(folder.glob("draftcore_*"))) for folder in folders]
    # A source tree, where no wheel is installed.
    ours = [str(Path(str(one.__file__)).parents[1]) for one in OURS]
    path = {} if ours[0].endswith("site-packages") else {"MYPYPATH": os.pathsep.join(ours)}
    settings = ("--config-file", str(folders[0] / "pyproject.toml"), "--no-error-summary")
    run(tmp_path, "mypy", *settings, *packages, **path)


def test_writing_imports_nothing_heavy(tmp_path: Path) -> None:
    arguments = ["new-plugin", "my-idea", "--kind", "algorithm", "--out", str(tmp_path)]
    code = (
        "import sys, contextlib, draftcore.cli\n"
        f"with contextlib.suppress(SystemExit): draftcore.cli.main({arguments!r})\n"
        "assert not {'torch', 'pydantic', 'pytest'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert (tmp_path / "draftcore-my-idea" / "pyproject.toml").exists()
