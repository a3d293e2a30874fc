"""Captures beside training, from the command line: the bits are those of a run without.

One of the drafts has dropout, from torch's own generator. That no capture draws from it is for the
conformance suite of captures to say.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from draftcore.config import load_config
from draftcore.contracts.store import SampleRef, StoreItem
from draftcore.features.stores.memory import MemoryStore
from draftcore.plugins.registry import load
from draftcore.run.parts import Run
from draftcore.verbs import Role

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


DRAFTS = {
    "eagle": {"algorithm": {"name": "eagle3", "options": {"layers": [1, 2, 4], "ttt_length": 2}}},
    "odd": {"algorithm": {"name": "odd"}},
}
GRAPHS = {"name": "graphs", "options": {"backend": "recording", "lengths": [64, 256]}}
TRAIN = {
    "batch": 2,
    "accumulate": 2,
    "schedule": "constant",  # so that a run may be made longer
    "checkpoint_every": 2,
    "eval_every": 2,
    "eval_samples": 2,
    "eval_prompts": 0,  # the draft with dropout cannot decode
}


@pytest.fixture
def dropout(tmp_path: Path) -> Path:
    odd = Path(__file__).with_name("odd_algorithm.py").read_text()
    file = tmp_path / f"dropout_{tmp_path.name}.py"  # a module of a name of its own
    file.write_text(odd.replace("DROPOUT = 0.0", "DROPOUT = 0.5"))
    return file


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that stored, one entry a group."""
    seen, put = list[str](), MemoryStore.put_many

    def noted(self: MemoryStore, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        seen.append(threading.current_thread().name)
        return put(self, items)

    monkeypatch.setattr(MemoryStore, "put_many", noted)
    return seen


@pytest.mark.parametrize("prefill", [{"name": "eager"}, GRAPHS], ids=["eager", "recording"])
def test_overlap_changes_no_bit(
    tmp_path: Path,
    new_project: NewProject,
    dropout: Path,
    threads: list[str],
    prefill: dict[str, Any],
) -> None:
    """Several drafts of one capture, evaluated and saved on the way, stopped once and resumed."""
    changes = {"drafts": DRAFTS, "algorithm": None, "store": "memory", "samples": 20}
    changes["runner"] = {"prefill": prefill}
    plain = new_project(tmp_path / "plain", **changes, train=TRAIN)
    plain.cli("train", plugin=dropout)
    assert set(threads) == {threading.current_thread().name}
    threads.clear()
    beside = new_project(tmp_path / "beside", **changes, train=TRAIN)
    on = "train.overlap=true"
    beside.cli("train", on, "train.max_steps=3", plugin=dropout)
    assert "resuming from step 3" in beside.cli("train", on, plugin=dropout).output
    assert set(threads) == {threading.current_thread().name, "aside"}
    for label in DRAFTS:
        assert len(plain.losses(plain.run / label)) == 5
        assert beside.losses(beside.run / label) == plain.losses(plain.run / label)
        ours, theirs = (weights(project, label) for project in (beside, plain))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def weights(project: Project, label: str) -> dict[str, torch.Tensor]:
    return dict(load_file(project.run / label / "checkpoints/step-00000005/draft.safetensors"))


def test_a_stopped_run_leaves_nothing_and_resumes_to_the_same_bits(
    tmp_path: Path, new_project: NewProject
) -> None:
    decoded = {"eval_every": 5, "eval_samples": 2, "eval_prompts": 1}
    train = {"checkpoint_every": 4, "overlap": True, **decoded}
    changes = {"samples": 80, "store": "memory", "train": train}
    project = new_project(tmp_path / "stopped", **changes)
    process, log = project.start("train"), project.run / "metrics.jsonl"
    while not log.exists() or len(project.losses()) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted: step" in output
    assert "Traceback" not in output
    project.cli("train")
    straight = new_project(tmp_path / "straight", **changes)
    straight.cli("train", "train.overlap=false")
    assert project.losses() == straight.losses()


@pytest.mark.long
def test_two_ranks_train_alike_with_and_without(tmp_path: Path, new_project: NewProject) -> None:
    """The first captures beside the step; what ranks say to each other has the order it had."""
    losses = []
    for overlap in ("false", "true"):
        project = new_project(tmp_path / overlap, store="auto")
        project.torchrun(f"train.overlap={overlap}", "train.max_steps=4")
        losses.append(project.losses())
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


def test_it_is_on_where_it_was_asked_for_and_the_run_captures_itself(project: Project) -> None:
    def overlap(*overrides: str, role: Role = "both") -> torch.device | None:
        return Run(load_config(project.yaml, overrides), load(), role=role).overlap

    assert overlap() is None
    assert overlap("train.overlap=true") == torch.device("cpu")
    assert overlap("train.overlap=true", role="trainer") is None, "others capture"


def test_a_capture_that_cannot_work_beside_training_is_refused(project: Project) -> None:
    refused = project.cli("train", "train.overlap=true", "capture.name=sglang", ok=False)
    assert refused.exit_code == 2
    assert "capture 'sglang' cannot work beside training" in refused.output
    assert not (project.run / "checkpoints").exists()
