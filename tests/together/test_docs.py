"""What README, CONTRIBUTING and docs say is so: sessions and files exist, YAML is valid, output is output."""

import re
import runpy
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from draftcore.cli import main
from draftcore.config import RunConfig
from draftcore.plugins.binding import bind
from draftcore.plugins.registry import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = [*ROOT.glob("examples/quickstart/*.yaml"), *ROOT.glob("benchmarks/*.yaml")]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
# An entry of the glossary, and a place that it names: identifiers in a file.
ENTRY = re.compile(r"^- \*\*(.+?)\*\*: (.+?)(?=^- \*\*|^#|\Z)", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"((?:`[\w ]+`(?: and )?)+)\s+in\s+`([\w./-]+)`")

OWN_TEST = {"writing-a-plugin.md"}  # its commands build on each other: test_writing_a_plugin.py


def blocks(language: str, skipped: Collection[str] = ()) -> list[str]:
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    texts = [text for page, text in TEXT.items() if page.name not in skipped]
    return [block for text in texts for block in fence.findall(text)]


@pytest.mark.parametrize("block", [*blocks("yaml"), *(file.read_text() for file in CONFIGS)])
def test_every_yaml_is_a_valid_configuration(block: str) -> None:
    config = RunConfig.model_validate(yaml.safe_load(block))
    for choice in (config.runner.prefill, config.runner.decode):
        bind(load(), "runner", choice.name).options(choice.options)


@pytest.mark.parametrize("block", blocks("console", OWN_TEST))
def test_every_shown_output_is_what_the_command_prints(block: str) -> None:
    command, expected = block.split("\n", 1)
    result = CliRunner().invoke(main, command.removeprefix("$ draftcore ").split())
    squeezed = [re.sub(r"\s+(editable: .*)?$", "", line) for line in result.output.splitlines()]
    shown = [line for line in squeezed if line.split()[0] in expected]
    assert [line.split() for line in shown] == [line.split() for line in expected.splitlines()]


def test_every_session_named_in_the_docs_exists() -> None:
    named = {name for text in TEXT.values() for name in re.findall(r'nox -s "?([\w-]+)', text)}
    noxfile = (ROOT / "noxfile.py").read_text()
    assert named >= {"quickstart", "tests", "gpu"}
    there = {name for name in named if f"def {name.replace('-', '_')}(session" in noxfile}
    assert named == there


def test_every_verb_named_in_the_readme_exists() -> None:
    verbs = set(re.findall(r"`draftcore ([a-z-]+)", TEXT[ROOT / "README.md"]))
    listed = CliRunner().invoke(main, ["--help"]).output
    assert {"capture", "train", "eval", "export", "list-plugins"} <= verbs
    assert {verb for verb in verbs if verb not in listed} == set()


def test_every_file_named_in_the_docs_exists() -> None:
    folders = "draftcore|docs|benchmarks|examples|plugins|tests"
    for page, text in TEXT.items():
        for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_glossary_has_one_entry_a_word_and_says_where_it_lives() -> None:
    entries = ENTRY.findall(TEXT[ROOT / "docs" / "glossary.md"])
    words = [word for word, _ in entries]
    assert len(words) == len(set(words)) > 50
    for word, text in entries:
        assert re.search(r"`[\w-]+/[\w./-]+`", text), f"{word} lives nowhere"
        for names, file in PLACE.findall(text):
            for name in re.findall(r"`(?:def )?(\w+)`", names):
                there = (ROOT / file).read_text(encoding="utf-8")
                assert re.search(rf"\b{name}\b", there), f"{word}: no {name} in {file}"


def test_the_floors_of_the_contributing_page_are_those_that_are_kept() -> None:
    kept = runpy.run_path(str(ROOT / "tests" / "kernel" / "test_floors.py"))["FLOORS"]
    rows = re.findall(r"^\| \d+ \| (.+?) \|", TEXT[ROOT / "CONTRIBUTING.md"], re.MULTILINE)
    shown = [set(re.findall(r"`(\w+)/?`", row)) for row in rows]
    assert shown == [set(floor) - {"", "__main__"} for floor in kept]
