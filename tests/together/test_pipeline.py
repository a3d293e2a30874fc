"""From conversations to an export, by the command line and from Python, and what people read of it."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import draftcore
from draftcore.contracts.algorithm import Sample, SampleId
from draftcore.drafts import open_draft
from draftcore.training.loop import collate
from tests.together.conftest import TWO_DRAFTS, NewProject, Project

NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart/notebook.ipynb"


def test_what_was_trained_is_evaluated_and_exported_to_the_bit(trained: Project) -> None:
    """The fixture captured and trained it."""
    assert "already trained" in trained.cli("train").output
    report = json.loads(trained.cli("eval", "--json").stdout)
    assert report["lossless"] is True
    assert (trained.run / "eval" / "acceptance.png").exists()
    shared = trained.cli("eval", "target.tensor_parallel=2", ok=False).output
    assert "set target.tensor_parallel=1 to decode" in shared
    before = os.umask(0o027)
    trained.cli("export", ok=False)
    os.umask(before)
    export = trained.run / "export"
    origin = json.loads((export / "draftcore.json").read_text())
    assert origin["samples_seen"] == 24
    assert {plugin["name"] for plugin in origin["plugins"]} >= {"eagle3", "hf", "file"}
    for file in export.iterdir():
        assert file.stat().st_mode & 0o777 == 0o640, "as the umask says, weights and all"
        assert str(trained.folder.parent).encode() not in file.read_bytes(), "no path of ours"
    assert origin["target"] == Path(trained.config["target"]["path"]).name
    assert "--force replaces an export" in trained.cli("export", ok=False).output
    trained.cli("export", "--force")
    again = json.loads(trained.cli("eval", "--export", export, "--json").stdout)
    assert again["acceptance_length"] == report["acceptance_length"]
    with draftcore.open_run(trained.yaml) as run:
        opened = [open_draft(run.drafts[0], None, place)[0] for place in (None, export)]
    kept, exported = (draft.module.state_dict() for draft in opened)
    assert kept.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in kept.items())
    (export / "draftcore.json").unlink()
    assert "is not empty" in trained.cli("export", "--force", ok=False).output


def test_a_report_says_what_it_is_about_and_lists_its_prompts(
    trained: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has the figures that plugins add. While it decodes, lines say how far a batch is."""
    (file := trained.folder / "gain.py").write_text(
        "from draftcore import hookimpl\n"
        "@hookimpl\n"
        "def eval_metrics(draft, report):\n"
        "    weights = sum(p.numel() for p in draft.module.parameters())\n"
        "    return {'tokens_per_weight': report['tokens'] / weights}\n"
    )
    monkeypatch.setattr("draftcore_eval.decode.SECONDS_BETWEEN_LINES", 0.001)
    output = trained.cli("eval", plugin=file).output
    assert "decoding 2/3" in output
    assert re.search(r"decoding 0/3  (\d+ tokens of )?the batch under way", output)
    assert "tokens_per_weight  " in output
    report = json.loads((trained.run / "eval" / "report.json").read_text())
    assert 0 < report["tokens_per_weight"] < report["tokens"]
    about = report["about"]
    assert (about["algorithm"], about["step"], about["dtype"]) == ("eagle3", 6, "float32")
    assert about["data"] == trained.config["data"]["eval"]
    assert about["eval"]["max_new_tokens"] == 16
    assert {"draftcore", "torch", "transformers"} <= about["versions"].keys()
    assert {plugin["name"] for plugin in about["plugins"]} >= {"eagle3"}
    assert len(report["rows"]) == report["prompts"] == 3
    assert sum(row["rounds"] for row in report["rows"]) == report["rounds"]
    assert all("assistant\n" in row["prompt"] and row["continuation"] for row in report["rows"])
    with Path(about["data"]).open("a") as rows:
        rows.write("{}\n")
    other = json.loads(trained.cli("eval", "--json").stdout)["about"]
    assert other["data_digest"] != about["data_digest"]
    assert about["left_out"] == {}
    assert sum(other["left_out"].values()) == 1


def test_several_drafts_are_evaluated_and_exported_all_or_by_label(
    tmp_path: Path, new_project: NewProject
) -> None:
    """And shown side by side."""
    project = new_project(tmp_path / "several", algorithm=None, drafts=TWO_DRAFTS)
    project.cli("train", "train.max_steps=2", "train.eval_every=1", "train.eval_prompts=1")
    reports = json.loads(project.cli("eval", "--json").stdout)
    assert list(reports) == ["blocks", "domino"]
    assert all(report["lossless"] for report in reports.values())
    output = project.cli("eval").output
    assert "draft                         domino" in output
    table = output[output.index("draft   acceptance length") :].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["blocks", "domino"]
    assert (project.run / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (project.run / "domino" / "eval" / "report.json").exists()
    one = json.loads(project.cli("eval", "--draft", "domino", "--json").stdout)
    assert list(one) == ["domino"]
    project.cli("export", "--draft", "blocks")
    assert not (project.run / "domino" / "export").exists()
    project.cli("export", "--draft", "domino", "--out", tmp_path / "served")
    assert (tmp_path / "served" / "config.json").exists()


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It captures, trains, evaluates and exports from Python; here on fewer rows."""
    monkeypatch.chdir(NOTEBOOK.parents[2])
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, Any] = {"display": print}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        text = "".join(cell["source"]).replace("runs/notebook", str(tmp_path / "run"))
        exec(compile(text.replace("limit=60", "limit=16"), str(NOTEBOOK), "exec"), names)
    assert (names["done"].reason, names["report"].prompts) == ("complete", 4)
    assert (tmp_path / "run" / "export" / "config.json").exists()
    few = (f"run={tmp_path / 'run'}", f"store=file:{tmp_path / 'features'}", "data.limit=4")
    assert draftcore.capture(names["CONFIG"], *few).startswith("captured 4 samples")


def test_a_run_without_a_terminal_prints_lines_as_it_goes(trained: Project) -> None:
    again = (f"run={trained.folder}/again", "train.log_every=2", "train.eval_every=3")
    output = trained.cli("train", *again).output
    for step in (2, 4, 6):
        assert f"training {step}/6  mean loss " in output
    assert "training 3/6" not in output
    assert "tokens/s" in output
    assert "step 3: held-out mean loss " in output
    assert "  acceptance length " in output
    (told,) = re.findall(r"^first step after [\d.]+ s: (.*)", output, re.MULTILINE)
    first, *later = trained.lines()
    assert {f"start_{part.split()[0]}" for part in told.split(", ")} <= first.keys()
    assert not any("start_step" in line for line in later)
    assert {"time", "epoch", "tokens", "tokens_per_second", "seconds"} <= first.keys()
    assert first["tokens_per_second"] == pytest.approx(first["tokens"] / first["seconds"])


def test_features_are_moved_to_the_device_before_they_are_padded(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host the padding of long samples took an eighth of a GPU's step."""
    padded, pad = set[str](), torch.nn.utils.rnn.pad_sequence

    def noted(parts: list[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        padded.update(part.device.type for part in parts if part.ndim == 2)
        return pad(parts, *args, **kwargs)

    def sample(length: int) -> Sample:
        ids_T, features = torch.ones(length).long(), draft.request().names
        empty = {name: torch.zeros(length, 8) for name in features}
        return Sample(SampleId(f"{length:024x}", 1), ids_T, ids_T.bool(), empty)

    monkeypatch.setattr("draftcore_nn.batches.pad_sequence", noted)
    with draftcore.open_run(project.yaml) as run:
        (draft,) = run.drafts
        batch = collate(draft, draft.request(), [sample(3), sample(5)], torch.device("meta"))
    assert padded == {batch.token_ids_BT.device.type} == {"meta"}
