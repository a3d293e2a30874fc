"""The README's commands print what it shows, for a run on eight rows of the quickstart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftcore_data.options import DataOptions
from talking import QUICKSTART, Cli, Serve, chat, write_rows

from draftcore import open_run

ROOT = Path(__file__).parents[3]
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```console\n\$ draftcore (.*?)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
(RUN,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
TABLE = re.findall(r"^\| `(\w+)` \| (.+?) \| ", README, re.MULTILINE)
WORDS: dict[str, Any] = {"none": None, "all": None, "the target's": None}
FRESH = '```python\ndef fresh():\n    """Return a new list."""\n    return []\n```'


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()[:7]
    first = chat("Implement `fresh` in Python: Return a new list.", FRESH)
    write_rows(tmp_path / "rows.jsonl", first, *map(json.loads, lines))
    settings = {
        "run": "runs/mine",
        "target": {"path": str(QUICKSTART / "target"), "dtype": "float32", "device": "cpu"},
        "data": {"train": "rows.jsonl", "max_length": 300},
        "algorithm": {"name": "eagle3", "options": {"draft_vocab_size": 64}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("command", "expected"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_readme_shows_the_output(cli: Cli, serve: Serve, command: str, expected: str) -> None:
    given = command.replace("http://localhost:8000", serve().url)
    assert cli(*given.split()).stdout == expected


def test_the_commands_of_the_data_page_work_one_after_the_other(cli: Cli, serve: Serve) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    commands = re.findall(r"^draftcore (data .*?)(?: +#.*)?$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        shown = cli(*command.replace("http://localhost:8000", serve().url).split()).stdout
    assert "⟦answer 1 to" in shown, "what was made is what is learned"


def test_the_readmes_run_names_its_rows_and_its_table_the_options_that_there_are() -> None:
    Path("readme.yaml").write_text(RUN)
    with open_run("readme.yaml", (f"target.path={QUICKSTART / 'target'}",)) as run:
        assert run.data.train == "chats.jsonl, hf:org/name?split=train"
        assert (run.data.eval, run.data.longest) == ("held-out.jsonl", 2048), "as the target's"
        assert not run.folder.exists(), "rows are read when they are asked for"
    fields = DataOptions.model_fields
    assert [name for name, _ in TABLE] == list(fields)
    for name, default in TABLE:
        said = WORDS[default] if default in WORDS else yaml.safe_load(default)
        assert (said or None) == (fields[name].default or None)
