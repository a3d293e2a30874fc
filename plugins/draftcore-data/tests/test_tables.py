"""Tables of `datasets` come out as rows, in order, whatever folder or file they lie in."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from draftcore_data.conversations import Conversation
from draftcore_data.sources import finder, open_source, read_conversations
from draftcore_sdk.images import ImageSuite
from draftcore_sdk.sources import SourceSuite

from draftcore import bind, load_plugins
from draftcore.errors import UsageError

find = finder(functools.partial(bind, load_plugins()))
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]


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


class TestImages(ImageSuite):
    plugin = "draftcore_data.plugin"


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
            keys.add(open_source(uri, find).key())
            rows = list(read_conversations(uri, find=find))
            assert [row.where.rpartition(":")[2] for row in rows] == list(map(str, range(count)))
            assert all(isinstance(r, Conversation) and r.messages == tuple(CHAT) for r in rows)
    assert len(keys) == 5, "the key follows the content of the files"
    with pytest.raises(UsageError, match=r"no split 'trian' \(did you mean 'train'\?\)"):
        open_source(f"{tmp_path / 'splits'}?split=trian", find)


def test_a_table_that_cannot_be_read_says_what_to_check(datasets: Any, tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match="columns: text"):
        open_source(str(tmp_path / "saved"), find)
    with pytest.raises(UsageError, match=r"hf:org/none, split train(.|\n)*check the name"):
        open_source("hf:org/none", find)
    with pytest.raises(UsageError, match="did you mean 'split'"):
        open_source("hf:some/name?splt=train", find)
