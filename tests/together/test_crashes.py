"""Stop, kill and resume: nothing is lost, nothing is done twice, and the bits are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors import safe_open

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def steps(project: Project) -> int:
    file = project.run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, new_project: NewProject) -> dict[int, float]:
    """The losses of a run that nothing interrupts."""
    project = new_project(tmp_path_factory.mktemp("straight") / "run", samples=48)
    project.cli("train")
    return project.losses()


STOPS = [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]


@pytest.mark.parametrize("number", STOPS)
def test_a_stopped_run_resumes_to_the_same_bits(
    tmp_path: Path, new_project: NewProject, straight: dict[int, float], number: int
) -> None:
    project = new_project(tmp_path / "stopped", samples=48)
    process = project.start("train")
    wait_for(lambda: steps(project) >= 5, process)
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=60)
    before = steps(project)
    assert before < 12, "the run ended before it was stopped"
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, output
        assert f"interrupted: step {before} of 12" in output
    assert "resuming from step" in project.cli("train").output
    assert project.losses() == straight


def test_a_checkpoint_without_its_mark_does_not_exist(
    tmp_path: Path, new_project: NewProject, straight: dict[int, float]
) -> None:
    project = new_project(tmp_path / "marked", samples=48)
    project.cli("train")
    newest = project.run / "checkpoints" / "step-00000012"
    (newest / "COMPLETE").unlink()
    assert "resuming from step 10 of 12" in project.cli("train").output
    assert project.losses() == straight


def test_a_damaged_checkpoint_is_named(project: Project) -> None:
    project.cli("train", "train.max_steps=2")
    file = project.run / "checkpoints" / "step-00000002" / "draft.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    result = project.cli("eval", ok=False)
    assert result.exit_code == 1
    assert "cannot read" in result.output
    assert "draft.safetensors" in result.output


def test_a_killed_capture_goes_on_without_doing_a_sample_twice(
    tmp_path: Path, new_project: NewProject
) -> None:
    project = new_project(tmp_path / "capture", samples=400)
    features = tmp_path / "capture" / "features"
    process = project.start("capture")
    wait_for(lambda: len(list(features.glob("shard-*.safetensors"))) >= 10, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    first = set(features.glob("shard-*.safetensors"))
    assert len(first) < 100, "the capture ended before it was killed"
    output = project.cli("capture").output
    shards = list(features.glob("shard-*.safetensors"))
    assert sum(len(sample_ids(shard)) for shard in shards) == 400
    assert len(set().union(*map(sample_ids, shards))) == 400
    assert len(first & set(shards)) >= 9, "what was captured before the kill was kept"
    assert "captured 400 samples" not in output
    assert not list(features.glob("*.tmp*"))
    project.cli("train", "train.max_steps=1")


def sample_ids(shard: Path) -> set[str]:
    with safe_open(shard, framework="pt") as tensors:
        return {name.rsplit("/", 1)[0] for name in tensors.keys()}  # noqa: SIM118


def test_features_are_read_from_the_store_and_not_captured_again(project: Project) -> None:
    project.cli("capture")
    shards = {p: p.stat().st_mtime_ns for p in (project.folder / "features").glob("shard-*")}
    project.cli("train")
    assert {
        p: p.stat().st_mtime_ns for p in (project.folder / "features").glob("shard-*")
    } == shards


def test_a_second_trainer_of_a_folder_is_turned_away(
    tmp_path: Path, new_project: NewProject
) -> None:
    project = new_project(tmp_path / "both", samples=400)
    first = project.start("train", "train.checkpoint_every=1")
    wait_for(lambda: bool(list(project.run.glob("checkpoints/step-*/COMPLETE"))), first)
    result = project.cli("train", ok=False)
    assert result.exit_code == 1
    for words in (f"process {first.pid} on", "trains in", "another run folder"):
        assert words in result.output
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert "resuming" in project.cli("train", "train.max_steps=30").output


def test_metrics_of_steps_after_the_checkpoint_are_written_once(
    tmp_path: Path, new_project: NewProject
) -> None:
    project = new_project(tmp_path / "once", samples=48)
    process = project.start("train", "train.checkpoint_every=4")
    wait_for(lambda: steps(project) >= 6, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    project.cli("train", "train.checkpoint_every=4")
    lines = [
        json.loads(line)["step"]
        for line in (project.run / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines == list(range(1, 13))
