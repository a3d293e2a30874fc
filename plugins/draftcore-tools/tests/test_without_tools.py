"""Without draftcore-tools algorithms train and export, and say what to install to read an export."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from draftcore_sdk.targets import conversations

SCRIPT = """
import sys
from pathlib import Path

sys.modules["draftcore_tools"] = None  # as if it were not installed: importing it raises

from click.testing import CliRunner
from draftcore.cli import main
from draftcore.errors import UsageError
from draftcore.plugins.binding import bind
from draftcore.plugins.registry import load_plugins

def cli(*arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output

config, *algorithms = sys.argv[1:]
cli("train", config)
for name in algorithms:
    out = Path(config).with_name(name)
    cli("export", config, "--draft", name, "--out", str(out))
    assert (out / "model.safetensors").exists()
    try:
        algorithm = bind(load_plugins(), "algorithm", name)
        algorithm.hook.read_export(folder=out, server="sglang", options=algorithm.options)
    except UsageError as error:
        print(f"{name}: {error}")
"""


def test_algorithms_train_and_export_and_reading_says_what_to_install(
    tmp_path: Path, target_folder: Path, algorithm_options: dict[str, dict[str, Any]]
) -> None:
    drafts = {
        name: {"algorithm": {"name": name, "options": options}}
        for name, options in algorithm_options.items()
    }
    config = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(target_folder), "device": "cpu"},
        "data": {"train": str(conversations(tmp_path / "train.jsonl", 4))},
        "drafts": drafts,
        "train": {"epochs": 1, "batch": 4, "device": "cpu"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    asked = [sys.executable, "-c", SCRIPT, str(tmp_path / "run.yaml"), *drafts]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        line
        for name in drafts
        for line in (
            f"{name}: reading an export as sglang does needs draftcore-tools, which is not installed",
            "  pip install draftcore-tools",
        )
    ]
