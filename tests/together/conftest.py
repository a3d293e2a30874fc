"""A small project on disk, the command line run in this process or in others, and a run that is done."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from draftcore_sdk.targets import conversations
from safetensors.torch import load_file
from torch import Tensor

from draftcore.cli import main
from tests.ranks import start_rank

BLOCKS = {"num_layers": 2, "layers": [1, 3], "block_size": 4, "num_anchors": 8}
# Of every algorithm of ours, options that make a draft small.
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2, "num_drafts": 3},
    "dflash": BLOCKS,
    "dflash2": {**BLOCKS, "selector_rank": 8, "selector_top_k": 6},
    "domino": {**BLOCKS, "gru_hidden_dim": 16, "emb_dim": 8},
    "dspark": {**BLOCKS, "markov_rank": 8},
    "peagle": {"layers": [1, 2, 4], "num_layers": 2, "draft_vocab_size": 240, "num_depths": 3},
}
TWO_DRAFTS: dict[str, Any] = {
    label: {"algorithm": {"name": name, "options": OPTIONS[name]}}
    for label, name in (("blocks", "dflash"), ("domino", "domino"))
}
ODD = Path(__file__).with_name("odd_algorithm.py")
WAIT = 300.0  # seconds in which processes do what they must, however slow the machine


@dataclass
class Project:
    """A folder with a target, conversations and run.yaml, which says what `config` does.

    The loose `plugins` take part in all of its verbs.
    """

    folder: Path
    config: dict[str, Any]
    plugins: Sequence[Path] = ()

    def __post_init__(self) -> None:
        self.yaml = self.folder / "run.yaml"
        self.yaml.write_text(yaml.safe_dump(self.config))
        self.run = Path(self.config["run"])

    def words(self, verb: str, *arguments: object, plugin: Path | None = None) -> list[str]:
        loose = [*self.plugins, plugin] if plugin else self.plugins
        plugins = [part for file in loose for part in ("--plugin", str(file))]
        return [*plugins, verb, str(self.yaml), *map(str, arguments)]

    def cli(
        self, verb: str, *arguments: object, ok: bool = True, plugin: Path | None = None
    ) -> Result:
        """Run a verb in this process."""
        result = CliRunner().invoke(main, self.words(verb, *arguments, plugin=plugin))
        assert not ok or result.exit_code == 0, result.output
        return result

    def start(self, verb: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        """Start a verb in a process of its own; `more` is for Popen."""
        command = [sys.executable, "-m", "draftcore", *self.words(verb, *arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, text=True, **{**pipes, **more})

    def finish(self, verb: str, *arguments: str) -> str:
        process = self.start(verb, *arguments)
        output, _ = process.communicate(timeout=WAIT)
        assert process.returncode == 0, output
        return output

    def torchrun(self, *arguments: str, plugin: Path | None = None, ok: bool = True) -> str:
        """Train on two ranks that torchrun starts; returns what they printed."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        verb = ["-m", "draftcore", *self.words("train", *arguments, plugin=plugin)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            [*launch, "--local-addr", "127.0.0.1", "--nproc-per-node", "2", *verb],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT,
        )  # fmt: skip
        assert (done.returncode == 0) is ok, done.stdout
        return done.stdout

    # ------------------------------------------------------------ what came of it, by draft

    def lines(self, label: str = "") -> list[dict[str, Any]]:
        file = self.run / label / "metrics.jsonl"
        return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []

    def losses(self, label: str = "") -> dict[int, float]:
        """Per-step loss, exactly as written."""
        return {line["step"]: line["loss"] for line in self.lines(label) if "loss" in line}

    def evaluations(self, label: str = "") -> list[dict[str, float]]:
        return [line["evaluation"] for line in self.lines(label) if "evaluation" in line]

    def tensors(self, label: str = "", file: str = "draft") -> dict[str, Tensor]:
        """What the last checkpoint holds."""
        last = max((self.run / label / "checkpoints").glob("step-*"))
        return dict(load_file(last / f"{file}.safetensors"))


NewProject = Callable[..., Project]


@pytest.fixture
def project(tmp_path: Path, target_folder: Path) -> Project:
    return make_project(tmp_path, target_folder)


@pytest.fixture(scope="session", name="make_project")
def _make_project() -> NewProject:
    return make_project


@pytest.fixture(scope="session")
def new_project(target_folder: Path) -> NewProject:
    def make(folder: Path, **changes: Any) -> Project:
        folder.mkdir(parents=True, exist_ok=True)
        return make_project(folder, target_folder, **changes)

    return make


def make_project(
    folder: Path,
    target_folder: Path,
    samples: int = 24,
    plugins: Sequence[Path] = (),
    **changes: Any,
) -> Project:
    train = conversations(folder / "train.jsonl", samples)
    held_out = conversations(folder / "eval.jsonl", ["yes it is", "abcabcabc", "no"])
    often = {"log_every": 1, "checkpoint_every": 2, "eval_every": 0}
    config: dict[str, Any] = {
        "run": str(folder / "run"),
        "target": {"path": str(target_folder), "dtype": "float32", "device": "cpu"},
        "data": {"train": str(train), "eval": str(held_out), "max_length": 256},
        "algorithm": {"name": "eagle3", "options": OPTIONS["eagle3"]},
        "store": f"file:{folder / 'features'}",
        "train": {"batch": 4, "lr": 0.003, **often, "precision": "fp32", "device": "cpu"},
        "eval": {"max_new_tokens": 16, "batch": 2},
    }
    for key, value in changes.items():
        merged = isinstance(value, dict) and key in config
        config[key] = {**config[key], **value} if merged else value
    return Project(folder, config, plugins)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory, new_project: NewProject) -> Project:
    """A project whose run is done: captured and trained. Tests change copies of it."""
    project = new_project(tmp_path_factory.mktemp("original") / "project")
    assert "captured 24 samples" in project.cli("capture").output
    shards = {f: f.stat().st_mtime_ns for f in (project.folder / "features").glob("shard-*")}
    assert "complete: step 6 of 6, 24 samples" in project.cli("train").output
    assert {f: f.stat().st_mtime_ns for f in shards} == shards, "features were captured again"
    return project


@pytest.fixture
def trained(tmp_path: Path, original: Project) -> Project:
    """A copy of the project whose run is done, but of its features."""
    folder, before = tmp_path / "trained", original.config
    leave_out = shutil.ignore_patterns("features")
    shutil.copytree(original.folder, folder, ignore=leave_out)
    data = {
        **before["data"],
        "train": str(folder / "train.jsonl"),
        "eval": str(folder / "eval.jsonl"),
    }
    return Project(folder, {**before, "run": str(folder / "run"), "data": data})


# ---------------------------------------------------------------- several ranks


@dataclass
class Ranks:
    """The ranks of a run: their processes, what they printed, how they ended."""

    folder: Path
    processes: list[ForkServerProcess] = field(default_factory=list)

    def start(self, argv: list[str], size: int, largest_file: int | None = None) -> None:
        """Start the next rank."""
        rank = len(self.processes)
        process = start_rank(self.folder, rank, size, be_a_rank, argv, largest_file)
        self.processes.append(process)

    def send(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid or 0, number)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < deadline, self.output(0) + self.output(1)
            assert all(one.is_alive() for one in self.processes), self.output(0) + self.output(1)
            time.sleep(0.002)

    def finish(self) -> list[int | None]:
        """Wait for all ranks; returns their exit statuses."""
        for process in self.processes:
            process.join(WAIT)
            assert not process.is_alive(), self.output(0) + self.output(1)
        return [process.exitcode for process in self.processes]

    def output(self, rank: int) -> str:
        return (self.folder / f"output.{rank}").read_text()


def be_a_rank(argv: list[str], largest_file: int | None) -> None:
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    main(argv)


Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start two ranks of `train`; `second` are the arguments of rank 1 where they differ."""
    started: list[Ranks] = []

    def start(
        project: Project,
        *arguments: str,
        plugin: Path | None = None,
        second: Sequence[str] | None = None,
        verb: str = "train",
        largest_file: int | None = None,
    ) -> Ranks:
        folder = tmp_path / f"ranks-{len(started)}"
        folder.mkdir()
        started.append(ranks := Ranks(folder))
        for given in (arguments, arguments if second is None else second):
            limit = None if ranks.processes else largest_file
            ranks.start(project.words(verb, *given, plugin=plugin), 2, limit)
        return ranks

    yield start
    for ranks in started:
        for process in ranks.processes:
            process.kill()
