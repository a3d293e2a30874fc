"""`draftcore new-plugin`: what it refuses, and that what it writes is tidy.

That it is typed is seen by `nox -s typing`, that it works by `nox -s authors`, which builds and installs it.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from draftcore_sdk.internals import Plugin, Registry, bind, load_plugins, main
from draftcore_sdk.new_plugin import LONGEST, NEEDS, PLACEHOLDERS, bounds, plugin_name, require_free

from draftcore.config import RunConfig
from draftcore.contracts.offers import Offer
from draftcore.errors import UsageError

ROOT = Path(__file__).parents[3]


def invoke(folder: Path, kind: str, name: str = "my-idea", status: int = 0) -> Result:
    """Write a plugin; options end before its name, which may look like one."""
    command = ["new-plugin", "--kind", kind, "--out", str(folder), "--", name]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == status, result.output
    return result


@pytest.mark.parametrize(
    "name", ["", "3d", "a b", "naïve", "-", "a-", "a/b", "../a", "draftcore-", "a" * (LONGEST + 1)]
)
def test_a_bad_name_is_refused_with_the_rule(name: str, tmp_path: Path) -> None:
    result = invoke(tmp_path, "store", name, status=2)
    assert f"error: {name!r} cannot be the name of a plugin\n" in result.output
    assert "choose one like my-plugin" in result.output
    assert not list(tmp_path.iterdir())


def test_a_name_is_normalised_and_the_core_is_bound_to_one_contract() -> None:
    for name in ("my-idea", "My_Idea", "my.idea", "draftcore-my-idea"):
        assert plugin_name(name) == "my-idea"
    found = [bounds(version) for version in ("0.1.0", "0.9.12.dev3", "1.2.3")]
    assert found == [">=0.1,<0.2", ">=0.9,<0.10", ">=1.2,<2"]


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    """By a plugin, by its dist, by what it offers, and by an entry point that is spelt otherwise."""
    result = invoke(tmp_path, "store", "SDK", status=2)
    assert "the name 'sdk' is taken here by the plugin " in result.output
    assert not list(tmp_path.iterdir())
    offers = (Offer("store", "ram"),)
    fast = Plugin("fast", "draftcore-tiny", "1.0", "x", state="ready", offers=offers)
    broken = Plugin("half_done", "half-done", "1.0", "x", state="broken", problem="ImportError")
    registry = Registry((fast, broken))
    for name in ("fast", "tiny", "ram", "half-done"):
        with pytest.raises(UsageError, match="is taken here by the plugin"):
            require_free(name, "store", registry)
    require_free("ram", "channel", registry)  # a store and a channel of one name do not meet


def test_a_folder_that_holds_something_and_one_that_cannot_be_are_explained(tmp_path: Path) -> None:
    folder = tmp_path / "draftcore-my-idea"
    invoke(tmp_path, "store")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    result = invoke(tmp_path, "channel", status=2)
    assert "is there already\n  remove it, or choose another place with --out" in result.output
    assert {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()} == before
    (tmp_path / "file").touch()
    result = invoke(tmp_path / "file" / "below", "store", status=1)
    assert re.search(r"error: cannot write (.|\n)*choose another place with --out", result.output)


@pytest.mark.parametrize("kind", NEEDS)
def test_its_files_are_announced_and_its_metadata_says_what_it_imports(
    kind: str, tmp_path: Path
) -> None:
    """No file holds a placeholder. The floors of what both need are the core's, which are tested.

    What its README shows of a run has keys that runs have.
    """
    folder = tmp_path / "draftcore-my-idea"
    announced, commands = invoke(tmp_path, kind).output.split("next:\n")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert announced.splitlines()[1:] == [f"  {file}" for file in files]
    assert [line.split()[0] for line in commands.splitlines()] == ["pip", "draftcore", "python"]
    package = {f"draftcore_my_idea/{name}" for name in ("__init__.py", "plugin.py", "py.typed")}
    others = {"tests/test_conformance.py", "noxfile.py", "README.md", "CHANGELOG.md", "LICENSE"}
    others |= {"pyproject.toml", ".gitignore"}
    assert package | others | {f".github/workflows/{n}.yml" for n in ("tests", "release")} <= {
        *files
    }
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    for file in set(files) - {"LICENSE"}:
        assert not re.search("|".join(PLACEHOLDERS), file + (folder / file).read_text()), file
    run = {"run": "x", "target": {"path": "x"}, "algorithm": {"name": "x"}}
    for text in re.findall(r"```yaml\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL):
        config = RunConfig.model_validate({**run, **yaml.safe_load(text)})
        for runner in filter(None, (config.runner.prefill, config.runner.decode)):
            bind(load_plugins(), "runner", runner.name, runner.options)
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


def test_it_is_formatted_and_free_of_lint(tmp_path: Path) -> None:
    """By our own rules and by those that each brings, however long its name is."""
    for kind in NEEDS:
        for name in ("x", "my-2nd-idea", "abcdefgh-" + "i" * (LONGEST - 9)):
            invoke(tmp_path / kind, kind, name)
    ours = ("--config", str(ROOT / "pyproject.toml"), "--config", "src = ['*/*']")
    for settings in (ours, ()):
        for check in (["check"], ["format", "--check"]):
            command = [sys.executable, "-m", "ruff", *check, "--no-cache", *settings]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


def test_writing_imports_nothing_heavy(tmp_path: Path) -> None:
    arguments = ["new-plugin", "my-idea", "--kind", "algorithm", "--out", str(tmp_path)]
    code = (
        "import sys, contextlib, draftcore.cli\n"
        f"with contextlib.suppress(SystemExit): draftcore.cli.main({arguments!r})\n"
        "assert not {'torch', 'pydantic', 'pytest'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert (tmp_path / "draftcore-my-idea" / "pyproject.toml").exists()
