"""Features made with other settings are never mixed: a store, a run and a producer say which differ.

The capture is a loose plugin around `hf`, with an option that changes features and one
that does not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project


PLUGIN = """
from draftcore import hookimpl
from draftcore.contracts.offers import Offer

@hookimpl
def describe():
    return [Offer("capture", "scaled", options="scaled_options:Options")]

@hookimpl
def capture(name, target, request, options):
    from draftcore_hf.capture import LocalCapture
    from draftcore.contracts.capture import CapturedBatch

    class Scaled(LocalCapture):
        def features(self, batches):
            for one in super().features(batches):
                rows = [{n: t * options.scale for n, t in row.items()} for row in one.features]
                yield CapturedBatch(one.batch, tuple(rows))

    return Scaled(target, request)
"""
OPTIONS = """
from pydantic import BaseModel, Field
from draftcore.contracts.offers import SAME_FEATURES

class Options(BaseModel):
    scale: float = 1.0
    patience: float = Field(default=3.0, json_schema_extra=SAME_FEATURES)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all tests, as a loose plugin's module is imported once."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "scaled_options.py").write_text(OPTIONS)
    file = folder / "scaled.py"
    file.write_text(PLUGIN)
    return file


@pytest.fixture
def scaled(tmp_path: Path, new_project: NewProject) -> Project:
    options = {"name": "scaled", "options": {"scale": 2.0}}
    return new_project(tmp_path / "project", capture=options)


def test_features_of_another_option_are_refused_and_named(
    scaled: Project, plugin: Path, tmp_path: Path
) -> None:
    scaled.cli("capture", plugin=plugin)
    other = (f"run={tmp_path / 'other'}", "train.max_steps=1")
    refused = scaled.cli("train", *other, "capture.options.scale=3", plugin=plugin, ok=False)
    assert refused.exit_code == 2
    assert 'capture.options: {"scale": 3.0} here, {"scale": 2.0} in the store' in refused.output
    assert "target:" not in refused.output
    refused = scaled.cli("train", *other, "capture.options={}", plugin=plugin, ok=False)
    assert 'capture.options: as by default here, {"scale": 2.0} in the store' in refused.output
    scaled.cli("train", *other, "capture.options.patience=9", plugin=plugin)


def test_features_computed_in_another_type_are_refused_though_stored_alike(
    scaled: Project, plugin: Path
) -> None:
    scaled.cli("capture", "capture.dtype=bfloat16", plugin=plugin)
    other = ("capture.dtype=bfloat16", "target.dtype=bfloat16")
    refused = scaled.cli("train", *other, plugin=plugin, ok=False)
    assert 'target.dtype: "bfloat16" here, "float32" in the store' in refused.output


def test_features_of_a_target_on_other_devices_are_refused(scaled: Project, plugin: Path) -> None:
    """Several add up in another order than one; and a capture that cannot share a target says so."""
    refused = scaled.cli("train", "target.tensor_parallel=2", plugin=plugin, ok=False)
    shares = "the capture 'scaled' does not share a target over devices as target.tensor_parallel"
    assert shares in refused.output
    assert "or capture.name=hf" in refused.output
    own = ("capture.name=hf", "capture.options={}")
    scaled.cli("capture", *own)
    refused = scaled.cli("train", *own, "target.tensor_parallel=2", ok=False)
    assert "target.tensor_parallel: 2 here, as by default in the store" in refused.output


def test_a_run_goes_on_with_options_that_change_no_feature_alone(
    scaled: Project, plugin: Path
) -> None:
    """Where the features lie in the run's memory there is no store to refuse them."""
    scaled.cli("train", "store=auto", "train.max_steps=2", plugin=plugin)
    more = ("store=auto", "train.max_steps=4")
    refused = scaled.cli("train", *more, "capture.options.scale=3", plugin=plugin, ok=False)
    assert 'capture.options: {"scale": 3.0} here, {"scale": 2.0} then' in refused.output
    scaled.cli("train", *more, "capture.options.patience=9", plugin=plugin)
    assert list(scaled.losses()) == [1, 2, 3, 4]


def test_a_producer_with_another_option_is_refused(
    scaled: Project, plugin: Path, tmp_path: Path
) -> None:
    """It ends with what differs, and the trainer, who needs one, is told."""
    loose = [sys.executable, "-m", "draftcore", "--plugin", str(plugin)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*loose, "train", str(scaled.yaml), "--trainer"], **pipes) as trainer:
        produce = [*loose, "produce", str(scaled.yaml)]
        other = subprocess.run([*produce, "capture.options.scale=3"], **pipes, timeout=300)
        alike = subprocess.run([*produce, "capture.options.patience=9"], **pipes, timeout=300)
        output, _ = trainer.communicate(timeout=300)
    assert other.returncode == 2
    differ = 'capture.options: {"scale": 3.0} here, {"scale": 2.0} for the trainer'
    assert differ in other.stdout
    assert "a producer stopped" in output
    assert differ in output
    assert alike.returncode == 0, alike.stdout
    assert trainer.returncode == 0, output
