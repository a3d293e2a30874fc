"""From conversations to an export, through the command line, with a real plugin and a real target."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from draftcore_sdk.targets import tiny_target
from safetensors.torch import load_file

from draftcore.config import load_config
from draftcore.contracts.algorithm import Sample, SampleId
from draftcore.drafts import open_draft
from draftcore.plugins.registry import load_plugins
from draftcore.run import Run
from draftcore.training.loop import collate

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


def test_capture_train_eval_export(project: Project) -> None:
    """Features are captured once, and the export is the draft that was trained, to the bit."""
    assert "captured 24 samples" in project.cli("capture").output
    features = project.folder / "features"
    shards = {file: file.stat().st_mtime_ns for file in features.glob("shard-*")}
    assert "complete: step 6 of 6, 24 samples" in project.cli("train").output
    assert {file: file.stat().st_mtime_ns for file in features.glob("shard-*")} == shards
    assert "already trained" in project.cli("train").output
    report = json.loads(project.cli("eval", "--json").stdout)
    assert report["lossless"] is True
    assert report["prompts"] == 3
    assert (project.run / "eval" / "acceptance.png").exists()
    shared = project.cli("eval", "target.tensor_parallel=2", ok=False).output
    assert "set target.tensor_parallel=1 to decode" in shared
    before = os.umask(0o027)
    project.cli("export", ok=False)
    os.umask(before)
    origin = json.loads((project.run / "export" / "draftcore.json").read_text())
    assert origin["samples_seen"] == 24
    assert {plugin["name"] for plugin in origin["plugins"]} >= {"eagle3", "hf", "file"}
    for file in (project.run / "export").iterdir():
        assert file.stat().st_mode & 0o777 == 0o640, "as the umask says, weights and all"
        assert str(project.folder.parent).encode() not in file.read_bytes(), "no path of ours"
    assert origin["target"] == Path(project.config["target"]["path"]).name
    again = json.loads(project.cli("eval", "--export", project.run / "export", "--json").stdout)
    assert again["acceptance_length"] == report["acceptance_length"]
    (draft,) = Run(load_config(project.yaml), load_plugins()).drafts
    trained = open_draft(draft, None, None)[0].module.state_dict()
    exported = open_draft(draft, None, project.run / "export")[0].module.state_dict()
    assert trained.keys() == exported.keys()
    for name, tensor in trained.items():
        assert torch.equal(tensor, exported[name]), name


def test_offline_colocated_and_captured_elsewhere_give_the_same_bits(
    tmp_path: Path, new_project: NewProject
) -> None:
    """Three runs in processes of their own that share nothing but what each names."""
    offline = new_project(tmp_path / "offline")
    offline.finish("capture")
    offline.finish("train")
    colocated = new_project(tmp_path / "colocated", store="auto")
    colocated.finish("train")
    elsewhere = new_project(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "offline" / "features", tmp_path / "elsewhere" / "features")
    (tmp_path / "elsewhere" / "train.jsonl").unlink()
    elsewhere.finish("train", "data.train=null")
    assert len(offline.losses()) == 6
    assert offline.losses() == colocated.losses() == elsewhere.losses()
    weights = [
        load_file(p.run / "checkpoints/step-00000006/draft.safetensors")
        for p in (offline, colocated)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_two_epochs_use_every_sample_once_each_and_recapture_to_the_same_bits(
    tmp_path: Path, new_project: NewProject
) -> None:
    kept = new_project(tmp_path / "kept")
    kept.cli("train", "train.epochs=2")
    recaptured = new_project(tmp_path / "recaptured", store="auto")
    recaptured.cli("train", "train.epochs=2")
    assert len(kept.losses()) == 12
    assert kept.losses() == recaptured.losses()


def test_the_split_of_a_step_into_batches_does_not_change_the_update(
    tmp_path: Path, new_project: NewProject
) -> None:
    whole = new_project(tmp_path / "whole")
    whole.cli("train", "train.batch=24", "train.epochs=3")
    split = new_project(tmp_path / "split")
    split.cli("train", "train.batch=8", "train.accumulate=3", "train.epochs=3")
    assert len(whole.losses()) == 3
    for step, loss in whole.losses().items():
        assert split.losses()[step] == pytest.approx(loss, rel=1e-5)


def test_features_are_moved_to_the_device_before_they_are_padded(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host the padding of long samples took an eighth of a GPU's step."""
    padded, pad = list[str](), torch.nn.utils.rnn.pad_sequence

    def noted(parts: list[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        padded.extend(part.device.type for part in parts if part.ndim == 2)
        return pad(parts, *args, **kwargs)

    monkeypatch.setattr("draftcore_nn.batches.pad_sequence", noted)
    (draft,) = Run(load_config(project.yaml), load_plugins()).drafts
    samples = [
        Sample(
            SampleId(f"{length:024x}", 1),
            torch.ones(length, dtype=torch.long),
            torch.ones(length, dtype=torch.bool),
            {name: torch.zeros(length, 8) for name in draft.request().names},
        )
        for length in (3, 5)
    ]
    batch = collate(draft, draft.request(), samples, torch.device("meta"))
    assert set(padded) == {"meta"}
    assert batch.token_ids_BT.device.type == "meta"


def test_a_draft_learns_a_few_answers_of_the_real_target(
    tmp_path: Path, new_project: NewProject
) -> None:
    """The quickstart's target: thirty times over eight of its answers, the loss falls by half."""
    quickstart = Path(__file__).parents[2] / "examples" / "quickstart"
    project = new_project(
        tmp_path / "overfit",
        target={"path": str(quickstart / "target")},
        data={"train": str(quickstart / "data" / "train.jsonl"), "limit": 8},
        algorithm={"name": "eagle3", "options": {"ttt_length": 2}},
        train={"checkpoint_every": 500},
    )
    project.cli("train", "train.epochs=30")
    losses = list(project.losses().values())
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


def test_a_hub_id_is_all_that_changes_for_another_target(project: Project, tmp_path: Path) -> None:
    """A target in another folder, with another shape, trains by the same YAML."""
    other = tiny_target(tmp_path / "other", seed=3, hidden_size=32, num_hidden_layers=8)
    for verb in ("train", "eval"):
        project.cli(verb, f"target.path={other}", "train.max_steps=1")


def test_a_wrapper_from_a_loose_file_sees_every_step(project: Project, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    plugin = tmp_path / "watcher.py"
    plugin.write_text(
        "from pathlib import Path\n"
        "from draftcore import hookimpl\n"
        "@hookimpl(wrapper=True)\n"
        "def forward_loss(draft, batch, context):\n"
        "    output = yield\n"
        f"    with Path({str(seen)!r}).open('a') as stream:\n"
        "        print(context.step, len(batch.ids), file=stream)\n"
        "    return output\n"
    )
    project.cli("train", "train.max_steps=3", plugin=plugin)
    assert Path(seen).read_text().splitlines() == ["1 4", "2 4", "3 4"]
