"""What surrounds the code names what there is: workflows, forms, versions, shell completion."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
FORMS = [*ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"), ROOT / ".pre-commit-config.yaml"]
NOXFILE = (ROOT / "noxfile.py").read_text()
BY_MAJOR = re.compile(r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v\d+")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_calls_sessions_that_a_person_calls_and_nothing_of_its_own(name: str) -> None:
    for job in yaml.safe_load(WORKFLOWS[name].read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        assert all(BY_MAJOR.fullmatch(step["uses"]) for step in job["steps"] if "run" not in step)
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert not runs or runs.pop(0) == "python -m pip install nox"
        for line in matrix.get("run", []) if runs == ["${{ matrix.run }}"] else runs:
            subprocess.run(["bash", "-n", "-c", line], check=True)
            command, _, arguments = line.partition(" -- ")
            assert command.startswith("nox -s "), line
            for session in command.split()[2:]:
                there = rf'^def {session}\(session|^@job\(name="{session}"'
                assert re.search(there, NOXFILE, re.MULTILINE), session
            assert all((ROOT / word).exists() for word in arguments.split() if "/" in word), line


def test_forms_are_whole_and_versions_are_those_of_the_project() -> None:
    found = {file.stem: yaml.safe_load(file.read_text()) for file in FORMS}
    assert found[".pre-commit-config"]["repos"][0]["hooks"][0]["entry"] == "nox -s lint"
    for form in (found["bug"], found["idea"]):
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
        assert {"name", "description"} <= set(form)
    projects = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    (version,) = {tomllib.loads(file.read_text())["project"]["version"] for file in projects}
    assert version == yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings.pop(0) == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line) for line in headings)
    pythons = yaml.safe_load(WORKFLOWS["tests"].read_text())["jobs"]["tests"]["strategy"]["matrix"]
    project = tomllib.loads(projects[0].read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert (named, project["requires-python"]) == (pythons["python"], f">={named[0]}")


def test_a_version_takes_what_is_unreleased_with_its_date() -> None:
    (dated,) = (part for part in ast.parse(NOXFILE).body if getattr(part, "name", "") == "dated")
    names: dict[str, Any] = {"re": re}
    exec(compile(ast.Module([dated], []), "noxfile.py", "exec"), names)
    text = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.1.0] - 2026-12-01\n\n- old\n"
    new = names["dated"](text, "0.1.1", "2026-12-24")
    assert new == text.replace("[Unreleased]\n", "[Unreleased]\n\n## [0.1.1] - 2026-12-24\n")
    assert names["dated"](new, "0.1.1", "2026-12-25") == new.replace("-24", "-25")


def test_the_catalogue_is_made_of_what_is_here_and_a_strangers_line_is_read_or_refused() -> None:
    catalogue = runpy.run_path(str(ROOT / "docs" / "site" / "catalogue.py"))
    for name, text in zip(("catalogue.json", "catalogue.md"), catalogue["made"]({}), strict=True):
        assert (ROOT / "docs" / name).read_text() == text, "python docs/site/catalogue.py"
    line = {"category": "algorithm", "home": "https://example.org/echo"}
    (row,) = catalogue["others"]({"echo": line})
    assert {"name": "echo", **line}.items() <= row.items()
    wrong = [{"Echo": line}, {"echo": {"home": line["home"]}}, {"echo": {**line, "more": "1"}}]
    for lines in (*wrong, {"echo": {**line, "home": "http://example.org"}}):
        with pytest.raises(ValueError, match=r"third-party\.toml: "):
            list(catalogue["others"](lines))


def test_a_shell_completes_verbs_and_options() -> None:
    for words, wanted in (("draftcore lis", "list-plugins"), ("draftcore train --dr", "--dry-run")):
        env = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        env["_DRAFTCORE_COMPLETE"] = "bash_complete"
        program = "import sys; sys.argv[0] = 'draftcore'; from draftcore.cli import main; main()"
        answer = subprocess.check_output([sys.executable, "-c", program], env=env, text=True)
        assert answer == f"plain,{wanted}\n"
