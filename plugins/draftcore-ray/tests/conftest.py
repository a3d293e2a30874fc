"""A Ray cluster of several machines on loopback that faults are done to, and a small run there."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from draftcore_sdk.targets import tiny_target

from tests.faults.conftest import Run

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address that others see
LONG = 500.0  # seconds on a busy machine
EPOCHS = 10
TRAIN = {"epochs": EPOCHS, "accumulate": 2, "rank_timeout": 60}


class OnRay(Run):
    """A run whose command goes to the cluster; what it prints is in `output()`."""

    def heard(self) -> set[str]:
        """Return the producers of which something was shown."""
        return {line.split("]")[0] for line in self.output().splitlines() if "[producer " in line}

    def checkpoint(self) -> int:
        """Return the step of the newest whole checkpoint, 0 if there is none."""
        marks = self.run.glob("checkpoints/step-*/COMPLETE")
        return max((int(mark.parent.name[5:]) for mark in marks), default=0)

    def require_calm(self, process: Any, losses: Any, seconds: float = LONG) -> None:
        """Wait for the end: every sample was used once per epoch, and these are the losses."""
        assert self.wait(process, seconds) == 0, self.output()
        assert set(self.uses().values()) == {EPOCHS}
        assert self.losses() == losses


class Machines:
    """The machines of a cluster beside its head: added, lost, frozen and thawed.

    The environment of who adds one is that of the processes there, so FAULTS may slow steps down.
    """

    unshare = ("unshare", "--user", "--map-root-user", "--mount")

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.address = cluster.address
        self.there: list[Any] = []
        self.alone: list[subprocess.Popen[bytes]] = []

    def add(self, address: str = LOOPBACK, **resources: float) -> Any:
        node = self.cluster.add_node(num_cpus=4, resources=resources, node_ip_address=address)
        self.there.append(node)
        return node

    def add_blind(self, folder: Path, name: str) -> None:
        """Add a machine that has another, empty folder in the place of this one."""
        command = ["start", "--address", self.address, "--node-ip-address", LOOPBACK, "--block"]
        command += ["--num-cpus", "4", "--resources", json.dumps({name: 1})]
        script = f"mount -t tmpfs none {folder} && exec {sys.executable} -m ray.scripts.scripts"
        start = [*self.unshare, "bash", "-c", f"{script} {shlex.join(command)}"]
        quiet = subprocess.DEVNULL
        before, deadline = len(self.cluster.global_state.node_table()), time.monotonic() + LONG  # type: ignore[no-untyped-call]
        while len(self.cluster.global_state.node_table()) == before:  # type: ignore[no-untyped-call]
            assert time.monotonic() < deadline
            if all(one.poll() is not None for one in self.alone):  # ray waits 30 s, and gives up
                one = subprocess.Popen(start, stdout=quiet, stderr=quiet, start_new_session=True)
                self.alone.append(one)
            time.sleep(0.1)

    def processes(self, node: Any) -> list[int]:
        """Return all that runs on a machine: Ray's own, and those of the run."""
        found = [one.process.pid for group in node.all_processes.values() for one in group]
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                text = (folder / "stat").read_text()
                parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
        for pid in found:  # which grows
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def send(self, node: Any, number: int) -> None:
        for pid in self.processes(node):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self, node: Any) -> None:
        self.send(node, signal.SIGSTOP)

    def thaw(self, node: Any) -> None:
        self.send(node, signal.SIGCONT)

    def hide(self, node: Any) -> None:
        """Stop what tells the cluster of a machine, and nothing else there."""
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGSTOP)

    def lose(self, node: Any) -> None:
        """Switch a machine off."""
        self.send(node, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)
        self.there.remove(node)


@pytest.fixture(autouse=True)
def what_sigterm_does() -> Iterator[None]:
    """Ray sets it, and leaves it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The first machine, with four CPUs. That another is gone is known after 6 to 12 seconds."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    names = ("initial_delay_ms", "period_ms", "timeout_ms")
    soon = {f"health_check_{name}": 2000 for name in names}
    here: dict[str, Any] = {"num_cpus": 4, "node_ip_address": LOOPBACK, "include_dashboard": False}
    here["_system_config"] = {**soon, "health_check_failure_threshold": 3}
    made = Cluster(initialize_head=True, head_node_args=here)
    yield made
    made.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture
def machines(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv("FAULTS", "pace:0.25")
    made = Machines(cluster)
    yield made
    for node in list(made.there):
        made.lose(node)
    for process in made.alone:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@pytest.fixture
def make_run(tmp_path: Path, target_folder: Path) -> Iterator[Callable[..., OnRay]]:
    made: list[OnRay] = []

    def make(**topology: Any) -> OnRay:
        folder = tmp_path / f"run-{len(made)}"
        made.append(OnRay(folder, target_folder, topology=topology, train=TRAIN))
        return made[-1]

    yield make
    for run in made:
        run.kill(*run.processes(), *run.descendants())


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> dict[int, float]:
    """The losses of a run of two ranks that nothing befell."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    run = OnRay(folder, target_folder, topology={"ranks": 2}, train=TRAIN)
    run.finish()
    return run.losses()
