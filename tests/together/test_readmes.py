"""What the plugins' READMEs say is so: their YAML runs, their tables list the options that there are.

Commands that need a server or a GPU are looked at, not run: verbs, sessions, files, names to install.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from draftcore.cli import main
from draftcore.config import RunConfig
from draftcore.contracts.offers import Kind
from draftcore.plugins.binding import bind
from draftcore.plugins.registry import load

ROOT = Path(__file__).parents[2]
READMES = {path.parent.name: path for path in sorted(ROOT.glob("plugins/*/README.md"))}
TEXT = {name: path.read_text(encoding="utf-8") for name, path in READMES.items()}
# The models whose options a README's tables list, where they are not those of a URI.
MODELS = {
    "draftcore-eagle3": ["draftcore_eagle3.options:Eagle3Options"],
    "draftcore-dflash": ["draftcore_dflash.options:DFlashOptions"],
    "draftcore-sglang": [
        "draftcore_sglang.options:SglangOptions",
        "draftcore_sglang.options:ServerOptions",
    ],
}


def blocks(name: str, language: str) -> list[str]:
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return fence.findall(TEXT[name])


def option_rows(name: str) -> list[tuple[str, str]]:
    """The first two cells of each row of the tables of options."""
    found: list[tuple[str, str]] = []
    inside = False
    for line in TEXT[name].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        if not line.startswith("|"):
            inside = False
        elif cells[0] in ("option", "under `capture.options`"):
            inside = True
        elif inside and not cells[0].startswith("---"):
            found.append((cells[0], cells[1]))
    return found


def model_of(path: str) -> type[BaseModel]:
    module, _, name = path.partition(":")
    found: type[BaseModel] = getattr(importlib.import_module(module), name)
    return found


YAML = [(name, text) for name in READMES for text in blocks(name, "yaml")]


@pytest.mark.parametrize(("name", "text"), YAML, ids=[name for name, _ in YAML])
def test_every_yaml_is_a_whole_run_with_options_that_its_plugins_take(name: str, text: str) -> None:
    config, registry = RunConfig.model_validate(yaml.safe_load(text)), load()
    assert config.algorithm is not None
    bind(registry, "algorithm", config.algorithm.name).options(config.algorithm.options)
    bind(registry, "capture", config.capture.name).options(config.capture.options)
    for choice in (config.runner.prefill, config.runner.decode):
        phase = bind(registry, "runner", choice.name).options(choice.options)
        if choice.name != "graphs":
            continue
        if phase.backend not in ("eager", "auto"):
            bind(registry, "graph", phase.backend).options(phase.options)
        for plugin, options in phase.plugins.items():
            bind(registry, "graph-plugin", plugin).options(options)
    uris: dict[Kind, str] = {"store": config.store, "channel": config.channel}
    for kind, uri in uris.items():
        if ":" in uri:
            assert registry.find(kind, uri.partition(":")[0])


@pytest.mark.parametrize("name", READMES)
def test_a_readme_opens_with_what_it_is_and_how_to_have_it(name: str) -> None:
    """The title, a paragraph that fills its lines, the pip line, and something to begin with."""
    title, paragraph, *rest = TEXT[name].split("\n\n")
    assert title == f"# {name}"
    lines = paragraph.splitlines()
    assert all(len(line) > 85 for line in lines[:-1]), "a ragged paragraph"
    assert all(len(line) <= 110 for line in lines)
    assert re.search(rf"^pip install '?{name}\b", "\n\n".join(rest[:4]), re.MULTILINE)
    begin = YAML_OR_VERB.search(TEXT[name])
    assert begin is not None
    assert TEXT[name][: begin.start()].count("\n") < 40


YAML_OR_VERB = re.compile(r"^```yaml|^\$ draftcore ", re.MULTILINE)


@pytest.mark.parametrize("name", MODELS)
def test_the_tables_list_the_options_that_there_are(name: str) -> None:
    listed = [field for row, _ in option_rows(name) for field in re.findall(r"`(\w+)`", row)]
    fields = [field for path in MODELS[name] for field in model_of(path).model_fields]
    assert sorted(listed) == sorted(fields)


@pytest.mark.parametrize("name", MODELS)
def test_the_tables_give_the_defaults_that_there_are(name: str) -> None:
    """Where a default is a number or a name; what depends on the target is said in words."""
    fields: dict[str, list[Any]] = {}
    for path in MODELS[name]:
        for field, info in model_of(path).model_fields.items():
            fields.setdefault(field, []).append(info.get_default(call_default_factory=True))
    checked = 0
    for row, said in option_rows(name):
        names = re.findall(r"`(\w+)`", row)
        given = [part.strip("` ") for part in said.split(",")]
        for field, value in zip(names, given, strict=False):
            if len(names) != len(given) or not re.fullmatch(r"[\d.]+(e-?\d+)?|true|false", value):
                continue
            assert any(yaml.safe_load(value) == default for default in fields[field]), (
                field,
                value,
            )
            checked += 1
    assert checked > 3


def test_what_the_readme_of_domino_adds_is_what_domino_has_more() -> None:
    rows = option_rows("draftcore-domino")
    listed = {field for row, _ in rows for field in re.findall(r"`(\w+)`", row)}
    domino = set(model_of("draftcore_domino.options:DominoOptions").model_fields)
    dflash = set(model_of("draftcore_dflash.options:DFlashOptions").model_fields)
    assert listed == domino - dflash
    assert dflash - domino == {"loss", "dpace_alpha"}


@pytest.mark.parametrize("name", READMES)
def test_verbs_sessions_and_files_that_are_named_exist(name: str) -> None:
    verbs = set(re.findall(r"^(?:\$ )?draftcore ([a-z-]+)|`draftcore ([a-z-]+)", TEXT[name], re.M))
    there = CliRunner().invoke(main, ["--help"]).output
    assert {verb for pair in verbs for verb in pair if verb and verb not in there} == set()
    noxfile = (ROOT / "noxfile.py").read_text()
    for session in re.findall(r"nox -s \"?([\w-]+)", TEXT[name]):
        function = session.replace("-", "_")
        assert f"def {function}(session" in noxfile or f'name="{session}"' in noxfile
    for file in re.findall(r"`((?:draftcore\w*|docs|tests|internals)/[\w./-]+)`", TEXT[name]):
        assert any((root / file).exists() for root in (ROOT, ROOT / "plugins" / name)), file


@pytest.mark.parametrize("name", READMES)
def test_what_pip_is_asked_for_is_the_dist_with_extras_that_it_has(name: str) -> None:
    project = tomllib.loads((READMES[name].parent / "pyproject.toml").read_text())["project"]
    extras = re.findall(rf"pip install '?{name}\[(\w+)\]", TEXT[name])
    assert set(extras) <= set(project.get("optional-dependencies", {}))
    assert project["name"] == name
