"""A run of the algorithm suite on disk, and the command line run on it in this process."""

from __future__ import annotations

import json

import yaml
from click.testing import CliRunner

from draftcore.cli import main
from draftcore_sdk.targets import conversations
from draftcore_sdk.workbench import RATE, Bench


class Project:
    """A folder with conversations and run.yaml, and the command line run in this process."""

    def __init__(self, bench: Bench, name: str, store: str = "auto") -> None:
        folder = bench.folder / name
        folder.mkdir()
        self.bench, self.run, self.yaml = bench, folder / "run", folder / "run.yaml"
        train = conversations(folder / "train.jsonl", [c * 3 + d for c in "abcd" for d in "xy"])
        held_out = conversations(folder / "eval.jsonl", ["yes", "no"])
        config = {
            "run": str(self.run),
            "target": {"path": bench.example.spec.path, "device": "cpu"},
            "data": {"train": str(train), "eval": str(held_out)},
            "algorithm": {"name": bench.offer.name, "options": dict(bench.data)},
            "store": store,
            "train": {"batch": 2, "lr": RATE, "log_every": 1, "device": "cpu"},
            "eval": {"max_new_tokens": 8, "batch": 2},
        }
        self.yaml.write_text(yaml.safe_dump(config))

    def cli(self, verb: str, *arguments: str, status: int = 0) -> str:
        """Run a verb, with the plugin that may end training, and return what it printed."""
        plugins = [self.bench.example.stopper, *[self.bench.loose] * bool(self.bench.loose)]
        shell = [word for plugin in plugins for word in ("--plugin", str(plugin))]
        command = [*shell, verb, str(self.yaml), *arguments]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == status, f"draftcore {' '.join(command)}\n{result.output}"
        return result.stdout

    def losses(self) -> dict[int, float]:
        """Per-step losses, exactly as written."""
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}
