"""Without draftcore-tools algorithms train and export, and say what to install to read an export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftcore_sdk.targets import conversations

from draftcore import bind, load_plugins
from draftcore.errors import UsageError


def test_algorithms_train_and_export_and_reading_says_what_to_install(
    tmp_path: Path,
    target_folder: Path,
    run_cli: Any,
    algorithm_options: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Importing it raises, as do the modules that need it: `nox -s alone` imports all others so."""
    read = [name for name in sys.modules if name.endswith(".served")]
    tools = [name for name in sys.modules if name.startswith("draftcore_tools.")]
    for name in ("draftcore_tools", *tools, *read):
        monkeypatch.setitem(sys.modules, name, None)
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
    (file := tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert run_cli("train", file).exit_code == run_cli("export", file).exit_code == 0
    needs = r"reading an export as sglang does needs draftcore-tools.*\n  pip install draftcore-t"
    for name in drafts:
        folder, algorithm = (
            tmp_path / "run" / name / "export",
            bind(load_plugins(), "algorithm", name),
        )
        assert (folder / "model.safetensors").exists()
        read, given = algorithm.hook.read_export, {"options": algorithm.options}
        with pytest.raises(UsageError, match=needs):
            read(folder=folder, server="sglang", **given)
