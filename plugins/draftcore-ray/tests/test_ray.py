"""The launcher `ray` on real clusters on loopback: what trains, what is lost, what is started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from draftcore_sdk.launchers import LauncherSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.targets import conversations, tiny_target
from safetensors.torch import load_file

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

OPTIONS = {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2, "num_drafts": 3}
LONG = 150.0  # seconds on a busy machine


class TestRayLauncher(LauncherSuite):
    plugin = "draftcore_ray.plugin"

    @pytest.fixture(autouse=True)
    def at_the_cluster(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)


class TestRayPlugin(PluginSuite):
    plugin = "draftcore_ray.plugin"


class Run:
    """A small run in a folder, and its command."""

    def __init__(self, folder: Path, **topology: Any) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run = folder, folder / "run"
        tiny_target(folder / "target")
        train = conversations(folder / "train.jsonl", 24)
        config = {
            "run": str(self.run),
            "target": {"path": str(folder / "target"), "device": "cpu", "dtype": "float32"},
            "data": {"train": str(train), "max_length": 256},
            "algorithm": {"name": "eagle3", "options": OPTIONS},
            "topology": topology,
            "train": {
                "batch": 2, "lr": 3e-3, "log_every": 1, "checkpoint_every": 4, "epochs": 4,
                "device": "cpu", "accumulate": 2,
            },
        }  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(config))

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "draftcore", "train", str(self.folder / "run.yaml")]
        self.log = self.folder / "log.txt"
        with self.log.open("a") as log:
            return subprocess.Popen(
                [*command, *overrides], stdout=log, stderr=log, text=True, env={**os.environ}
            )

    def until(self, holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + LONG
        while not holds():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def steps(self) -> int:
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def weights(self) -> dict[str, Any]:
        newest = sorted(self.run.glob("checkpoints/step-*"))[-1]
        assert newest.name == "step-00000024"
        return load_file(newest / "draft.safetensors")


def test_lost_machines_change_no_bit_of_the_weights(cluster: Cluster, tmp_path: Path) -> None:
    """First a producer's machine goes, then one with a rank; other machines take over."""
    address = {"address": cluster.address, "patience": 30}
    counts = {"launcher": "ray", "ranks": 2, "producers": 1, "restarts": 5}
    calm = Run(tmp_path / "calm", ranks=2)
    assert calm.start().wait(LONG) == 0, calm.log.read_text()

    producing = cluster.add_node(num_cpus=2, resources={"capture": 1}, node_ip_address="127.0.0.2")
    training = cluster.add_node(num_cpus=2, resources={"train": 2}, node_ip_address="127.0.0.2")
    asks = {"producer": {"resources": {"capture": 0.5}}, "rank": {"resources": {"train": 1}}}
    storm = Run(tmp_path / "storm", **counts, options={**address, **asks})
    process = storm.start()
    storm.until(lambda: storm.steps() >= 3, process)
    cluster.remove_node(producing)
    cluster.add_node(num_cpus=2, resources={"capture": 1}, node_ip_address="127.0.0.2")
    storm.until(lambda: storm.steps() >= 8, process)
    cluster.remove_node(training)
    cluster.add_node(num_cpus=2, resources={"train": 2}, node_ip_address="127.0.0.2")
    assert process.wait(LONG) == 0, storm.log.read_text()
    one, other = calm.weights(), storm.weights()
    assert one.keys() == other.keys()
    assert all(bool((one[name] == other[name]).all()) for name in one)


def test_ctrl_c_saves_and_ends_all_of_it(cluster: Cluster, tmp_path: Path) -> None:
    options = {"address": cluster.address}
    run = Run(tmp_path / "stopped", launcher="ray", ranks=1, producers=1, options=options)
    process = run.start("train.epochs=4000")
    run.until(lambda: run.steps() >= 2, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG) == 130, run.log.read_text()
    assert "interrupted: step" in run.log.read_text()
    assert list(run.run.glob("checkpoints/step-*/COMPLETE"))


def test_what_a_cluster_cannot_give_is_refused_with_what_there_is(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = {"address": cluster.address, "patience": 2, "rank": {"resources": {"moon": 1}}}
    run = Run(tmp_path / "greedy", launcher="ray", ranks=2, options=options)
    assert run.start().wait(LONG) == 2
    assert "no machine of the cluster has room for a rank" in run.log.read_text()
    assert run.start("topology.options.address=127.0.0.1:1").wait(LONG) == 2
    assert "there is no Ray cluster at 127.0.0.1:1" in run.log.read_text()
