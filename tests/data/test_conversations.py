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


def saying(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [*CHAT, {"role": role, "content": content}]}


def test_both_shapes_and_their_mixtures_read_alike(jsonl: Jsonl) -> None:
    source = jsonl(
        {"messages": CHAT},
        {"conversations": SHAREGPT},
        {"id": "x", "conversations": CHAT},
        {"messages": None, "conversations": SHAREGPT},
    )
    expected = [Conversation(f"train.jsonl:{line}", tuple(CHAT)) for line in (1, 2, 3, 4)]
    assert list(read_conversations(source)) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken", "not valid JSON: Expecting property name"),
        ('{"messages": ' + "[" * 100_000, "not valid JSON: maximum recursion"),
        ("7", "the row is not an object: int"),
        ({"text": "x"}, "no messages or conversations: keys 'text'"),
        ({"messages": "x"}, "messages is not a list: str"),
        ({"messages": []}, "the conversation is empty"),
        ({"messages": ["x"]}, "a message is not an object: message 1: str"),
        ({"messages": [{"content": "x"}]}, "a message has no role: message 1"),
        (
            saying("asistant", "x"),
            "unknown role: message 3: 'asistant' (did you mean 'assistant'?)",
        ),
        (saying("assistant", None), "a message has no content: message 3 (assistant)"),
        (saying("user", ["x"]), "content is not text: message 3 (user): list"),
        ({"messages": CHAT[:1]}, "no assistant turn: roles user"),
        ({"messages": CHAT, "tools": [3]}, "tools is not a list of objects"),
        ({"messages": CHAT, "tools": "[3"}, "tools is not valid JSON: Expecting ',' delimiter"),
    ],
)
def test_a_bad_row_says_where_and_why(jsonl: Jsonl, row: Any, reason: str) -> None:
    _, bad, _ = read_conversations(jsonl({"messages": CHAT}, row, {"messages": CHAT}))
    assert isinstance(bad, BadRow)
    assert str(bad).startswith(f"train.jsonl:2: {reason}")


def test_bad_bytes_and_empty_lines_keep_the_line_numbers_right(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    good = b'{"messages": [{"role": "gpt", "content": "x"}]}'
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n\n\xff\n" + good)
    rows = list(read_conversations(str(path)))
    assert [row.where for row in rows] == [f"train.jsonl:{line}" for line in (1, 3, 4)]
    assert [isinstance(row, BadRow) for row in rows] == [False, True, False]
    assert "can't decode byte 0xff" in str(rows[1])


def test_tool_calls_need_no_content_and_other_fields_pass_through(jsonl: Jsonl) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    tools = ([{"name": "add"}], '[{"name": "add"}]')
    rows = jsonl(*[{"messages": [CHAT[0], call], "tools": one} for one in tools])
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


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{folder}/trian.jsonl", r"did you mean 'train\.jsonl'"),
        ("{folder}", r"name one of its files instead: array\.jsonl, train\.jsonl"),
        ("{folder}/train.jsonl?split=train", "unknown option 'split'"),
        ("hf:some/name?splt=train", "did you mean 'split'"),
        ("{folder}/array.jsonl", "one JSON array"),
    ],
)
def test_an_unreadable_source_is_an_error_before_the_first_row(
    tmp_path: Path, jsonl: Jsonl, source: str, says: str
) -> None:
    jsonl({"messages": CHAT})
    jsonl("[{}]", name="array.jsonl")
    with pytest.raises(UsageError, match=says):
        read_conversations(source.format(folder=tmp_path))


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
            keys.add(open_source(f"{prefix}{tmp_path / name}").key())
            rows = list(read_conversations(f"{prefix}{tmp_path / name}"))
            assert [row.where.rpartition(":")[2] for row in rows] == list(map(str, range(count)))
            assert all(isinstance(r, Conversation) and r.messages == tuple(CHAT) for r in rows)
    assert len(keys) == 5, "the key follows the content of the files"
    with pytest.raises(UsageError, match=r"no split 'trian' \(did you mean 'train'\?\)"):
        read_conversations(f"{tmp_path / 'splits'}?split=trian")


def test_a_table_that_cannot_be_read_says_what_to_check(
    datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match="columns: text"):
        read_conversations(str(tmp_path / "saved"))
    with pytest.raises(UsageError, match=r"hf:org/none, split train(.|\n)*check the name"):
        read_conversations("hf:org/none")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'draftcore\[datasets\]'"):
        read_conversations("hf:org/none")
