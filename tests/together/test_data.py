"""Data as people have it, and features, through whole runs; those made with other settings are never mixed.

The capture is a loose plugin around `hf`, with an option that changes features and one that does not.
"""

import gzip
import json
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from draftcore_data.dataset import read_prompts
from draftcore_sdk.targets import CHATML

from draftcore.contracts.run import Prompts
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

    A capture that cannot share a target says so; other batches and another patience are no obstacle.
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
    scaled.cli("train", "capture.options.patience=9", "train.batch_tokens=99", "train.max_steps=1")


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


class Calendar(datetime):
    day = 23

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls(2026, 11, cls.day)


def date_of(folder: Path) -> str:
    return str(json.loads((folder / "data/train/dataset.json").read_text())["summary"]["date"])


def test_tomorrows_run_fits_todays_store_where_the_template_writes_the_date(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.folder / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    template = f"data.chat_template={project.folder / 'dated.jinja'}"
    monkeypatch.setattr("draftcore_data.rendering.datetime", Calendar)
    project.cli("capture", template)
    monkeypatch.setattr(Calendar, "day", 24)
    other, third = project.folder / "other", project.folder / "third"
    project.cli("train", template, f"run={other}", "train.max_steps=1")
    told = list[str]()

    def asked(*given: Any, date: str, **more: Any) -> Prompts:
        told.append(date)
        return read_prompts(*given, date=date, **more)

    monkeypatch.setattr("draftcore_data.rows.read_prompts", asked)
    project.cli("eval", template, f"run={other}", "eval.prompts=1")
    project.cli("train", template, f"run={third}", "store=auto", "train.max_steps=1")
    assert date_of(project.run) == date_of(other) == "2026-11-23T00:00:00"
    assert told == [date_of(other)]
    assert date_of(third) == "2026-11-24T00:00:00", "a run with a store of its own begins today"


def test_a_run_learns_from_a_mixture(project: Project) -> None:
    rows = (project.folder / "train.jsonl").read_bytes()
    (project.folder / "more.jsonl.gz").write_bytes(gzip.compress(rows))
    first, more = project.folder / "train.jsonl", project.folder / "more.jsonl.gz"
    mixture = f"data.train=[{first}, {{source: {more}, weight: 2}}]"
    project.cli("train", "store=auto", mixture, "train.max_steps=1")
    dataset = json.loads((project.run / "data/train/dataset.json").read_text())
    assert dataset["summary"]["samples"] == 3 * rows.count(b"\n")
    assert dataset["report"]["source"] == f"{first}, {more}"


def test_a_start_reads_the_data_and_the_rendered_rows_once(trained: Project) -> None:
    """The second start, which renders nothing: it looks at the data, maps the rows, digests both."""
    opened, watching = Counter[str](), True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open":
            opened[Path(str(arguments[0])).name] += 1

    sys.addaudithook(watch)
    trained.cli("train", "train.epochs=2", "train.max_steps=7")
    watching = False
    assert (opened["train.jsonl"], opened["rows.bin"]) == (2, 2)
