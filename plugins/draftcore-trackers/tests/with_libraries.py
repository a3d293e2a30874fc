"""Runs that are tracked, read back by each library's own reader: `nox -s trackers` has the libraries.

Two drafts are trained, their newest checkpoints lost, and the run is resumed: with all trackers at once.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from draftcore_eval import curves
from draftcore_sdk.targets import conversations, tiny_target
from draftcore_sdk.wrappers import ObserverSuite

from draftcore.cli import main
from draftcore.files import read_sealed

NAMES = ["mlflow", "tensorboard", "trackio", "wandb"]
BLOCK, WHOLE, LAST = 32768, 1, 4  # of LevelDB: bytes; kinds of parts that end a record
Points = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module", autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each library has a place of its own, and none looks for a network."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "home").mkdir()
    for key, value in {
        "HOME": folder / "home", "WANDB_MODE": "offline", "WANDB_DIR": folder,
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TRACKIO_DIR": folder / "trackio",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():  # fmt: skip
        monkeypatch.setenv(key, str(value))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(curves, "SHORT", 0.0)
    return folder


def train(folder: Path, *overrides: str, **settings: Any) -> Result:
    """Train two small drafts in a folder, with all trackers."""
    folder.mkdir(exist_ok=True)
    algorithm = {
        "name": "eagle3",
        "options": {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2},
    }
    held_out, rows = (conversations(folder / f"{count}.jsonl", count) for count in (3, 24))
    config = {
        "run": str(folder / "run"),
        "target": {"path": str(tiny_target(folder / "target")), "device": "cpu"},
        "data": {"train": str(rows), "eval": str(held_out), "max_length": 256},
        "drafts": {
            "one": {"algorithm": algorithm},
            "two": {"algorithm": algorithm, "train": {"lr": 1e-4}},
        },
        "train": {
            **{"batch": 4, "log_every": 1, "checkpoint_every": 2, "device": "cpu"},
            **{"eval_every": 2, "eval_prompts": 0},
        },
        "plugins": NAMES,
        **settings,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return CliRunner().invoke(main, ["train", str(folder / "run.yaml"), *overrides])


@pytest.fixture(scope="module")
def run(environment: Path) -> Path:
    first = train(environment / "work", "train.max_steps=4")
    assert "complete: step 4 of 4" in first.output, first.output
    run = environment / "work" / "run"
    for draft in ("one", "two"):
        shutil.rmtree(run / draft / "checkpoints" / "step-00000004")
    second = train(environment / "work", "train.max_steps=6")
    assert "complete: step 6 of 6" in second.output, second.output
    assert "the run goes on without" not in first.output + second.output
    return run


def require_told(run: Path, tracked: Points, draft: str) -> None:
    """Each figure of metrics.jsonl is tracked once, at its step."""
    told: Points = defaultdict(list)
    for line in map(json.loads, (run / draft / "metrics.jsonl").read_text().splitlines()):
        kind, figures = ("eval", line["evaluation"]) if "evaluation" in line else ("train", line)
        for name in ("loss", "lr", "accuracy_0"):
            if name in figures:
                told[f"{kind}/{name}"].append((line["step"], figures[name]))
    assert [step for step, _ in told["eval/loss"]] == [2, 4, 6]
    for name, points in told.items():
        assert [step for step, _ in tracked[name]] == [step for step, _ in points], name
    # Steps 3 and 4 may be those of the first start.
    assert dict(tracked["train/lr"])[6] == pytest.approx(dict(told["train/lr"])[6])
    assert tracked["train/loss"][-1][1] == pytest.approx(told["train/loss"][-1][1])
    assert tracked["checkpoint"][-1] == (6, 6.0)


def test_tensorboard(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for draft in ("one", "two"):
        events = EventAccumulator(str(run / "tensorboard" / draft))
        events.Reload()
        tags = events.Tags()
        scalars = {
            name: [(point.step, point.value) for point in events.Scalars(name)]
            for name in tags["scalars"]
        }
        require_told(run, scalars, draft)
        assert (tags["images"], tags["tensors"]) == (["curves"], ["config/text_summary"])
        assert (
            b'"max_steps": 6'
            in events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0]
        )


def records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run, a log as LevelDB writes it, for which wandb has no reader."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, record = file.read_bytes(), 7, b""
    while position + 7 < len(data):
        if (room := BLOCK - position % BLOCK) < 7:
            position += room
        length, part = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (WHOLE, LAST):
            yield Record.FromString(record)
            record = b""


def test_wandb_offline(run: Path, environment: Path) -> None:
    run_id, tracked = (
        read_sealed(run / "run.json")["run_id"],
        defaultdict[str, dict[int, Any]](dict),
    )
    starts = sorted((environment / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(starts) == 2
    for record in (record for file in starts for record in records(file)):
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            tracked[name][record.history.step.num] = json.loads(item.value_json)
        if record.WhichOneof("record_type") == "run":
            assert (record.run.project, record.run.display_name) == ("draftcore", "run")
    for draft in ("one", "two"):
        mine = {
            name.removeprefix(f"{draft}/"): sorted(of.items())
            for name, of in tracked.items()
            if name.startswith(draft)
        }
        require_told(run, mine, draft)
        assert mine["curves/_type"] == [(4, "image-file"), (6, "image-file")]


def test_mlflow(run: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (experiment,) = [e for e in client.search_experiments() if e.name == "draftcore"]
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert (tracked.info.run_name, tracked.info.status) == ("run", "FINISHED")
    assert tracked.data.params["drafts.two.train.lr"] == "0.0001"
    for draft in ("one", "two"):
        found = {
            name.removeprefix(f"{draft}/"): [
                (point.step, point.value)
                for point in client.get_metric_history(tracked.info.run_id, name)
            ]
            for name in tracked.data.metrics
            if name.startswith(draft)
        }
        require_told(run, found, draft)
        names = [file.path for file in client.list_artifacts(tracked.info.run_id, draft)]
        assert names == [f"{draft}/metrics.png"]


def test_trackio(run: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("draftcore")
    assert name == f"run-{read_sealed(run / 'run.json')['run_id'][:6]}"
    tracked: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    for line in SQLiteStorage.get_logs("draftcore", name):
        for key, value in line.items():
            draft, _, figure = key.partition("/")
            tracked[draft][figure].append((line["step"], value))
    for draft in ("one", "two"):
        require_told(run, tracked[draft], draft)


def test_trackers_that_fail_say_so_once_and_end_no_run(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be made, no API key, no server."""
    import wandb

    folder = environment / "failing"
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "tensorboard").write_text("no folder")
    with monkeypatch.context() as patch:
        for key, value in {
            "WANDB_MODE": "online",
            "MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        }.items():  # fmt: skip
            patch.setenv(key, str(value))
        wandb.teardown()  # which forgets the environment
        done = train(folder, "train.max_steps=4")
        wandb.teardown()
    assert (done.exit_code, "complete: step 4 of 4" in done.output) == (0, True), done.output
    for name in ("mlflow", "tensorboard", "wandb"):
        assert done.output.count(f"the run goes on without {name}") == 1, done.output
    assert "wandb login" in done.output


# Not wandb, which sets a variable for processes that are started later.
class TestMLflow(ObserverSuite):
    plugin = "draftcore_trackers.mlflow:plugin"


class TestTensorBoard(ObserverSuite):
    plugin = "draftcore_trackers.tensorboard:plugin"


class TestTrackio(ObserverSuite):
    plugin = "draftcore_trackers.trackio:plugin"
