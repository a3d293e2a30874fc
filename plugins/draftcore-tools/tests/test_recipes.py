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
KNOWN = {  # by name: the cells of the page's table
    cells[0]: cells[1:]
    for cells in (re.split(r" *\| *", line)[1:-1] for line in PAGE.splitlines())
    if cells and cells[0] in recipes()
}


@pytest.mark.parametrize("name", recipes())
def test_a_known_target_fits_as_the_page_says(name: str, tmp_path: Path, cli: Any) -> None:
    gpus, chosen, need, hours = KNOWN[name]
    overrides, file = re.findall(r"`(capture\S+)`", gpus), tmp_path / "run.yaml"
    asked = ["--gpus", re.match(r"\d+", gpus)[0], "--json", "--out", file]  # type: ignore[index]
    result = cli("plan", name, *asked, *overrides)
    told = json.loads(result.stdout)
    assert told["plan"]["fits"]
    keys = ("train.batch", "target.tensor_parallel", "topology.ranks", "topology.producers")
    settings = {key.split(".")[1]: told["settings"].get(key) for key in keys}
    assert chosen == ", ".join(f"{key} {value}" for key, value in settings.items() if value)
    assert float(need) == pytest.approx(told["plan"]["memory"]["fullest"] / 2**30, rel=0.1)
    assert float(hours) == pytest.approx(sum(told["plan"]["hours"].values()), rel=0.25)
    assert load_config(file).target.options["path"] == recipes()[name].model
    lines = file.read_text().splitlines()
    assert all("# " in line for line in lines if not line.endswith(":"))
    assert all(one.source in file.read_text() for one in recipes()[name].published)


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
    refused = cli("plan", "llama-3.1-70b", "--out", tmp_path / "run.yaml")
    assert refused.exit_code == 2
    assert "the target 131.4 GiB" in refused.output
    assert "--gpus 3 suffice" in refused.output
    assert not any(tmp_path.iterdir())
