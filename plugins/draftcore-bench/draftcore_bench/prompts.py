"""Prompt sets: what a server is asked, by category. Ours, published ones, and any conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftcore.errors import UsageError


@dataclass(frozen=True)
class Prompt:
    """A conversation up to what a server is to answer: messages of {role, content}, a user's last."""

    category: str
    messages: tuple[Mapping[str, Any], ...]


# Published sets: where each lies on the Hub, what stands before its questions, and their column.
PUBLISHED = {
    "mt-bench": ("hf:HuggingFaceH4/mt_bench_prompts?split=train", "", "turns", "prompt"),
    "humaneval": (
        "hf:openai/openai_humaneval?split=test",
        "Complete this Python function.\n\n",
        "prompt",
    ),
    "gsm8k": ("hf:openai/gsm8k?config=main&split=test", "", "question"),
    "math-500": ("hf:HuggingFaceH4/MATH-500?split=test", "", "problem"),
}


def read_prompts(name: str, uri: str) -> Sequence[Prompt]:
    """Read a set of ours: `uri` is its name, or NAME:PLACE. Raises UsageError.

    A published question of several turns is asked up to the first. A prompt's category is that of its
    row, within its set.
    """
    place, published = uri.partition(":")[2], PUBLISHED.get(name, ())
    if published:
        place = place or published[0]
    elif bool(place) == (name == "own"):
        raise UsageError(
            f"{uri!r} names no prompts\n  write own, files:FILE or hf:ORG/NAME?split=test"
        )
    elif name != "files":
        place = uri if name == "hf" else str(Path(__file__).with_name("own.jsonl"))
    above = name if published else "" if name == "own" else Path(place.partition("?")[0]).stem
    prompts = []
    for where, row in rows_at(place):
        messages = asked(where, row, *published[1:])
        prompts.append(
            Prompt("/".join(filter(None, (above, str(row.get("category") or "")))), messages)
        )
    if not prompts:
        raise UsageError(f"there is no prompt in {place}\n  give conversations, one a line")
    return prompts


def rows_at(place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file, or of a table of the Hub (`hf:...`), with their places."""
    from draftcore_data.files import open_files
    from draftcore_data.tables import open_table

    source = open_table(place) if place.startswith("hf:") else open_files(f"files:{place}")
    for where, row in source.rows():
        try:
            yield where, dict(json.loads(row) if isinstance(row, bytes) else row)
        except (ValueError, TypeError):
            raise UsageError(f"{where} is no object of JSON\n  correct the line") from None


def asked(
    where: str, row: Any, instruction: str = "", *columns: str
) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a row, up to its last user's turn. Raises UsageError for one that has none.

    Of a published set it is the text in one of these columns, the first if there are several.
    """
    from draftcore_data.conversations import Conversation, parse_row

    if columns:
        texts = [row[column] for column in columns if row.get(column)]
        text = next((t if isinstance(t, str) else t[0] for t in texts), "")
        row = {"messages": [{"role": "user", "content": instruction + text}] * bool(text)}
    parsed = parse_row(where, row)
    messages = parsed.messages if isinstance(parsed, Conversation) else ()
    while messages and messages[-1]["role"] != "user":
        messages = messages[:-1]
    if not messages:
        form = " or ".join(columns) or "a conversation with a user's turn"
        raise UsageError(f"{where} asks nothing\n  each row has to have {form}")
    return messages
