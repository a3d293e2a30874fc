"""Where rows come from: files of all kinds, wherever they lie, and several of them together."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draftcore_data.options import DataOptions, SourceOptions
from draftcore_data.sources import named, open_lines, open_source


def lines(*numbers: int) -> bytes:
    return b"".join(json.dumps({"n": number}).encode() + b"\n" for number in numbers)


def read(given: Any, **more: Any) -> list[int]:
    return [json.loads(row)["n"] for _, row in open_source(given, **more).rows()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl").write_bytes(lines(1, 2))
    (tmp_path / "b.jsonl").write_bytes(lines(3))
    (tmp_path / "deep" / "a.jsonl").write_bytes(lines(4))
    (tmp_path / "README.md").write_text("no rows")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", [1, 2, 3, 4]),
        ("/a.jsonl", [1, 2]),
        ("/*.jsonl", [1, 2, 3]),
        ("/**/*.jsonl", [1, 2, 3, 4]),
        ("/[ab].jsonl", [1, 2, 3]),
    ],
)
def test_files_folders_and_globs_are_read_in_the_order_of_their_names(
    folder: Path, source: str, expected: list[int]
) -> None:
    assert read(f"{folder}{source}") == expected


def test_rows_of_several_files_are_named_by_their_places_below_what_is_common(folder: Path) -> None:
    places = [place for place, _ in open_source(str(folder)).rows()]
    assert places == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "deep/a.jsonl:1"]


def test_a_weight_is_how_often_a_row_comes_or_the_share_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*range(1000)))
    source = str(tmp_path / "a.jsonl")

    def counts(weight: float) -> Counter[int]:
        return Counter(read((SourceOptions(source=source, weight=weight),)))

    assert set(counts(2).values()) == {2}
    half, more = counts(0.5), counts(2.5)
    assert set(half.values()) == {1}
    assert 400 < len(half) < 600
    assert {row for row, times in more.items() if times == 3} == set(half), "always the same rows"
    assert set(more.values()) == {2, 3}
    assert half == counts(0.5)


def test_a_list_is_read_in_its_order_and_its_key_follows_weights_and_content(folder: Path) -> None:
    config = DataOptions.model_validate(
        {"train": [f"{folder}/deep", {"source": f"{folder}/a.jsonl", "weight": 2}]}
    )
    assert config.train is not None
    assert read(config.train) == [4, 1, 1, 2, 2]
    assert named(config.train) == f"{folder}/deep, {folder}/a.jsonl"
    once = (f"{folder}/deep", f"{folder}/a.jsonl")
    assert open_source(once).key() != open_source(config.train).key()


class Numbers:
    """A plugin's source."""

    def __init__(self, uri: str) -> None:
        self.count = int(uri.removeprefix("numbers:"))

    def key(self) -> str:
        return str(self.count)

    def rows(self) -> Iterator[tuple[str, Any]]:
        return iter([(f"numbers:{n}", json.dumps({"n": n})) for n in range(self.count)])


def test_a_scheme_without_slashes_is_a_plugins(folder: Path) -> None:
    find = lambda uri: Numbers(uri) if uri.startswith("numbers:") else open_lines(uri)  # noqa: E731
    assert read(("numbers:2", f"{folder}/deep"), find=find) == [0, 1, 4]


@pytest.mark.parametrize("place", ["s3://bucket/a.jsonl", "b.jsonl.gz", "a.parquet", "a.jsonl?x=1"])
def test_what_is_not_lines_here_is_the_source_files(tmp_path: Path, place: str) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(b"")
    (tmp_path / "a.parquet").write_bytes(b"")
    asked = list[str]()
    given = place if "://" in place else f"{tmp_path}/{place}"
    with contextlib.suppress(ValueError):
        open_source(given, lambda uri: asked.append(uri) or Numbers(uri))  # type: ignore[func-returns-value]
    assert asked == [f"files:{given}"]
