"""Capture and training as processes of their own: whatever carries features and messages, the bits
are those of a run in one process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from draftcore.config import RESERVED
from tests.ranks import listening
from tests.together.conftest import BLOCKS

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


Train = Callable[..., tuple["Project", str]]
SHM = Path("/dev/shm")


@pytest.fixture
def run(tmp_path: Path, new_project: NewProject) -> Train:
    """Train a project with some topology, in processes of its own that no other machine reaches.

    Nothing may be left of it. Returns the project, and what it printed.
    """

    def train(name: str, **changes: Any) -> tuple[Project, str]:
        project = new_project(
            tmp_path / name,
            **{"algorithm": {"name": "dflash", "options": BLOCKS}, "store": "auto", **changes},
        )
        process, hosts, output = project.start("train"), set[str](), ""
        while process.returncode is None:
            hosts |= {host for host, _ in listening(process.pid)}
            with suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=0.1)
        assert process.returncode == 0, output
        assert hosts <= {"127.0.0.1"}
        run_id = json.loads((project.run / "run.json").read_text())["run_id"]
        assert not [path for path in SHM.iterdir() if run_id in path.name]
        assert {path.name for path in project.run.iterdir()} <= {*RESERVED, ".lock"}
        return project, output

    return train


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, new_project: NewProject) -> dict[int, float]:
    """The losses of the same run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    algorithm = {"name": "dflash", "options": BLOCKS}
    project = new_project(folder, algorithm=algorithm, store="auto")
    project.cli("train")
    return project.losses()


@pytest.mark.parametrize(
    ("store", "channel", "producers"),
    [
        pytest.param("auto", "tcp", 2, marks=pytest.mark.long),
        ("file:{folder}/features", "dir:{folder}/channel", 2),
        ("file:/dev/shm/{name}?volatile=yes", "tcp", 2),
        ("shm:{name}?max_bytes=1MiB", "tcp", 3),
    ],
    ids=["auto and tcp", "file and dir", "volatile files", "little room"],
)
def test_producers_change_no_bit(
    run: Train, alone: dict[int, float], tmp_path: Path, store: str, channel: str, producers: int
) -> None:
    name = f"test-{abs(hash(str(tmp_path))):x}"
    places = {"folder": tmp_path, "name": name}
    project, output = run(
        "apart",
        store=store.format(**places),
        channel=channel.format(**places),
        topology={"producers": producers},
    )
    assert project.losses() == alone
    assert not (SHM / name).exists()
    logs = sorted((project.run / "logs").glob("producer-*.log"))
    assert len(logs) == producers
    said = " ".join(output.split())  # a narrow terminal wraps it
    assert "captured 24, held 0 B" in said
    captured = sum(int(log.read_text().split(";")[-1].split()[0]) for log in logs)
    assert captured == 24


def test_two_ranks_and_a_producer_train_alike_and_a_single_process_goes_on(
    run: Train, tmp_path: Path, new_project: NewProject
) -> None:
    # The same rates however long the run.
    steady: dict[str, Any] = {"schedule": "constant", "warmup_ratio": 0.0, "accumulate": 2}
    algorithm = {"name": "dflash", "options": BLOCKS}
    alone = new_project(tmp_path / "one", algorithm=algorithm, store="auto", train=steady)
    alone.cli("train")
    several = {"producers": 1, "ranks": 2}
    project, _ = run("ranks", topology=several, train={**steady, "max_steps": 2})
    assert len(project.losses()) == 2
    alone_again = ["topology.producers=0", "topology.ranks=1", "train.max_steps=3"]
    project.cli("train", *alone_again)
    for step, loss in alone.losses().items():
        assert project.losses()[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["channel=sqlite:x"], ["sqlite", "tcp"]),
        (
            ["store=shm:refused"],
            ["captures for itself", "'shm:refused' keeps nothing", "topology.producers"],
        ),
        (["topology.producer=2"], ["topology.producer", "producers"]),
    ],
)
def test_what_one_process_keeps_to_itself_is_refused(
    tmp_path: Path, new_project: NewProject, arguments: list[str], says: list[str]
) -> None:
    project = new_project(tmp_path / "wrong", store="auto")
    result = project.cli("train", *arguments, ok=False)
    assert result.exit_code == 2, result.output
    for text in says:
        assert text in result.output
    assert not [path for path in SHM.iterdir() if "refused" in path.name]


def test_a_producer_waits_for_its_trainer_until_it_is_asked_to_stop(
    tmp_path: Path, new_project: NewProject
) -> None:
    project = new_project(tmp_path / "lonely", store="auto")
    process = project.start("produce")
    assert process.stdout is not None
    said = process.stdout.readline()
    while not (project.run / "secret").exists():
        assert process.poll() is None
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert f"waiting for the trainer of {project.run}" in said
    assert (project.run / "secret").stat().st_mode & 0o777 == 0o600
