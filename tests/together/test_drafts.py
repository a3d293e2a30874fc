"""Several drafts in one run: one capture, and each gets the result it would have had alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from tests.together.conftest import BLOCKS, OPTIONS

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


Drafts = dict[str, dict[str, Any]]
Make = Callable[..., "Project"]
Weights = dict[str, torch.Tensor]
DRAFTS: Drafts = {
    "eagle": {"algorithm": {"name": "eagle3", "options": OPTIONS["eagle3"]}},
    "blocks": {"algorithm": {"name": "dflash", "options": BLOCKS}, "train": {"lr": 0.002}},
    "wide": {"algorithm": {"name": "dflash", "options": {**BLOCKS, "loss": "dpace"}}},
    "domino": {
        "algorithm": {"name": "domino", "options": OPTIONS["domino"]},
        "train": {"clip": 0.3, "schedule": "constant"},
    },
}


@pytest.fixture
def several(tmp_path: Path, new_project: NewProject) -> Make:
    def make(name: str = "several", drafts: Drafts = DRAFTS, **changes: Any) -> Project:
        return new_project(tmp_path / name, algorithm=None, drafts=drafts, **changes)

    return make


@pytest.fixture
def alone(tmp_path: Path, new_project: NewProject) -> Make:
    """A project with one of the drafts, the run's settings overlaid with the draft's own."""

    def make(label: str, **changes: Any) -> Project:
        draft = DRAFTS[label]
        return new_project(
            tmp_path / f"alone-{label}",
            algorithm=draft["algorithm"],
            train=draft.get("train", {}),
            **changes,
        )

    return make


def weights(folder: Path, step: int = 6) -> Weights:
    return dict(load_file(folder / f"checkpoints/step-{step:08d}/draft.safetensors"))


def require_same(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_each_draft_gets_the_bits_it_would_have_had_alone(several: Make, alone: Make) -> None:
    together = several(store="auto")
    output = together.cli("train").output
    for label in DRAFTS:
        assert f"{label}: complete: step 6 of 6, 24 samples" in output
        one = alone(label, store="auto")
        one.cli("train")
        assert together.losses(together.run / label) == one.losses()
        require_same(weights(together.run / label), weights(one.run))


def test_drafts_share_one_capture_that_stores_nothing_twice(several: Make, alone: Make) -> None:
    together = several()
    assert "captured 24 samples" in together.cli("capture").output
    together.cli("train")
    manifest = json.loads((together.folder / "features" / "manifest.json").read_text())
    assert manifest["request"]["layers"] == [1, 2, 3, 4]
    shards = (together.folder / "features").glob("shard-*.safetensors")
    tensors = [name for shard in shards for name in load_file(shard)]
    assert len(tensors) == 24 * len(["1", "2", "3", "4", "last", "tokens", "mask"])
    one = alone("blocks")
    shutil.rmtree(one.folder / "features", ignore_errors=True)
    one.cli("train", f"store=file:{together.folder / 'features'}", "data.train=null")
    assert one.losses() == together.losses(together.run / "blocks")


def test_a_killed_run_resumes_each_draft_from_its_own_checkpoint(several: Make) -> None:
    straight = several("straight", train={"checkpoint_every": 2})
    straight.cli("train")
    killed = several("killed", train={"checkpoint_every": 2})
    process = killed.start("train")
    log = killed.run / "domino" / "metrics.jsonl"
    while not log.exists() or len(killed.losses(log.parent)) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    behind = killed.run / "eagle" / "checkpoints"
    for folder in sorted(behind.iterdir())[1:]:  # as if it had died before this draft could save
        shutil.rmtree(folder)
    output = killed.cli("train").output
    assert "eagle: resuming from step 2 of 6" in output
    assert "eagle: a draft of 1 layer of width " in output
    for label in DRAFTS:
        assert killed.losses(killed.run / label) == straight.losses(straight.run / label)
        require_same(weights(killed.run / label), weights(straight.run / label))


def test_a_draft_that_fails_leaves_the_others_alone(several: Make, alone: Make) -> None:
    drafts = {
        "blocks": DRAFTS["blocks"],
        "wild": {**DRAFTS["domino"], "train": {"lr": 100, "weight_decay": 1}},
    }
    together = several(drafts=drafts)
    result = together.cli("train", ok=False)
    assert result.exit_code == 1
    assert "1 of 2 drafts failed" in result.output
    assert "wild: a weight at step" in result.output
    one = alone("blocks")
    one.cli("train")
    require_same(weights(together.run / "blocks"), weights(one.run))


def test_drafts_are_evaluated_and_exported_all_or_by_label(several: Make) -> None:
    together = several(drafts={label: DRAFTS[label] for label in ("blocks", "domino")})
    together.cli("train", "train.max_steps=2", "train.eval_every=1", "train.eval_prompts=1")
    reports = json.loads(together.cli("eval", "--json").stdout)
    assert list(reports) == ["blocks", "domino"]
    assert all(report["lossless"] for report in reports.values())
    assert "draft                         domino" in together.cli("eval").output
    assert (together.run / "domino" / "eval" / "report.json").exists()
    one = json.loads(together.cli("eval", "--draft", "domino", "--json").stdout)
    assert list(one) == ["domino"]
    together.cli("export", "--draft", "blocks")
    assert not (together.run / "domino" / "export").exists()
    together.cli("export", "--draft", "domino", "--out", str(together.folder / "served"))
    assert (together.folder / "served" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["eval", "--draft", "dominos"], ["dominos", "domino", "blocks"]),
        (["export", "--out", "somewhere"], ["--out", "--draft"]),
        (["train", "algorithm.name=dflash"], ["either algorithm", "or drafts"]),
        (["train", "drafts=null"], ["drafts"]),
        (["train", "drafts={}"], ["either algorithm", "or drafts"]),
        (["train", "drafts.data.algorithm.name=dflash"], ["'data'"]),
        (["train", "drafts.domino.train.batch=3"], ["drafts.domino.train.batch", "clip"]),
        (["train", "drafts.domino.algorithm.name=dominoes"], ["dominoes", "domino"]),
    ],
)
def test_what_is_wrong_is_named(several: Make, arguments: list[str], says: list[str]) -> None:
    together = several(drafts={label: DRAFTS[label] for label in ("blocks", "domino")})
    verb, *rest = arguments
    result = together.cli(verb, *rest, ok=False)
    assert result.exit_code == 2, result.output
    for text in says:
        assert text in result.output
