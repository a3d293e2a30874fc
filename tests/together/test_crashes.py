"""Stop, kill and resume: nothing is lost, nothing is done twice, and the bits are the same."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors import safe_open

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


PRODUCERS = ["topology.producers=1"]


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
    output, _ = process.communicate(timeout=300)
    before = steps(project)
    assert before < 12, "the run ended before it was stopped"
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, output
        assert f"interrupted: step {before} of 12" in output
    assert "resuming from step" in project.cli("train").output
    assert project.losses() == straight


@pytest.mark.parametrize("producers", [0, 1])
def test_a_run_whose_terminal_hangs_up_is_saved(
    tmp_path: Path, new_project: NewProject, straight: dict[int, float], producers: int
) -> None:
    project = new_project(tmp_path / "hung-up", samples=800)
    there, here = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "draftcore", "train", str(project.yaml), *PRODUCERS[:producers]],
        stdin=here, stdout=here, stderr=here, start_new_session=True,
        preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0), text=True,
    )  # fmt: skip
    os.close(here)
    wait_for(lambda: bool(os.read(there, 1 << 16)) and steps(project) >= 5, process)
    os.close(there)
    assert process.wait(300) == 130
    assert (project.run / f"checkpoints/step-{steps(project):08}/COMPLETE").exists()


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
