"""`draftcore plan MODEL`: a run that fits is written, each setting with its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftcore_sdk.targets import conversations
from draftcore_tools.recipes import recipes

from draftcore import load_config

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
KNOWN = {  # by name: the GPUs of the page's table, the weights in GiB, and what features take
    cells[0]: (cells[1], float(cells[3]), cells[6])
    for cells in (re.split(r" *\| *", line)[1:-1] for line in PAGE.splitlines())
    if cells and cells[0] in recipes()
}
SMALL = ["train.batch=1", "algorithm.options.ttt_length=1"]  # quickly planned


@pytest.mark.parametrize("name", recipes())
def test_a_known_target_fits_the_gpus_that_the_page_says(
    name: str, tmp_path: Path, cli: Any
) -> None:
    gpus, weights, features = KNOWN[name]
    servers, file = re.findall(r"`(capture\S+)`", gpus), tmp_path / "run.yaml"
    asked = ["--gpus", gpus.partition(",")[0], "--json", "--out", file]
    told = json.loads(cli("plan", name, *asked, *SMALL, *servers).stdout)
    assert told["plan"]["fits"]
    parts = told["settings"].get("target.tensor_parallel", 1)
    assert told["plan"]["memory"]["target"] * parts / 2**30 == pytest.approx(weights, abs=0.6)
    assert f"features take {features} of disk" in told["reasons"]["store"]
    assert load_config(file).target.options["path"] == recipes()[name].model
    text = file.read_text()
    assert all("# " in line for line in text.splitlines() if not line.endswith(":"))
    assert all(one.source in text for one in recipes()[name].published)


def test_the_page_shows_what_the_verb_does(tmp_path: Path, monkeypatch: Any, cli: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    printed, written = re.findall(r"```(?:yaml)?\n(.*?)```", PAGE, re.DOTALL)[:2]
    assert f"$ draftcore plan qwen3-8b\n{cli('plan', 'qwen3-8b').output}" == printed
    assert Path("run.yaml").read_text().endswith(f"\n{written}")


def test_a_run_for_a_folder_and_its_data_is_what_the_same_verb_plans(
    target_folder: Path, tmp_path: Path, cli: Any
) -> None:
    data, file = conversations(tmp_path / "train.jsonl", 30), tmp_path / "run.yaml"
    asked = ["--data", data, "--disk", "1GB", "--gpu", "1GB", "--out", file]
    written = cli("plan", target_folder, *asked, f"run={tmp_path / 'run'}", "train.lr=3e-4")
    config = load_config(file)
    assert (config.train.epochs, config.train.lr, config.train.batch) == (10, 3e-4, 8)
    assert config.store == f"file:{tmp_path / 'run'}/features"
    assert config.data.options["max_length"] == 512  # of rows that are shorter by far
    planned = cli("plan", file, "--device", "h100").output
    assert [line for line in planned.splitlines() if line.startswith(("rows", "steps"))]
    assert all(line in written.output for line in planned.splitlines() if line.startswith("rows"))
    again = cli("plan", target_folder, *asked)
    assert (again.exit_code, "--force" in again.output) == (2, True)
    assert cli("plan", target_folder, *asked, "--force", "train.epochs=3").exit_code == 0
    assert yaml.safe_load(file.read_text())["train"]["epochs"] == 3


def test_what_fits_nowhere_is_said_with_the_figures(tmp_path: Path, cli: Any) -> None:
    refused = cli("plan", "llama-3.1-70b", "--out", tmp_path / "run.yaml", *SMALL)
    assert refused.exit_code == 2
    assert "the target 131.4 GiB" in refused.output
    assert "--gpus 3 suffices" in refused.output
    assert not any(tmp_path.iterdir())
