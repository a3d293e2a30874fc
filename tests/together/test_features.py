"""Features beyond hidden states, the target's likeliest tokens and embeddings, through whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from draftcore.contracts.capture import FeatureRequest

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project

ODD = Path(__file__).with_name("odd_algorithm.py")
NARROW = {"name": "odd", "options": {"topk": 3}}
WIDE = {"name": "odd", "options": {"topk": 6}}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(run / "checkpoints/step-00000006/draft.safetensors"))


def require_same(one: Project, other: Project, label: str = "") -> None:
    """Compare losses and weights to the bit; `label` is the draft of the other."""
    run = other.run / label
    assert one.losses() == other.losses(run)
    ours, theirs = weights(one.run), weights(run)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_they_train_to_the_same_bits_from_anywhere_and_resumed(
    tmp_path: Path, new_project: NewProject, capfd: pytest.CaptureFixture[str]
) -> None:
    here = new_project(tmp_path / "here", algorithm=NARROW, store="auto")
    here.cli("train", "train.eval_every=3", "train.eval_prompts=0", plugin=ODD)
    kept = new_project(tmp_path / "kept", algorithm=NARROW)
    kept.cli("capture", plugin=ODD)
    kept.cli("train", plugin=ODD)
    constant = {"train": {"schedule": "constant"}}
    straight = new_project(tmp_path / "straight", algorithm=NARROW, **constant)
    straight.cli("train", plugin=ODD)
    queued = new_project(tmp_path / "queued", algorithm=NARROW, store="auto", **constant)
    queued.cli("train", "topology.producers=1", "train.max_steps=4", plugin=ODD)
    queued.cli("train", "topology.producers=1", "train.max_steps=6", plugin=ODD)
    assert "resuming from step 4 of 6" in capfd.readouterr().out
    require_same(here, kept)
    require_same(straight, queued)


def test_a_manifest_of_before_there_were_others_is_read() -> None:
    held = {"layers": [1, 3], "last_hidden": True, "dtype": "float32"}
    assert FeatureRequest.from_json(held) == FeatureRequest((1, 3), True, "float32")


def test_each_draft_gets_as_many_tokens_as_it_asks_for(
    tmp_path: Path, new_project: NewProject
) -> None:
    """Beside a draft that asks for more, and from a store that was made for that one."""
    alone = new_project(tmp_path / "alone", algorithm=NARROW, store="auto")
    alone.cli("train", plugin=ODD)
    drafts = {"narrow": {"algorithm": NARROW}, "wide": {"algorithm": WIDE}}
    both = new_project(tmp_path / "both", algorithm=None, drafts=drafts)
    both.cli("train", plugin=ODD)
    require_same(alone, both, "narrow")
    later = new_project(tmp_path / "later", algorithm=NARROW, store=both.config["store"])
    later.cli("train", plugin=ODD)
    require_same(alone, later)
    more = new_project(
        tmp_path / "more",
        algorithm={"name": "odd", "options": {"topk": 7}},
        store=both.config["store"],
    )
    assert "topk: 7 here, 6 in the store" in more.cli("train", ok=False, plugin=ODD).output


def test_a_capture_without_them_is_refused_before_any_row_is_rendered(
    tmp_path: Path, new_project: NewProject
) -> None:
    project = new_project(tmp_path / "project", algorithm=NARROW, capture={"name": "sglang"})
    said = project.cli("train", ok=False, plugin=ODD).output
    assert "'odd' asks for the target's topk" in said
    assert "'sglang' does not give them\n  set capture.name=hf" in said
    assert not (project.run / "data").exists()
