"""Features made with other settings are never mixed: a store, a run and a producer say which differ.

The capture is a loose plugin around `hf`, with an option that changes features and one
that does not.
"""

from pathlib import Path

import pytest

from tests.together.conftest import WAIT, NewProject, Project

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
def scaled(tmp_path: Path, new_project: NewProject, plugin: Path) -> Project:
    options = {"name": "scaled", "options": {"scale": 2.0}}
    return new_project(tmp_path / "project", capture=options, plugins=[plugin])


def test_features_made_with_other_settings_are_refused_and_what_differs_is_named(
    scaled: Project, tmp_path: Path
) -> None:
    """Also where they were stored alike. Several devices add up in another order than one.

    A capture that cannot share a target says so; an option that changes no feature is no obstacle.
    """
    own = ("capture.name=hf", "capture.options={}")
    half = ("capture.dtype=bfloat16", f"store=file:{tmp_path}/half")
    stores = {"scaled": (), "half": half, "own": (*own, f"store=file:{tmp_path}/own")}
    for given in stores.values():
        scaled.cli("capture", *given)
    shared = "target.tensor_parallel=2"
    for store, more, says in (
        ("scaled", "capture.options.scale=3", '{"scale": 3.0} here, {"scale": 2.0} in the store'),
        ("scaled", "capture.options={}", 'as by default here, {"scale": 2.0} in the store'),
        ("scaled", shared, "does not share a target over devices as target.tensor_parallel"),
        ("scaled", shared, "or capture.name=hf"),
        ("half", "target.dtype=bfloat16", 'target.dtype: "bfloat16" here, "float32" in the store'),
        ("own", shared, "target.tensor_parallel: 2 here, as by default in the store"),
    ):
        refused = scaled.cli("train", *stores[store], more, ok=False)
        assert refused.exit_code == 2
        assert says in refused.output
        assert "target:" not in refused.output
    scaled.cli("train", "capture.options.patience=9", "train.max_steps=1")


def test_a_run_goes_on_with_options_that_change_no_feature_alone(scaled: Project) -> None:
    """Where the features lie in the run's memory there is no store to refuse them."""
    scaled.cli("train", "store=auto", "train.max_steps=2")
    more = ("store=auto", "train.max_steps=4")
    refused = scaled.cli("train", *more, "capture.options.scale=3", ok=False)
    assert 'capture.options: {"scale": 3.0} here, {"scale": 2.0} then' in refused.output
    scaled.cli("train", *more, "capture.options.patience=9")
    assert list(scaled.losses()) == [1, 2, 3, 4]


def test_a_producer_with_another_option_is_refused(scaled: Project) -> None:
    """It ends with what differs, and the trainer, who needs one, is told."""
    trainer = scaled.start("train", "--trainer")
    other = scaled.start("produce", "capture.options.scale=3")
    said, _ = other.communicate(timeout=WAIT)
    scaled.finish("produce", "capture.options.patience=9")
    output, _ = trainer.communicate(timeout=WAIT)
    assert other.returncode == 2
    differ = 'capture.options: {"scale": 3.0} here, {"scale": 2.0} for the trainer'
    assert differ in said
    assert "a producer stopped" in output
    assert differ in output
    assert trainer.returncode == 0, output


def test_a_producer_waits_for_its_trainer_until_it_is_asked_to_stop(scaled: Project) -> None:
    process = scaled.start("produce", "store=auto")
    assert process.stdout is not None
    said = process.stdout.readline()
    while not (scaled.run / "secret").exists():
        assert process.poll() is None
    process.terminate()
    output, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 130, output
    assert f"waiting for the trainer of {scaled.run}" in said
    assert (scaled.run / "secret").stat().st_mode & 0o777 == 0o600
