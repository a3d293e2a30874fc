"""What README, CONTRIBUTING, docs, the plugins' READMEs and the catalog say is so.

Sessions, verbs, files and extras exist, YAML is a run with options that its plugins take, tables list
the options that there are, shown output is what is printed. What needs a server or a GPU is not run.
"""

import importlib
import re
import runpy
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from draftcore.cli import main
from draftcore.config import Choice, RunConfig, Selection
from draftcore.contracts.offers import Kind
from draftcore.plugins import catalog
from draftcore.plugins.binding import bind
from draftcore.plugins.catalog import defaults
from draftcore.plugins.registry import load_plugins

ROOT = Path(__file__).parents[2]
READMES = {path.parent.name: path for path in sorted(ROOT.glob("plugins/*/README.md"))}
PROJECTS = [ROOT, *(path.parent for path in READMES.values())]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {path: path.read_text(encoding="utf-8") for path in [*DOCS, *READMES.values()]}
CONFIGS = [*ROOT.glob("examples/quickstart/*.yaml"), *ROOT.glob("benchmarks/*.yaml")]
INVENTED = ("echo", "lens", "shelf", "auto")  # offers of nobody, in examples for authors; any store
OWN_TEST = "writing-a-plugin.md"  # its commands build on each other: test_writing_a_plugin.py
# The models whose options a README's tables list, where they are not those of a URI.
MODELS = {
    "eagle3": ["Eagle3"],
    "dflash": ["DFlash"],
    "sglang": ["Sglang", "Server", "Engine"],
    "vllm": ["Engine", "Vllm", "Server"],
}
VERB = re.compile(r"(?:^|^\$ |`)draftcore ([a-z][a-z-]+)", re.MULTILINE)
FOLDERS = r"draftcore(?!_echo)\w*|docs|tests|benchmarks|examples|plugins|internals"
FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")
# An entry of the glossary, and a place that it names: identifiers in a file.
ENTRY = re.compile(r"^- \*\*(.+?)\*\*: (.+?)(?=^- \*\*|^#|\Z)", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"((?:`[\w ]+`(?: and )?)+)\s+in\s+`([\w./-]+)`")


def blocks(page: Path, language: str) -> list[str]:
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return fence.findall(TEXT[page])


YAML = [
    *((page.parent.name, text) for page in TEXT for text in blocks(page, "yaml")),
    *((file.name, file.read_text()) for file in CONFIGS),
]


@pytest.mark.parametrize(("name", "text"), YAML, ids=[name for name, _ in YAML])
def test_every_yaml_is_a_whole_run_with_options_that_its_plugins_take(name: str, text: str) -> None:
    config, registry = RunConfig.model_validate(yaml.safe_load(text)), load_plugins()
    sections: list[tuple[Kind, Selection]] = [("target", config.target), ("samples", config.data)]
    for kind, section in [*sections, ("evaluation", config.eval)]:
        if section.name not in INVENTED:
            bind(registry, kind, section.name, section.options)
    chosen: list[tuple[Kind, Choice | None]] = [
        ("algorithm", config.algorithm),
        *(("algorithm", draft.algorithm) for draft in config.drafts.values()),
        ("capture", config.capture),
        ("runner", config.runner.prefill),
        ("runner", config.runner.decode),
        ("store", Choice(name=config.store.partition(":")[0])),
        ("channel", Choice(name=config.channel.partition(":")[0])),
    ]
    for kind, choice in chosen:
        if choice and choice.name not in INVENTED:
            options = bind(registry, kind, choice.name, choice.options).options
            if choice.name == "graphs":
                if options.backend not in ("eager", "auto"):
                    bind(registry, "graph", options.backend, options.options)
                for plugin, its in options.plugins.items():
                    bind(registry, "graph-plugin", plugin, its)


def test_extras_requirements_and_pages_list_every_dist() -> None:
    """A build of Mooncake is in brackets: `all` takes the one that every machine can."""
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text.replace("[cpu]", ""))["project"]
    extras = project["optional-dependencies"]
    names = {extra: {line.partition("==")[0] for line in lines} for extra, lines in extras.items()}
    assert names.pop("all") == set(READMES)
    assert (standard := names.pop("standard")) == {*defaults(), "draftcore-file"}
    assert names == {dist.removeprefix("draftcore-"): {dist} for dist in READMES}
    bounds = {re.sub(r"^[\w-]+==| ;.*", "", line) for lines in extras.values() for line in lines}
    assert bounds == {project["version"]}
    marked = {line.partition(" ;")[0]: line.partition(" ;")[2] for line in extras["all"]}

    def folders(name: str) -> dict[str, str]:
        text = (ROOT / "requirements" / name).read_text().replace("[cpu]", "")
        return dict(re.findall(r"^\./plugins/([\w-]+)(?: ;(.*))?$", text, re.MULTILINE))

    assert set(folders("standard.txt")) == {*standard, "draftcore-nn"}
    for dist, marker in (everything := folders("standard.txt") | folders("all.txt")).items():
        assert marked[f"{dist}=={project['version']}"] == marker
    assert set(everything) == set(READMES)
    for page in ("docs/dists.md", "CONTRIBUTING.md"):
        assert set(READMES) <= set(re.findall(r"`(draftcore-\w+)`", TEXT[ROOT / page])), page


SHOWN = [text for page in DOCS if page.name != OWN_TEST for text in blocks(page, "console")]


@pytest.mark.parametrize("block", SHOWN)
def test_every_shown_output_is_what_the_command_prints(block: str) -> None:
    command, expected = block.split("\n", 1)
    result = CliRunner().invoke(main, command.removeprefix("$ draftcore ").split())
    squeezed = [re.sub(r"\s+(editable: .*)?$", "", line) for line in result.output.splitlines()]
    shown = [line for line in squeezed if line.split()[0] in expected]
    assert [line.split() for line in shown] == [line.split() for line in expected.splitlines()]


def test_messages_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    folders = [ROOT / "draftcore", *ROOT.glob("plugins/*/draftcore_*")]
    code = "".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # of a text over several lines
    for message in re.findall(r"^\| `(.+?)`", TEXT[ROOT / "docs/troubleshooting.md"], re.MULTILINE):
        assert all(part.strip() in code for part in message.split("...")), message


def test_sessions_verbs_and_files_that_are_named_exist() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    verbs = CliRunner().invoke(main, ["--help"]).output
    for page, text in TEXT.items():
        for session in re.findall(r"nox -s \"?([\w-]+)", text):
            function = session.replace("-", "_")
            assert f"def {function}(session" in noxfile or f'name="{session}"' in noxfile, session
        for verb in VERB.findall(text):
            assert f"  {verb} " in verbs, (page, verb)
        for file in FILE.findall(text):
            assert any((root / file).exists() for root in (page.parent, *PROJECTS)), (page, file)


def test_readme_is_two_screens_and_every_page_opens_with_what_its_reader_can_do_then() -> None:
    """The docs site lists each; `nox -s docs` builds it."""
    assert TEXT[ROOT / "README.md"].count("\n") <= 150
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        opening = TEXT[page].split("\n\n")[1].replace("\n", " ")
        assert re.match(r"After this page you (can|have|know)\b", opening), page.name
        assert f": {page.name}\n" in listed


def test_what_is_said_of_another_trainer_leads_to_its_source() -> None:
    page = TEXT[ROOT / "docs/comparison.md"]
    rows = re.findall(r"^\| (?:[^|\n]+\|){7}$", page, re.MULTILINE)
    cells = [cell for row in rows[1:] for cell in row.split(" | ")[1:6]]
    assert {re.sub(r"\[.+", "[", cell) for cell in cells} == {"no", "?", "["}
    assert {*re.findall(r"\]\[(.+?)\]", page)} == {*re.findall(r"(?m)^\[(.+?)\]: https://", page)}


@pytest.mark.parametrize("name", READMES)
def test_a_readme_opens_with_what_it_is_and_how_to_have_it(name: str) -> None:
    """The title, a paragraph that fills its lines, the pip line, and something to begin with."""
    text = TEXT[READMES[name]]
    title, paragraph, *rest = text.split("\n\n")
    assert title == f"# {name}"
    lines = paragraph.splitlines()
    assert all(len(line) > 85 for line in lines[:-1]), "a ragged paragraph"
    assert all(len(line) <= 110 for line in lines)
    assert re.search(rf"^pip install '?{name}\b", "\n\n".join(rest[:4]), re.MULTILINE)
    begin = re.search(r"^```yaml|^\$ draftcore ", text, re.MULTILINE)
    assert begin is not None
    assert text[: begin.start()].count("\n") < 40
    project = tomllib.loads((READMES[name].parent / "pyproject.toml").read_text())["project"]
    extras = re.findall(rf"pip install '?{name}\[(\w+)\]", text)
    assert set(extras) <= set(project.get("optional-dependencies", {}))


def option_rows(name: str) -> Iterator[tuple[list[str], str]]:
    """Yield the names and the defaults in each row of a README's tables of options."""
    inside = False
    for line in TEXT[READMES[name]].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        if not line.startswith("|"):
            inside = False
        elif cells[0] in ("option", "under `capture.options`"):
            inside = True
        elif inside and not cells[0].startswith("---"):
            yield re.findall(r"`(\w+)`", cells[0]), cells[1]


def fields_of(path: str) -> dict[str, Any]:
    """Return the default of each option of the model at `module:Class`."""
    module, _, name = path.partition(":")
    fields = getattr(importlib.import_module(module), name).model_fields
    return {key: info.get_default(call_default_factory=True) for key, info in fields.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_tables_list_the_options_that_there_are_and_their_defaults(name: str) -> None:
    """Where a default is a number or a switch; what depends on the target is said in words."""
    models = (fields_of(f"draftcore_{name}.options:{model}Options") for model in MODELS[name])
    fields = [field for model in models for field in model.items()]
    rows, checked = [*option_rows(f"draftcore-{name}")], 0
    assert sorted(n for names, _ in rows for n in names) == sorted(n for n, _ in fields)
    for names, said in rows:
        given = [part.strip("` ") for part in said.split(",")]
        for pair in zip(names, given, strict=False):
            if len(names) == len(given) and re.fullmatch(r"[\d.]+(e-?\d+)?|true|false", pair[1]):
                assert (pair[0], yaml.safe_load(pair[1])) in fields
                checked += 1
    assert checked > 2


@pytest.mark.parametrize(
    ("name", "model"), [("domino", "Domino"), ("dflash2", "DFlash2"), ("dspark", "DSpark")]
)
def test_a_readme_adds_what_an_algorithm_has_more_than_its_backbone(name: str, model: str) -> None:
    listed = {name for names, _ in option_rows(f"draftcore-{name}") for name in names}
    own = set(fields_of(f"draftcore_{name}.options:{model}Options"))
    dflash = set(fields_of("draftcore_dflash.options:DFlashOptions"))
    assert listed == own - dflash
    assert dflash - own == {"loss", "dpace_alpha"}


@pytest.mark.parametrize(("options", "base"), [("Domino", "DFlash"), ("PEagle", "Eagle3")])
def test_what_a_readme_adds_to_that_of_its_base_is_what_it_has_more(
    options: str, base: str
) -> None:
    """Or what has another default there; and it names what it has not."""
    own, theirs = (fields_of(f"draftcore_{n.lower()}.options:{n}Options") for n in (options, base))
    readme = f"draftcore-{options.lower()}"
    listed = {name for names, _ in option_rows(readme) for name in names}
    assert listed == {name for name, value in own.items() if theirs.get(name, "") != value}
    said = re.search(r"^Those of .* but for (.*), and$", TEXT[READMES[readme]], re.MULTILINE)
    assert said is not None
    assert set(re.findall(r"`(\w+)`", said[1])) == theirs.keys() - own.keys()


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


def test_the_catalog_has_every_offer_kind_and_verb_of_our_dists_and_no_other() -> None:
    ours = {"draftcore", *READMES} - {"draftcore-nn"}  # which offers none
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for plugin in (p for p in load_plugins().ready if p.dist in ours):
        for offer in plugin.offers:
            found[offer.kind][offer.name] = plugin.dist
        found["kind"] |= dict.fromkeys(plugin.kinds, plugin.dist)
    assert {dist for dists in found.values() for dist in dists.values()} == ours
    listed = tomllib.loads(Path(catalog.__file__).with_name("catalog.toml").read_text())
    chosen = listed.pop("defaults")
    assert listed == found
    assert [kind for kind, name in chosen.items() if name not in listed[kind]] == []
