"""From Python: the verbs as functions, and what a person reads of a run while it works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from draftcore_eval.verb import evaluate

import draftcore
from draftcore.errors import UsageError

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project

NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart/notebook.ipynb"


def test_a_program_trains_evaluates_and_exports(project: Project) -> None:
    assert draftcore.capture(project.yaml).startswith("captured 24 samples")
    done = draftcore.train(str(project.yaml), "train.epochs=2")
    assert (done.reason, done.checkpoints[""].name) == ("complete", "step-00000012")
    (report,) = evaluate(project.yaml, "train.epochs=2", "eval.prompts=2")
    assert (report.prompts, report.lossless) == (2, True)
    (folder,) = draftcore.export(project.yaml)
    assert (folder / "config.json").exists()
    with pytest.raises(UsageError, match="--force replaces an export"):
        draftcore.export(project.yaml)
    draftcore.export(project.yaml, force=True)
    (folder / "draftcore.json").unlink()
    with pytest.raises(UsageError, match="is not empty"):
        draftcore.export(project.yaml, force=True)


def test_processes_of_a_topology_are_started_from_python_too(project: Project) -> None:
    done = draftcore.train(project.yaml, "topology.ranks=2", "train.max_steps=2")
    assert (done.reason, done.checkpoints[""].name) == ("complete", "step-00000002")
    assert len(project.losses()) == 2


def test_a_report_says_what_it_is_about_and_lists_its_prompts(project: Project) -> None:
    project.cli("train")
    output = project.cli("eval").output
    assert "decoding 2/3" in output
    report = json.loads((project.run / "eval" / "report.json").read_text())
    about = report["about"]
    assert (about["algorithm"], about["step"], about["dtype"]) == ("eagle3", 6, "float32")
    assert about["data"] == project.config["data"]["eval"]
    assert about["eval"]["max_new_tokens"] == 16
    assert {"draftcore", "torch", "transformers"} <= about["versions"].keys()
    assert {plugin["name"] for plugin in about["plugins"]} >= {"eagle3"}
    assert len(report["rows"]) == report["prompts"] == 3
    rounds = sum(row["rounds"] for row in report["rows"])
    assert rounds == report["rounds"]
    with Path(about["data"]).open("a") as file:
        file.write("{}\n")
    project.cli("eval")
    other = json.loads((project.run / "eval" / "report.json").read_text())["about"]
    assert other["data_digest"] != about["data_digest"]
    assert about["left_out"] == {}
    assert sum(other["left_out"].values()) == 1


def test_several_drafts_are_shown_side_by_side(tmp_path: Path, new_project: NewProject) -> None:
    options = {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2, "num_drafts": 3}
    drafts = {
        label: {"algorithm": {"name": "eagle3", "options": options}, "train": {"lr": lr}}
        for label, lr in (("quick", 3e-3), ("slow", 1e-4))
    }
    project = new_project(tmp_path, algorithm=None, drafts=drafts)
    project.cli("train")
    output = project.cli("eval").output
    table = output[output.index("draft  acceptance length") :].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["quick", "slow"]
    assert (project.run / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_terminal_prints_lines_as_it_goes(project: Project) -> None:
    output = project.cli("train", "train.log_every=2", "train.eval_every=3").output
    for step in (2, 4, 6):
        assert f"training {step}/6  loss " in output
    assert "training 3/6" not in output
    assert "tokens/s" in output
    assert "step 3: " in output
    assert "acceptance_length " in output
    lines = [json.loads(line) for line in (project.run / "metrics.jsonl").open()]
    first, *_ = (line for line in lines if "loss" in line)
    assert {"time", "epoch", "tokens", "tokens_per_second", "seconds"} <= first.keys()
    assert first["tokens_per_second"] == pytest.approx(first["tokens"] / first["seconds"])


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, one after the other, from the repository's root, into another folder."""
    monkeypatch.chdir(NOTEBOOK.parents[2])
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names = {"display": print}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        text = "".join(cell["source"]).replace("runs/notebook", str(tmp_path / "run"))
        exec(compile(text, str(NOTEBOOK), "exec"), names)
    assert (tmp_path / "run" / "export" / "config.json").exists()
