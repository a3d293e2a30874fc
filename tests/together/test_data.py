"""Data as people have it, through whole runs."""

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
from tests.together.conftest import Project


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
