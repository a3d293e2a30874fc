"""A run of the algorithm suite on disk, and the command line run on it, in this process or another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from subprocess import PIPE, STDOUT

import yaml
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor

from draftcore_sdk.internals import main
from draftcore_sdk.suite import child_environment
from draftcore_sdk.targets import conversations
from draftcore_sdk.workbench import RATE, Bench

SET_ASIDE = "the run goes on without"  # an observer that failed, which is a warning in a run


class Project:
    """A folder with conversations and run.yaml, and the command line run on it."""

    def __init__(self, bench: Bench, name: str, store: str = "auto") -> None:
        folder = bench.folder / name
        folder.mkdir()
        self.bench, self.run, self.yaml = bench, folder / "run", folder / "run.yaml"
        train = conversations(folder / "train.jsonl", [c * 3 + d for c in "abcd" for d in "xy"])
        held_out = conversations(folder / "eval.jsonl", ["yes", "no"])
        config = {
            "run": str(self.run), "store": store, "plugins": list(bench.extras),
            "target": {"name": "plain", "path": bench.example.spec.path, "device": "cpu"},
            "capture": {"name": "hf"}, "data": {"train": str(train), "eval": str(held_out)},
            "algorithm": {"name": bench.offer.name, "options": dict(bench.data)},
            "train": {"batch": 2, "lr": RATE, "log_every": 1, "eval_every": 0, "device": "cpu"},
            "eval": {"max_new_tokens": 8, "batch": 2},
        }  # fmt: skip
        self.yaml.write_text(yaml.safe_dump(config))

    def cli(self, verb: str, *arguments: str, status: int = 0) -> str:
        """Run a verb, with the plugin that may end training, and return what it printed."""
        command = [*self._arguments(verb), *arguments]
        result = CliRunner().invoke(main, command, catch_exceptions=False)
        said = "\n".join(result.output.strip().splitlines()[-6:])
        assert result.exit_code == status, f"{said}\nof draftcore {' '.join(command)}"
        assert SET_ASIDE not in result.stderr, result.stderr
        return result.stdout

    def begin(self, verb: str, **environment: str) -> subprocess.Popen[str]:
        """Run a verb in a process of its own, where Python also hashes strings otherwise."""
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        env = {**child_environment(), "PYTHONHASHSEED": seed, **environment}
        command = [sys.executable, "-m", "draftcore", *self._arguments(verb)]
        return subprocess.Popen(command, env=env, text=True, stdout=PIPE, stderr=STDOUT)

    def _arguments(self, verb: str) -> list[str]:
        plugins = [self.bench.example.stopper, *self.bench.loose]
        return [*(f"--plugin={plugin}" for plugin in plugins), verb, str(self.yaml)]

    def weights(self) -> dict[str, Tensor]:
        """The draft of the last checkpoint."""
        files = sorted(self.run.glob("checkpoints/*/draft.safetensors"))
        assert files, f"{self.run} has no checkpoint"
        found: dict[str, Tensor] = load_file(files[-1])
        return found

    def losses(self) -> dict[int, float]:
        """Per-step losses, exactly as written."""
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}
