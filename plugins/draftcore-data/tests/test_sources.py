"""The dist passes its suites; and where rows come from: lines and tables, here or elsewhere."""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from draftcore_data.conversations import Conversation
from draftcore_data.options import DataOptions, SourceOptions
from draftcore_data.sources import finder, named, open_lines, open_source, read_conversations
from draftcore_sdk.images import ImageSuite
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.samples import SamplesSuite
from draftcore_sdk.sources import SourceSuite

from draftcore import bind, load_plugins
from draftcore.errors import UsageError

FIND = finder(functools.partial(bind, load_plugins()))
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]


class TestPlugin(PluginSuite):
    plugin = "draftcore_data.plugin"


class TestConversations(SamplesSuite):
    plugin = "draftcore_data.plugin"


class TestImages(ImageSuite):
    plugin = "draftcore_data.plugin"


def lines(*numbers: int) -> bytes:
    rows = ({"messages": CHAT, "n": number} for number in numbers)
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(given: Any, find: Any = FIND) -> list[int]:
    return [json.loads(row)["n"] for _, row in open_source(given, find).rows()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl").write_bytes(lines(1, 2))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(3)))
    (tmp_path / "deep" / "a.jsonl").write_bytes(lines(4))
    (tmp_path / "deep" / "c.jsonl").write_bytes(lines(5))
    (tmp_path / "README.md").write_text("no rows")
    return tmp_path


class TestFiles(SourceSuite):
    plugin, name = "draftcore_data.plugin", "files"

    @pytest.fixture
    def source_uri(self, folder: Path) -> str:
        return f"files:{folder}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", [1, 2, 3, 4, 5]),
        ("/a.jsonl", [1, 2]),
        ("/b.jsonl.gz", [3]),
        ("/deep", [4, 5]),
        ("/**/*.jsonl", [1, 2, 4, 5]),
        ("/[ab].j*", [1, 2, 3]),
    ],
)
def test_files_folders_and_globs_are_read_in_the_order_of_their_names(
    folder: Path, source: str, expected: list[int]
) -> None:
    assert read(f"{folder}{source}") == expected
    assert read(f"file://{folder}{source}") == expected


def test_rows_of_several_files_are_named_by_their_places_below_what_is_common(folder: Path) -> None:
    below = ["deep/a.jsonl:1", "deep/c.jsonl:1"]
    for source, places in {
        f"{folder}": ["a.jsonl:1", "a.jsonl:2", "b.jsonl.gz:1", *below],
        f"{folder}/**/*.jsonl": ["a.jsonl:1", "a.jsonl:2", *below],
    }.items():
        assert [place for place, _ in open_source(source, FIND).rows()] == places


def test_what_fsspec_reaches_is_read_there_and_its_key_follows_its_content() -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/a.jsonl.gz", gzip.compress(lines(1, 2)))
    source = "memory://bucket/*.gz"
    assert read(source) == [1, 2]
    key = open_source(source, FIND).key()
    assert open_source(source, FIND).key() == key
    system.pipe("/bucket/a.jsonl.gz", gzip.compress(lines(1, 3, 4, 5)))
    assert open_source(source, FIND).key() != key


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
        open_source(source.format(folder=folder), FIND)


# ------------------------------------------------------------ several


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
    assert read(config.train) == [4, 5, 1, 1, 2, 2]
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
    assert read(("numbers:2", f"{folder}/deep"), find) == [0, 1, 4, 5]


# ------------------------------------------------------------ tables of `datasets`


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    library = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    return library


class TestHfSource(SourceSuite):
    plugin, name = "draftcore_data.plugin", "hf"

    @pytest.fixture
    def source_uri(self, datasets: Any, tmp_path: Path) -> str:
        table = datasets.Dataset.from_list([{"conversations": SHAREGPT, "id": i} for i in range(3)])
        table.to_parquet(tmp_path / "rows.parquet")
        return f"hf:{tmp_path / 'rows.parquet'}"


def test_saved_folders_and_parquet_files_read_alike(datasets: Any, tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"conversations": SHAREGPT, "id": i} for i in range(3)])
    table.save_to_disk(tmp_path / "saved")
    datasets.load_from_disk(tmp_path / "saved").map(lambda row: row)  # leaves a cache file there
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(tmp_path / "splits")
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    table.to_parquet(tmp_path / "parquet" / "data" / "train-00000.parquet")
    table.select([0]).to_parquet(tmp_path / "parquet" / "data" / "test-00000.parquet")

    keys = set()
    for name, count in {
        "saved": 3,
        "saved?split=train": 3,
        "splits": 3,
        "splits?split=test": 1,
        "parquet": 4,
        "parquet?split=train": 3,
        "parquet/data/test-00000.parquet": 1,
    }.items():
        for prefix in ("", "hf:"):
            uri = f"{prefix}{tmp_path / name}"
            keys.add(open_source(uri, FIND).key())
            rows = list(read_conversations(uri, find=FIND))
            assert [row.where.rpartition(":")[2] for row in rows] == list(map(str, range(count)))
            assert all(isinstance(r, Conversation) and r.messages == tuple(CHAT) for r in rows)
    assert len(keys) == 5, "the key follows the content of the files"
    with pytest.raises(UsageError, match=r"no split 'trian' \(did you mean 'train'\?\)"):
        open_source(f"{tmp_path / 'splits'}?split=trian", FIND)


def test_a_table_that_cannot_be_read_says_what_to_check(datasets: Any, tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match="columns: text"):
        open_source(str(tmp_path / "saved"), FIND)
    with pytest.raises(UsageError, match=r"hf:org/none, split train(.|\n)*check the name"):
        open_source("hf:org/none", FIND)
    with pytest.raises(UsageError, match="did you mean 'split'"):
        open_source("hf:some/name?splt=train", FIND)
