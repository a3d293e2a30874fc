"""JSON lines that are compressed or lie elsewhere come out as plain ones here do."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import fsspec
import pytest
from draftcore_data.sources import finder, open_source
from draftcore_sdk.sources import SourceSuite

from draftcore import bind, load_plugins
from draftcore.errors import UsageError

find = finder(functools.partial(bind, load_plugins()))


def lines(*numbers: int) -> bytes:
    row = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    return b"".join(json.dumps({"messages": row, "n": n}).encode() + b"\n" for n in numbers)


def read(given: str) -> list[int]:
    return [json.loads(row)["n"] for _, row in open_source(given, find).rows()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl").write_bytes(lines(1, 2))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(3)))
    (tmp_path / "deep" / "a.jsonl").write_bytes(lines(4))
    (tmp_path / "README.md").write_text("no rows")
    return tmp_path


class TestFiles(SourceSuite):
    plugin, name = "draftcore_data.plugin", "files"

    @pytest.fixture
    def source_uri(self, folder: Path) -> str:
        return f"files:{folder}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [("", [1, 2, 3, 4]), ("/b.jsonl.gz", [3]), ("/**/*.jsonl", [1, 2, 4]), ("/[ab].j*", [1, 2, 3])],
)
def test_files_folders_and_globs_are_read_in_the_order_of_their_names(
    folder: Path, source: str, expected: list[int]
) -> None:
    assert read(f"{folder}{source}") == expected
    assert read(f"file://{folder}{source}") == expected


def test_what_fsspec_reaches_is_read_there_and_its_key_follows_its_content() -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/a.jsonl.gz", gzip.compress(lines(1, 2)))
    source = "memory://bucket/*.gz"
    assert read(source) == [1, 2]
    key = open_source(source, find).key()
    assert open_source(source, find).key() == key
    system.pipe("/bucket/a.jsonl.gz", gzip.compress(lines(1, 3, 4, 5)))
    assert open_source(source, find).key() != key


def test_a_file_that_breaks_off_names_the_last_line_that_was_read(folder: Path) -> None:
    whole = gzip.compress(b"\n".join(lines(n) for n in range(9999)), 0)
    (folder / "b.jsonl.gz").write_bytes(whole[:-5000])
    with pytest.raises(UsageError, match=r"b\.jsonl\.gz cannot be read after b\.jsonl\.gz:\d{4}"):
        read(str(folder / "b.jsonl.gz"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{folder}/a.jsonl?split=train", "unknown option 'split'"),
        ("{folder}/*.zst", "cannot open .*zst(.|\n)*pip install zstandard"),
        ("nobody://bucket/train.jsonl", "cannot open nobody(.|\n)*Protocol not known"),
        ("file://{folder}/none", "no such data: file:"),
        ("file://{folder}/array.json", "array.json is one JSON array"),
    ],
)
def test_what_cannot_be_opened_is_an_error_before_the_first_row(
    folder: Path, source: str, says: str
) -> None:
    (folder / "packed.zst").write_text("packed")
    (folder / "array.json").write_text("[{}]")
    with pytest.raises(UsageError, match=says):
        open_source(source.format(folder=folder), find)
