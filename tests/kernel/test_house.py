"""What surrounds the code names what there is: workflows, forms, llms.txt, versions, shell completion.

`python -m tests.kernel.test_house` writes docs/llms.txt anew.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
FORMS = [*ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"), ROOT / ".pre-commit-config.yaml"]
LLMS = ROOT / "docs" / "llms.txt"
NOXFILE = (ROOT / "noxfile.py").read_text()
BY_MAJOR = re.compile(r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v\d+")


def lines(workflow: Path) -> Iterator[str]:
    """Yield the commands of a workflow, a line of a matrix in place of its name."""
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        for step in job["steps"]:
            assert set(step) <= {"uses", "with", "run"}
            assert "run" in step or BY_MAJOR.fullmatch(step["uses"])
            if line := step.get("run"):
                matrix = job.get("strategy", {}).get("matrix", {}).get("run", [])
                yield from matrix if line == "${{ matrix.run }}" else [line]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_calls_sessions_that_a_person_calls_and_nothing_of_its_own(name: str) -> None:
    for line in lines(WORKFLOWS[name]):
        subprocess.run(["bash", "-n", "-c", line], check=True)
        if line != "python -m pip install nox":
            command, _, arguments = line.partition(" -- ")
            assert command.startswith("nox -s "), line
            for session in command.split()[2:]:
                there = rf'^def {session}\(session|^@job\(name="{session}"'
                assert re.search(there, NOXFILE, re.MULTILINE), session
            assert all((ROOT / word).exists() for word in arguments.split() if "/" in word), line


def test_the_pythons_of_ci_are_those_that_the_classifiers_name() -> None:
    job = yaml.safe_load(WORKFLOWS["tests"].read_text())["jobs"]["tests"]
    pythons = job["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"])) == pythons
    assert project["requires-python"] == f">={pythons[0]}"


def test_what_the_platform_and_citations_read_is_whole_and_of_one_version() -> None:
    found: dict[str, Any] = {file.stem: yaml.safe_load(file.read_text()) for file in FORMS}
    assert found[".pre-commit-config"]["repos"][0]["hooks"][0]["entry"] == "nox -s lint"
    for form in (found["bug"], found["idea"]):
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
        assert {"name", "description"} <= set(form)
    projects = [ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    (version,) = {tomllib.loads(file.read_text())["project"]["version"] for file in projects}
    assert version == yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()


def test_a_shell_completes_verbs_and_options() -> None:
    for words, wanted in (("draftcore lis", "list-plugins"), ("draftcore train --dr", "--dry-run")):
        env = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        env["_DRAFTCORE_COMPLETE"] = "bash_complete"
        program = "import sys; sys.argv[0] = 'draftcore'; from draftcore.cli import main; main()"
        answer = subprocess.check_output([sys.executable, "-c", program], env=env, text=True)
        assert answer == f"plain,{wanted}\n"


def llms() -> str:
    """List the pages for a language model: the title of each, and its first sentence."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    text = f"# draftcore\n\n> {about}.\n"
    pages = [ROOT / "README.md", *sorted(LLMS.parent.rglob("*.md"))]
    for part, found in (("Docs", pages), ("Plugins", sorted(ROOT.glob("plugins/*/README.md")))):
        text += f"\n## {part}\n\n"
        for page in found:
            title, first, *_ = page.read_text().split("\n\n")
            sentence = re.split(r"(?<=[.!?]) ", " ".join(re.sub(r"^- |\*\*", "", first).split()))[0]
            place = os.path.relpath(page, LLMS.parent)
            text += f"- [{title.removeprefix('# ')}]({place}): {sentence}\n"
    return text


def test_llms_txt_has_the_first_lines_of_every_page() -> None:
    assert LLMS.read_text() == llms(), "python -m tests.kernel.test_house"


if __name__ == "__main__":
    LLMS.write_text(llms())
