"""Capture and training as processes of their own: whatever carries features and messages, the bits
are those of a run in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from draftcore.config import RunConfig
from draftcore.plugins.registry import load
from draftcore.run.parts import Run

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


Train = Callable[..., tuple["Project", str]]
BLOCKS = {"num_layers": 2, "layers": [1, 3], "block_size": 4, "num_anchors": 8}
SHM = Path("/dev/shm")


@pytest.fixture
def run(tmp_path: Path, new_project: NewProject) -> Train:
    """Train a project with some topology, in processes of its own; nothing may be left of it.

    Returns the project, and what it printed.
    """

    def train(name: str, **changes: Any) -> tuple[Project, str]:
        project = new_project(
            tmp_path / name,
            **{"algorithm": {"name": "dflash", "options": BLOCKS}, "store": "auto", **changes},
        )
        output = project.finish("train")
        run_id = json.loads((project.run / "run.json").read_text())["run_id"]
        assert not [path for path in SHM.iterdir() if run_id in path.name]
        return project, output

    return train


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, new_project: NewProject) -> dict[int, float]:
    """The losses of the same run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    algorithm = {"name": "dflash", "options": BLOCKS}
    project = new_project(folder, algorithm=algorithm, store="memory")
    project.cli("train")
    return project.losses()


@pytest.mark.parametrize(
    ("store", "channel", "producers"),
    [
        pytest.param("auto", "auto", 2, marks=pytest.mark.long),
        ("file:{folder}/features", "dir:{folder}/channel", 1),
        ("shm:{name}?max_bytes=64MiB", "sqlite:{folder}/channel.db?limit_refs=8", 3),
    ],
    ids=["shm and sqlite", "file and dir", "little credit"],
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
    logs = sorted((project.run / "logs").glob("producer-*.log"))
    assert len(logs) == producers
    said = " ".join(output.split())  # a narrow terminal wraps it
    assert f"producers {producers}, captured 24, held 0 samples" in said
    captured = sum(int(log.read_text().split(";")[-1].split()[0]) for log in logs)
    assert captured == 24


def test_two_ranks_and_a_producer_train_alike_and_a_single_process_goes_on(
    run: Train, tmp_path: Path, new_project: NewProject
) -> None:
    steady = {"schedule": "constant", "warmup_ratio": 0.0}  # the same rates however long the run
    algorithm = {"name": "dflash", "options": BLOCKS}
    alone = new_project(tmp_path / "one", algorithm=algorithm, store="memory", train=steady)
    alone.cli("train")
    several = {"producers": 1, "ranks": 2}
    project, _ = run("ranks", topology=several, train={**steady, "max_steps": 4})
    assert len(project.losses()) == 4
    alone_again = ["topology.producers=0", "topology.ranks=1", "train.max_steps=6"]
    project.cli("train", *alone_again)
    for step, loss in alone.losses().items():
        assert project.losses()[step] == pytest.approx(loss, rel=1e-5)


def test_two_epochs_capture_again_and_count_every_sample_once_each(run: Train) -> None:
    project, _ = run("epochs", topology={"producers": 1}, train={"epochs": 2})
    assert len(project.losses()) == 12
    state = json.loads((project.run / "checkpoints" / "step-00000012" / "state.json").read_text())
    assert (state["samples_seen"], state["given_up"]) == (48, {})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["store=memory"], ["several processes", "'memory'", "shared"]),
        (["channel=memory"], ["processes of their own", "'memory'", "sqlite"]),
        (
            ["store=file:features", "topology.producers=2"],
            ["2 producers", "'file:features'", "one process"],
        ),
        (["topology.producer=2"], ["topology.producer", "producers"]),
    ],
)
def test_what_one_process_keeps_to_itself_is_refused(
    tmp_path: Path, new_project: NewProject, arguments: list[str], says: list[str]
) -> None:
    project = new_project(
        tmp_path / "wrong",
        algorithm={"name": "dflash", "options": BLOCKS},
        store="auto",
        topology={"producers": 1},
    )
    process = project.start("train", *arguments)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    for text in says:
        assert text in output


def test_a_producer_without_a_trainer_says_so(tmp_path: Path, new_project: NewProject) -> None:
    project = new_project(
        tmp_path / "lonely",
        algorithm={"name": "dflash", "options": BLOCKS},
        channel=f"sqlite:{tmp_path}/channel.db?patience=2",
    )
    process = project.start("train", "--role", "producer")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert f"waiting for the trainer at sqlite:{tmp_path}/channel.db" in output
    assert "patience" in output.partition("error: ")[2]


def test_the_ring_has_room_for_two_windows_of_steps(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(**train: Any) -> tuple[int, Run]:
        settings = {**project.config, "store": "auto", "train": {"batch": 4, **train}}
        run = Run(RunConfig.model_validate(settings), load(), role="trainer")
        try:
            return int(run.store_uri.partition("max_bytes=")[2]), run
        finally:
            run.close()

    least, run = room()
    assert least == 64 << 20
    monkeypatch.setattr("draftcore.run.parts.LEAST_RING", 0)
    lengths, row = sorted(run.samples.lengths), run.token_bytes + 9
    assert room()[0] == 2 * sum(int(length) * row + 4096 for length in lengths)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1000))
    assert room()[0] == 500
