"""A run of several processes that faults are done to, and what must hold when it has finished."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from draftcore_disagg.local import free_port
from draftcore_sdk.loopback import only_loopback
from draftcore_sdk.targets import conversations
from safetensors.torch import load_file

from draftcore.cli import main

HERE = Path(__file__).parent
EPOCHS, SAMPLES = 2, 48


class Run:
    """A run whose algorithm counts uses; one command, started as often as it takes.

    `faults` is what `fault_points` does to the processes that are started next.
    """

    def __init__(
        self, folder: Path, target: Path, /, *, producers: int = 0, samples: int = SAMPLES,
        faults: str = "", **changes: Any,
    ) -> None:  # fmt: skip
        self.folder, self.run, self.yaml = folder, folder / "run", folder / "run.yaml"
        self.samples, self.faults, self.marks = samples, faults, folder / "marks"
        self.marks.mkdir(parents=True)
        rows = conversations(folder / "train.jsonl", samples)
        config: dict[str, Any] = {
            "run": str(self.run),
            "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
            "data": {"train": str(rows), "max_length": 256},
            "algorithm": {"name": "usecount"},
            "train": {
                "batch": 4, "epochs": EPOCHS, "lr": 1.0, "schedule": "constant", "betas": [0.0, 0.0],
                "log_every": 1, "checkpoint_every": 4, "device": "cpu", "rank_timeout": 10,
            },
        }  # fmt: skip
        if producers:
            config["topology"] = {"producers": producers, "restarts": 40}
        for key, change in changes.items():
            uri = isinstance(change, str)
            config[key] = change.format(folder) if uri else {**config.get(key, {}), **change}
        self.yaml.write_text(yaml.safe_dump(config))

    def line(self, *arguments: str, verb: str = "train") -> list[str]:
        """Return the command of a verb: `train` launches the run's other processes."""
        files = [HERE / "usecount.py", HERE / "fault_points.py"]
        loose = [part for file in files for part in ("--plugin", str(file))]
        return [sys.executable, "-m", "draftcore", *loose, verb, str(self.yaml), *arguments]

    def start(self, *arguments: str, verb: str = "train") -> subprocess.Popen[str]:
        env = {"OMP_NUM_THREADS": "1", "FAULTS": self.faults, "FAULT_MARKS": str(self.marks)}
        with (self.folder / "output.log").open("a") as output:
            return subprocess.Popen(
                self.line(*arguments, verb=verb), stdout=output, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, **env},
            )  # fmt: skip

    def wait(self, process: subprocess.Popen[str], seconds: float = 300) -> int:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            states = [(pid, self.command(pid)) for pid in self.processes()]
            self.kill(*self.processes())
            process.wait()
            pytest.fail(f"it hangs; alive: {states}\n{self.output()}")

    def finish(self, *arguments: str, verb: str = "train", code: int = 0) -> str:
        """Run the command to its end; return what it wrote."""
        log = self.folder / "output.log"
        before = log.stat().st_size if log.exists() else 0
        assert self.wait(self.start(*arguments, verb=verb)) == code, self.output()
        return log.read_bytes()[before:].decode(errors="replace")

    def output(self) -> str:
        files = [self.folder / "output.log", *sorted((self.run / "logs").glob("*"))]
        return "\n".join(f"--- {f.name}\n{f.read_text()}" for f in files if f.exists())

    def processes(self) -> list[int]:
        """Return all processes of this run, found by the file in their command."""
        return find_processes("cmdline", str(self.yaml))

    def descendants(self) -> list[int]:
        """Return all other processes that this run's started, found by what they inherit."""
        found = find_processes("environ", f"FAULT_MARKS={self.marks}\0")
        return sorted(set(found) - set(self.processes()))

    def producers(self) -> list[int]:
        return [pid for pid in self.processes() if f" produce {self.yaml}" in self.command(pid)]

    def trainers(self) -> list[int]:
        """Return the ranks of a run with producers."""
        return [pid for pid in self.processes() if "--trainer" in self.command(pid)]

    @staticmethod
    def command(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            return ""

    @staticmethod
    def kill(*pids: int, number: int = signal.SIGKILL) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self, *pids: int, seconds: float) -> None:
        self.kill(*pids, number=signal.SIGSTOP)
        time.sleep(seconds)
        self.kill(*pids, number=signal.SIGCONT)

    def until(self, condition: Callable[[], Any], process: Any = None, seconds: float = 300) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert process is None or process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)
        return found

    def steps(self) -> int:
        file = self.run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def losses(self) -> dict[int, float]:
        lines = list(map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines()))
        losses = {line["step"]: line["loss"] for line in lines}
        assert len(losses) == len(lines)
        return losses

    def last(self) -> Path:
        return max((self.run / "checkpoints").glob("step-*"))

    def uses(self) -> dict[int, float]:
        """Return how often each row was trained on, as the weights say."""
        counts = load_file(self.last() / "draft.safetensors")["uses"].tolist()
        assert not any(counts[self.samples :]), "a sample that is not there was used"
        return dict(enumerate(counts[: self.samples]))

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.last() / "state.json").read_text())
        return state

    def require_done(
        self, losses: dict[int, float] | None = None, without: frozenset[int] = frozenset()
    ) -> None:
        """Every sample was used once per epoch, the losses are these, and nothing was left behind."""
        assert self.uses() == {row: EPOCHS * (row not in without) for row in range(self.samples)}
        assert losses is None or self.losses() == losses
        self.require_clean()

    def require_nothing_trained(self) -> None:
        """There is nothing to evaluate or export, and the run left nothing behind."""
        command = ["--plugin", str(HERE / "usecount.py"), "eval", str(self.yaml)]
        refused = CliRunner().invoke(main, command)
        assert refused.exit_code == 2
        assert "no finished checkpoint" in refused.output
        assert not (self.run / "export").exists()
        self.require_clean()

    def require_clean(self) -> None:
        self.until(lambda: not self.processes() and not self.descendants(), seconds=60)
        left = [str(path) for path in self.run.rglob("*.tmp")]
        if (file := self.run / "run.json").exists():  # else the run was refused before it began
            run_id = json.loads(file.read_text())["run_id"]
            left += [path.name for path in Path("/dev/shm").iterdir() if run_id in path.name]
        assert not left, f"left behind: {left}"
        assert not (self.run / "queue.json").exists(), "the address of a queue that is gone"


def find_processes(file: str, part: str) -> list[int]:
    """Return the processes in whose `cmdline` or `environ` there is this."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if part.encode() in (folder / file).read_bytes():
                found.append(int(folder.name))
    return sorted(found)


class Server:
    """A server that a run talks to and did not start. It may be killed, frozen and started again."""

    def __init__(self, command: list[str], folder: Path, port: int, metrics: int) -> None:
        self.command, self.folder, self.port, self.metrics = command, folder, port, metrics
        self.start()

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stdout=quiet, stderr=quiet, cwd=self.folder)
        deadline = time.monotonic() + 300
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None, f"{self.command} does not start"
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session", autouse=True)
def nobody_else() -> Iterator[None]:
    with only_loopback():
        yield


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Server]:
    """A Mooncake master that takes a lender for dead after 3 seconds of silence."""
    from draftcore_mooncake.engine import package_folder
    from draftcore_mooncake.master import FLAGS

    port, metrics = free_port(), free_port()
    place = [f"--rpc_port={port}", f"--metrics_port={metrics}", "--client_ttl=3"]
    command = [str(package_folder() / "mooncake_master"), *FLAGS, *place]
    server = Server(command, tmp_path / "master", port, metrics)
    yield server
    server.kill()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def make_run(tmp_path: Path, target_folder: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**changes: Any) -> Run:
        made.append(Run(tmp_path / f"run-{len(made)}", target_folder, **changes))
        return made[-1]

    yield make
    for one in made:
        one.kill(*one.processes(), *one.descendants())


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> dict[int, float]:
    """The losses of the same run in one process, with nothing in its way."""
    one = Run(tmp_path_factory.mktemp("undisturbed") / "one", target_folder)
    one.finish()
    assert set(one.uses().values()) == {EPOCHS}
    return one.losses()
