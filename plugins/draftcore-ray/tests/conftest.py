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
import yaml
from draftcore_sdk.targets import conversations, tiny_target
from safetensors.torch import load_file

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address that others see
OPTIONS = {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2, "num_drafts": 3}
LONG = 500.0  # seconds on a busy machine
ROWS, EPOCHS = 24, 10
STEPS = 6 * EPOCHS
PACE = Path(__file__).with_name("pace.py")


class Run:
    """A small run in a folder, and its command."""

    total = STEPS

    def __init__(self, folder: Path, **topology: Any) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run, self.log = folder, folder / "run", folder / "log.txt"
        self.yaml = folder / "run.yaml"
        tiny_target(folder / "target")
        train = conversations(folder / "train.jsonl", ROWS)
        config = {
            "run": str(self.run),
            "target": {"path": str(folder / "target"), "device": "cpu", "dtype": "float32"},
            "data": {"train": str(train), "max_length": 256},
            "algorithm": {"name": "eagle3", "options": OPTIONS},
            "topology": topology,
            "train": {
                "batch": 2, "lr": 3e-3, "log_every": 1, "checkpoint_every": 8, "epochs": EPOCHS,
                "device": "cpu", "accumulate": 2,
            },
        }  # fmt: skip
        self.yaml.write_text(yaml.safe_dump(config))

    def command(self, *overrides: str) -> list[str]:
        """Return the command; with `plugins=[pace]` each step takes a quarter of a second more."""
        loose = ["-m", "draftcore", "--plugin", str(PACE), "train", str(self.yaml)]
        return [sys.executable, *loose, *overrides]

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            return subprocess.Popen(self.command(*overrides), stdout=log, stderr=log, text=True)

    def finish(self, *overrides: str) -> None:
        assert self.start(*overrides).wait(LONG) == 0, self.log.read_text()

    def until(self, holds: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> None:
        deadline = time.monotonic() + LONG
        while not holds():
            assert process is None or process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def steps(self) -> int:
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def checkpoint(self) -> int:
        """Return the step of the newest whole checkpoint, 0 if there is none."""
        marks = self.run.glob("checkpoints/step-*/COMPLETE")
        return max((int(mark.parent.name[5:]) for mark in marks), default=0)

    def heard(self) -> set[str]:
        """Return the producers of which something was shown."""
        lines = self.log.read_text().splitlines()
        return {line.split("]")[0] for line in lines if line.startswith("[producer ")}

    def weights(self) -> dict[str, Any]:
        assert self.checkpoint() == STEPS
        return load_file(self.run / f"checkpoints/step-{STEPS:08d}" / "draft.safetensors")

    def processes(self) -> list[int]:
        """Return the processes of this run, the command among them."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if str(self.yaml).encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found


class Machines:
    """The machines of a cluster beside its head: added, lost, frozen and thawed."""

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
        before, deadline = len(self.cluster.global_state.node_table()), time.monotonic() + LONG
        while len(self.cluster.global_state.node_table()) == before:
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
    made.shutdown()


@pytest.fixture
def machines(cluster: Cluster) -> Iterator[Machines]:
    made = Machines(cluster)
    yield made
    for node in list(made.there):
        made.lose(node)
    for process in made.alone:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**topology: Any) -> Run:
        made.append(Run(tmp_path / f"run-{len(made)}", **topology))
        return made[-1]

    yield make
    for pid in [pid for run in made for pid in run.processes()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of a run of two ranks that nothing befell."""
    run = Run(tmp_path_factory.mktemp("calm") / "run", ranks=2)
    run.finish()
    return run.weights()
