"""What the README says is so: its sessions exist, its YAML is valid, its output is the output."""

import re
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from draftcore.cli import main
from draftcore.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = [*ROOT.glob("examples/quickstart/*.yaml"), *ROOT.glob("benchmarks/*.yaml")]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}


OWN_TEST = {"writing-a-plugin.md"}  # its commands build on each other: test_writing_a_plugin.py


def blocks(language: str, skipped: Collection[str] = ()) -> list[str]:
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    texts = [text for page, text in TEXT.items() if page.name not in skipped]
    return [block for text in texts for block in fence.findall(text)]


@pytest.mark.parametrize("block", [*blocks("yaml"), *(file.read_text() for file in CONFIGS)])
def test_every_yaml_is_a_valid_configuration(block):
    RunConfig.model_validate(yaml.safe_load(block))


@pytest.mark.parametrize("block", blocks("console", OWN_TEST))
def test_every_shown_output_is_what_the_command_prints(block):
    command, expected = block.split("\n", 1)
    result = CliRunner().invoke(main, command.removeprefix("$ draftcore ").split())
    squeezed = [re.sub(r"\s+(editable: .*)?$", "", line) for line in result.output.splitlines()]
    shown = [line for line in squeezed if line.split()[0] in expected]
    assert [line.split() for line in shown] == [line.split() for line in expected.splitlines()]


def test_every_session_named_in_the_docs_exists():
    named = {name for text in TEXT.values() for name in re.findall(r"nox -s ([\w-]+)", text)}
    noxfile = (ROOT / "noxfile.py").read_text()
    assert named >= {"quickstart", "tests", "gpu"}
    there = {name for name in named if f"def {name.replace('-', '_')}(session" in noxfile}
    assert named == there


def test_every_verb_named_in_the_readme_exists():
    verbs = set(re.findall(r"`draftcore ([a-z-]+)", TEXT[ROOT / "README.md"]))
    listed = CliRunner().invoke(main, ["--help"]).output
    assert {"capture", "train", "eval", "export", "list-plugins"} <= verbs
    assert {verb for verb in verbs if verb not in listed} == set()


def test_every_file_named_in_the_docs_exists():
    for page, text in TEXT.items():
        for name in re.findall(r"`((?:draftcore|docs|benchmarks|examples)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
