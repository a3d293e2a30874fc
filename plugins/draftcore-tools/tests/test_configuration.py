"""`draftcore config`: what a run's settings come to, and the page of all keys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftcore.config import RunConfig

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
RUN = {
    "run": "runs/a",
    "target": {"path": "nobody/nothing"},
    "algorithm": {"name": "eagle3", "options": {"ttt_length": 3}},
    "train": {"epochs": 2},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (file := tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return file


def test_what_is_printed_is_the_same_run_with_who_set_each_key(run: Path, cli: Any) -> None:
    text = cli("config", run, "train.lr=3e-4", "eval={batch: 4}").output
    data = yaml.safe_load(text)
    assert RunConfig.model_validate(data).train.epochs == 2
    assert data["target"] | {"path": "nobody/nothing", "dtype": "auto"} == data["target"]
    assert (data["data"]["max_length"], data["data"]["max_skipped"]) == (2048, 0.01)
    assert data["algorithm"]["options"]["ttt_length"] == 3
    assert data["algorithm"]["options"]["num_drafts"] == 7  # the plugin's own default
    origins = {
        line.split("#")[0].strip(): line.split("# ")[1] for line in text.splitlines() if "#" in line
    }
    assert origins["lr: 0.0003"] == origins["batch: 4"] == "command line"
    assert origins["epochs: 2"] == origins["ttt_length: 3"] == str(run)
    assert origins["num_drafts: 7"] == origins["seed: 0"] == "default"


def test_a_program_gets_records_and_neither_torch_nor_transformers_is_imported(run: Path) -> None:
    code = (
        "import sys; from draftcore_tools.api import config; from draftcore.options import read_yaml;"
        "told = {s.key: (s.value, s.origin) for s in config(read_yaml(sys.argv[1]), 'train.lr=1')};"
        "assert told['train.lr'] == (1, 'command line'), told;"
        "assert told['train.epochs'] == (2, 'the configuration'), told;"
        "assert not {'torch', 'transformers', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True)


def test_a_section_has_the_keys_of_the_plugin_that_it_selects(run: Path, cli: Any) -> None:
    """And no others."""
    text = cli("config", run, "data={name: one-row, prompt: [1], answer: [2, 3]}").output
    assert yaml.safe_load(text)["data"] == {
        "name": "one-row", "plugin": "", "max_skipped": 0.01, "prompt": [1], "answer": [2, 3],
    }  # fmt: skip
    assert "data.train" not in text
    wrong = {"data.max_lenght=9": "max_length", "algorithm.options.ttt_lenght=3": "ttt_length"}
    for override, right in wrong.items():  # before anything is opened
        result = cli("config", run, override)
        assert (result.exit_code, f"did you mean {right!r}" in result.output) == (2, True)


def test_the_page_of_all_keys_is_what_the_verb_prints_and_the_schema_has_every_section(
    cli: Any,
) -> None:
    assert cli("config", "--keys").output in PAGE.read_text(), "draftcore config --keys prints it"
    schema = json.loads(cli("config", "--schema").output)
    assert schema["properties"].keys() == RunConfig.model_fields.keys()
    target = schema["$defs"]["TargetConfig"]
    assert (target["required"], target["properties"]["name"]["default"]) == (["path"], "hf")
    assert "name a run's YAML file" in cli("config").output
