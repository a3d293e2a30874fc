"""The launcher `ray` on a real cluster on loopback: what trains there, and what is refused."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from draftcore_sdk import limits
from draftcore_sdk.launchers import LauncherSuite
from draftcore_sdk.plugins import PluginSuite

from tests.ranks import listening

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

MakeRun = Callable[..., Any]
LONG = 500.0  # seconds on a busy machine


class TestRayLauncher(LauncherSuite):
    plugin, limit = "draftcore_ray.plugin", LONG  # each process waits for a worker that imports Ray

    @pytest.fixture(autouse=True)
    def at_the_cluster(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        monkeypatch.setattr(limits, "SOON", LONG / 3)


class TestRayPlugin(PluginSuite):
    plugin = "draftcore_ray.plugin"


def test_what_a_cluster_cannot_give_is_refused_with_what_there_is(
    cluster: Cluster, make_run: MakeRun
) -> None:
    options = {"address": cluster.address, "patience": 2, "rank": {"resources": {"moon": 1}}}
    run = make_run(launcher="ray", ranks=2, options=options)
    assert run.start().wait(LONG) == 2
    assert "no machine of the cluster has room for a rank" in run.output()
    assert run.start("topology.options.address=127.0.0.1:1").wait(LONG) == 2
    assert "there is no Ray cluster at 127.0.0.1:1" in run.output()


def test_a_folder_that_a_machine_with_room_for_a_rank_does_not_see_is_refused(
    machines: Any, make_run: MakeRun
) -> None:
    if subprocess.run([*machines.unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user cannot have mounts of its own")
    options = {"address": machines.address, "rank": {"resources": {"train": 1}}}
    run = make_run(launcher="ray", ranks=1, producers=1, options=options)
    run.run.mkdir()
    machines.add(train=1)
    machines.add_blind(run.run, "train")
    assert run.start().wait(LONG) == 2, run.output()
    assert f"the run's folder {run.run} is not seen by" in run.output()


def test_producers_on_machines_of_their_own_are_heard_in_the_one_terminal_and_ctrl_c_saves(
    machines: Any, make_run: MakeRun
) -> None:
    """One waits for such a machine, and says so; another terminal is told how many there are."""
    asks = {"producer": {"cpus": 0.5, "resources": {"capture": 1}}}
    run = make_run(
        launcher="ray", ranks=2, producers=2, options={"address": machines.address, **asks}
    )
    machines.add(capture=1)
    process = run.start("train.epochs=4000")
    run.until(lambda: "waits for a machine with room: cpus=0.5" in run.output(), process)
    machines.add(capture=1)
    run.until(lambda: run.steps() >= 2, process)
    run.until(lambda: run.heard() == {"[producer 0", "[producer 1"}, process)
    status = run.line("--seconds", "0.5", verb="status")
    run.until(lambda: "2, capturing" in subprocess.check_output(status, text=True), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG) == 130, run.output()
    assert "interrupted: step" in run.output()
    assert run.checkpoint()


def test_without_an_address_the_run_has_a_cluster_of_its_own(
    cluster: Cluster, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another runs on this machine. Nobody else reaches it, and Ray makes no file of its token."""
    run = make_run(launcher="ray", ranks=1, producers=1, options={"rank": {"cpus": 1}})
    monkeypatch.setenv("HOME", str(tmp_path))
    process = run.start("train.epochs=4000")
    run.until(lambda: run.steps() >= 1, process)
    hosts = [host for host, _ in listening(process.pid)]
    assert len(hosts) > 4, "of the queue, and of Ray's"
    assert set(hosts) <= {"127.0.0.1", "::ffff:7f00:1"}
    assert not (tmp_path / ".ray").exists()
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG) == 130, run.output()
    assert run.checkpoint()
