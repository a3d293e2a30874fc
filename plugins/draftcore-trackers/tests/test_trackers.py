"""The dist's plugins as they are listed, and a library that is missing."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner
from draftcore_sdk.plugins import PluginSuite

from draftcore.cli import main

NAMES = ("mlflow", "tensorboard", "trackio", "wandb")


class TestMLflow(PluginSuite):
    plugin = "draftcore_trackers.mlflow:plugin"


class TestTensorBoard(PluginSuite):
    plugin = "draftcore_trackers.tensorboard:plugin"


class TestTrackio(PluginSuite):
    plugin = "draftcore_trackers.trackio:plugin"


class TestWeightsAndBiases(PluginSuite):
    plugin = "draftcore_trackers.wandb:plugin"


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_without_its_library_is_listed_with_the_remedy_and_refused_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of the run is looked at: neither target nor rows are there."""
    plugin = import_module(f"draftcore_trackers.{name}").plugin
    monkeypatch.setattr(plugin, "module", "no_such_library")
    install = f"pip install 'draftcore-trackers[{name}]'"
    assert install in CliRunner().invoke(main, ["list-plugins"]).output
    run = {"run": "run", "target": {"path": "none"}, "data": {"train": "none.jsonl"}}
    (file := tmp_path / "run.yaml").write_text(
        json.dumps({**run, "algorithm": {"name": "eagle3"}, "plugins": [name]})
    )
    done = CliRunner().invoke(main, ["train", str(file)])
    needs = f"the observer {name!r} needs no_such_library, which is not installed\n  {install}"
    assert (done.exit_code, needs in done.output) == (2, True), done.output
