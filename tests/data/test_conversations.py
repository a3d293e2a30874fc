"""Rows come out in order, usable or with the line and the reason why not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftcore.data.conversations import BadRow, Conversation, open_source, read_conversations
from draftcore.errors import UsageError

Jsonl = Callable[..., str]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"conversations": SHAREGPT},
        {"id": "x", "conversations": CHAT},
        {"messages": None, "conversations": SHAREGPT},
    ],
)
def test_both_shapes_and_their_mixtures_read_alike(jsonl: Jsonl, row: dict[str, Any]) -> None:
    assert list(read_conversations(jsonl(row))) == [Conversation("train.jsonl:1", tuple(CHAT))]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken", "train.jsonl:1: not valid JSON: Expecting property name"),
        ("[" * 100_000, "train.jsonl:1: not valid JSON: nested too deeply"),
        ("7", "train.jsonl:1: the row is not an object: int"),
        ({"text": "x"}, "train.jsonl:1: no messages or conversations: keys 'text'"),
        ({"messages": "x"}, "train.jsonl:1: messages is not a list: str"),
        ({"messages": []}, "train.jsonl:1: the conversation is empty"),
        ({"messages": ["x"]}, "train.jsonl:1: a message is not an object: message 1: str"),
        ({"messages": [{"content": "x"}]}, "train.jsonl:1: a message has no role: message 1"),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            "train.jsonl:1: unknown role: message 1: 'asistant' (did you mean 'assistant'?)",
        ),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": None}]},
            "train.jsonl:1: a message has no content: message 3 (assistant)",
        ),
        (
            {"messages": [{"role": "user", "content": ["x"]}]},
            "train.jsonl:1: content is not text: message 1 (user): list",
        ),
        ({"messages": CHAT[:1]}, "train.jsonl:1: no assistant turn: roles user"),
        ({"messages": CHAT, "tools": [3]}, "train.jsonl:1: tools is not a list of objects"),
    ],
)
def test_a_bad_row_says_where_and_why(tmp_path: Path, jsonl: Jsonl, row: Any, reason: str) -> None:
    if isinstance(row, str) and row.startswith("["):
        row = '{"messages": ' + row  # a file that starts with [ is refused as a whole
    (bad,) = read_conversations(jsonl(row))
    assert isinstance(bad, BadRow)
    assert str(bad).startswith(reason)


def test_bad_bytes_and_empty_lines_keep_the_line_numbers_right(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    good = b'{"messages": [{"role": "gpt", "content": "x"}]}'
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n\n\xff\n" + good)
    first, bad, last = read_conversations(str(path))
    assert (first.where, bad.where, last.where) == (
        "train.jsonl:1",
        "train.jsonl:3",
        "train.jsonl:4",
    )
    assert isinstance(first, Conversation)
    assert isinstance(bad, BadRow)
    assert bad.reason == "not UTF-8"


def test_tool_calls_need_no_content_and_other_fields_pass_through(jsonl: Jsonl) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    rows = jsonl(
        {"messages": [CHAT[0], call], "tools": [{"name": "add"}]},
        {"messages": [CHAT[0], call], "tools": '[{"name": "add"}]'},
    )
    for row in read_conversations(rows):
        assert isinstance(row, Conversation)
        assert row.messages[1] == {**call, "content": ""}
        assert row.tools == ({"name": "add"},)


def test_reading_is_a_stream_and_the_limit_counts_rows(tmp_path: Path) -> None:
    """The tail of the file is not there yet when its head has been read."""
    path = tmp_path / "train.jsonl"
    line = '{"messages": [{"role": "gpt", "content": "x"}]}\n'
    path.write_text(line * 2)
    rows = read_conversations(str(path))
    next(rows)
    with path.open("a") as file:
        file.write(line * 2)
    assert len(list(rows)) == 3
    assert len(list(read_conversations(str(path), limit=2))) == 2


def test_an_unreadable_source_is_an_error_before_the_first_row(
    tmp_path: Path, jsonl: Jsonl
) -> None:
    path = jsonl({"messages": CHAT})
    with pytest.raises(UsageError, match=r"did you mean 'train\.jsonl'"):
        read_conversations(str(tmp_path / "trian.jsonl"))
    with pytest.raises(UsageError, match=r"name one of its files instead: train\.jsonl"):
        read_conversations(str(tmp_path))
    with pytest.raises(UsageError, match="has no split"):
        read_conversations(path + "?split=train")
    with pytest.raises(UsageError, match="did you mean 'split'"):
        read_conversations("hf:some/name?splt=train")
    with pytest.raises(UsageError, match="one JSON array"):
        read_conversations(jsonl("[{}]", name="array.json"))


# ---------------------------------------------------------------- Hugging Face datasets


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    library = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    return library


def test_saved_folders_and_parquet_files_read_alike(datasets: Any, tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"conversations": SHAREGPT, "id": i} for i in range(3)])
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(tmp_path / "splits")
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    table.to_parquet(tmp_path / "parquet" / "data" / "train-00000.parquet")
    table.select([0]).to_parquet(tmp_path / "parquet" / "data" / "test-00000.parquet")

    for name in ("saved", "splits", "parquet?split=train", "parquet/data/train-00000.parquet"):
        rows = list(read_conversations(str(tmp_path / name)))
        assert [row.where.rpartition(":")[2] for row in rows] == ["0", "1", "2"]
        assert all(isinstance(row, Conversation) and row.messages == tuple(CHAT) for row in rows)
    for name in ("splits", "parquet"):
        assert len(list(read_conversations(f"hf:{tmp_path / name}?split=test"))) == 1


def test_the_key_of_a_source_follows_its_content(
    datasets: Any, tmp_path: Path, jsonl: Jsonl
) -> None:
    keys = set()
    for count in (1, 2):
        rows = [{"messages": CHAT}] * count
        table = datasets.Dataset.from_list(rows)
        table.save_to_disk(tmp_path / f"saved{count}")
        table.to_parquet(tmp_path / f"{count}.parquet")
        sources = [jsonl(*rows), tmp_path / f"saved{count}", tmp_path / f"{count}.parquet"]
        found = [open_source(str(source)).key() for source in sources]
        assert found == [open_source(str(source)).key() for source in sources]
        keys.update(found)
    assert len(keys) == 6


def test_a_dataset_of_another_kind_or_split_is_an_error(datasets: Any, tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"text": "x"}])
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "splits")
    with pytest.raises(UsageError, match="columns: text"):
        list(read_conversations(str(tmp_path / "splits")))
    with pytest.raises(UsageError, match=r"no split 'trian' \(did you mean 'train'\?\)"):
        read_conversations(f"{tmp_path / 'splits'}?split=trian")


def test_a_dataset_of_the_hub_that_cannot_be_loaded_says_what_to_check(datasets: Any) -> None:
    with pytest.raises(
        UsageError, match=r"hf:draftcore-tests/none, split train(.|\n)*check the name"
    ):
        read_conversations("hf:draftcore-tests/none")


def test_without_the_library_the_error_names_the_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'draftcore\[datasets\]'"):
        read_conversations("hf:org/name?split=train")
