"""Rows come out in order, usable or with the line and the reason why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftcore_data.conversations import BadRow, Conversation, is_learned, parse_row
from draftcore_data.sources import read_conversations

from draftcore.errors import UsageError

Jsonl = Callable[..., str]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]


def saying(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [*CHAT, {"role": role, "content": content}]}


def test_all_shapes_and_their_mixtures_read_alike(jsonl: Jsonl) -> None:
    source = jsonl(
        {"messages": CHAT},
        {"conversations": SHAREGPT},
        {"id": "x", "conversations": CHAT},
        {"messages": None, "conversations": SHAREGPT},
        {"prompt": "Hi", "completion": "Yes?"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "Hi", "input": "", "output": "Yes?"},
        {"messages": [{"role": "human", "content": "Hi"}, {"role": "model", "content": "Yes?"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]]},
    )
    expected = [Conversation(f"train.jsonl:{line}", tuple(CHAT)) for line in range(1, 10)]
    assert list(read_conversations(source)) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken", "not valid JSON: Expecting property name"),
        ('{"messages": ' + "[" * 100_000, "not valid JSON: maximum recursion"),
        ('{"messages": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit"),
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
        (saying("user", [3]), "content is not text: message 3 (user): int"),
        (saying("assistant", [{"type": "image", "url": "x"}]), "an answer holds images, and text"),
        (
            saying("user", [{"type": "image_url"}]),
            "an image is neither a path nor a URI: message 3",
        ),
        (
            saying("user", [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]),
            "an image is not on this machine: message 3 (user): https://a.b/c.png",
        ),
        (saying("function_call", "add"), "a function_call is not valid JSON: Expecting value"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, "weight is not 0 or 1"),
        ({"messages": [CHAT[0], {**CHAT[1], "thinking": [3]}]}, "reasoning is not text: message 2"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": [3]}]}, "a tool call is not an object"),
        ({"completion": "x"}, "no messages or conversations: keys 'completion'"),
        ({"input_ids": [1, 2]}, "input_ids without loss_mask or labels"),
        (
            {"input_ids": [1, 2], "labels": [1]},
            "input_ids and its mask are not of one length: 2 and 1",
        ),
        ({"input_ids": [1, 0.5], "labels": [1, 2]}, "a row of tokens is not a list of integers"),
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


def test_reasoning_and_calls_are_found_by_whatever_name_they_have(jsonl: Jsonl) -> None:
    function = {"name": "add", "arguments": {"a": 2}}
    as_text = {"name": "add", "arguments": '{"a": 2}'}
    ways: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": as_text}]},
        {"role": "assistant", "function_call": as_text},
        {"from": "function_call", "value": json.dumps(function)},
    ]
    names = ("reasoning_content", "reasoning", "thinking")
    rows = [{"messages": [CHAT[0], {**way, name: "hm"}]} for way in ways for name in names]
    for row in read_conversations(jsonl(*rows)):
        assert isinstance(row, Conversation)
        assert row.messages[1] == {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
            "reasoning_content": "hm",
        }


def test_of_a_prompt_of_several_turns_the_completion_alone_is_learned() -> None:
    row = parse_row("x", {"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:]})
    assert isinstance(row, Conversation)
    assert [is_learned(turn) for turn in row.messages if turn["role"] == "assistant"] == [
        False,
        True,
    ]


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
        ("{folder}", "array.jsonl is one JSON array"),
        ("{folder}/none", "no such data"),
        ("{folder}/*.json", "no such data"),
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
