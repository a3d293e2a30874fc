"""A small project on disk, and the command line run in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from draftcore_sdk.targets import conversations

from draftcore.cli import main

BLOCKS = {"num_layers": 2, "layers": [1, 3], "block_size": 4, "num_anchors": 8}
# Of every algorithm of ours, options that make a draft small.
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2, "num_drafts": 3},
    "dflash": BLOCKS,
    "domino": {**BLOCKS, "gru_hidden_dim": 16, "emb_dim": 8},
}


@dataclass
class Project:
    """A folder with a target, conversations and run.yaml; `config` is what the YAML says."""

    folder: Path
    config: dict[str, Any]

    def __post_init__(self) -> None:
        self.yaml = self.folder / "run.yaml"
        self.yaml.write_text(yaml.safe_dump(self.config))
        self.run = Path(self.config["run"])

    def cli(
        self, verb: str, *arguments: object, ok: bool = True, plugin: Path | None = None
    ) -> Result:
        """Run a verb in this process."""
        loose = ["--plugin", str(plugin)] if plugin else []
        result = CliRunner().invoke(main, [*loose, verb, str(self.yaml), *map(str, arguments)])
        assert not ok or result.exit_code == 0, result.output
        return result

    def start(self, verb: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a verb in a process of its own, in a group of its own."""
        command = [sys.executable, "-m", "draftcore", verb, str(self.yaml), *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )

    def finish(self, verb: str, *arguments: str) -> str:
        process = self.start(verb, *arguments)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return output

    def torchrun(self, *arguments: str, plugin: Path | None = None, ok: bool = True) -> str:
        """Train on two ranks that torchrun starts; returns what they printed."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        loose = ["--plugin", str(plugin)] if plugin else []
        verb = ["-m", "draftcore", *loose, "train", str(self.yaml), *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            [*launch, "--local-addr", "127.0.0.1", "--nproc-per-node", "2", *verb],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        )  # fmt: skip
        assert (done.returncode == 0) is ok, done.stdout
        return done.stdout

    def losses(self, run: Path | None = None) -> dict[int, float]:
        """Per-step loss, exactly as written."""
        lines = ((run or self.run) / "metrics.jsonl").read_text().splitlines()
        return {r["step"]: r["loss"] for r in map(json.loads, lines) if "loss" in r}


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


def make_project(folder: Path, target_folder: Path, samples: int = 24, **changes: Any) -> Project:
    train = conversations(folder / "train.jsonl", samples)
    held_out = conversations(folder / "eval.jsonl", ["yes it is", "abcabcabc", "no"])
    config: dict[str, Any] = {
        "run": str(folder / "run"),
        "target": {"path": str(target_folder), "dtype": "float32", "device": "cpu"},
        "data": {"train": str(train), "eval": str(held_out), "max_length": 256},
        "algorithm": {"name": "eagle3", "options": OPTIONS["eagle3"]},
        "store": f"file:{folder / 'features'}",
        "train": {"batch": 4, "lr": 0.003, "log_every": 1, "checkpoint_every": 2, "device": "cpu"},
        "eval": {"max_new_tokens": 16, "batch": 2},
    }
    for key, value in changes.items():
        merged = isinstance(value, dict) and key in config
        config[key] = {**config[key], **value} if merged else value
    return Project(folder, config)
