"""What conversations are rendered to, by each way in which an answer's place is found, as digests.

A rendered dataset is reused while its key is the same, and `FORMAT` is the part of it that stands for
the code. So where the rows of `rendering_golden.json` change, everyone's rendered rows are old.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import test_rendering as one_text
import test_served as served
from draftcore_data.conversations import Conversation, Rendered, parse_row
from draftcore_data.options import DataOptions
from draftcore_data.rendering import FORMAT, Renderer
from draftcore_sdk.targets import byte_tokenizer

GOLDEN = Path(__file__).with_name("rendering_golden.json")
SPECIALS = ["</s>", "<|user|>", "<|assistant|>", "<|end|>", "<|call|>"]
TOKENS = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}
THOUGHT = "<think>\nhm\n</think>\n\nFour."
# The template, the messages or the row of tokens, and the options.
WAYS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "prompt is a prefix of the text": (one_text.CHATML, one_text.TWO_TURNS, {}),
    "last turn only": (one_text.CHATML, one_text.TWO_TURNS, {"last_turn_only": True}),
    "no generation prompt": (one_text.VICUNA_ALONE, one_text.TWO_TURNS, {}),
    "content is trimmed": (one_text.LLAMA3, one_text.talk("Hi", " Four. \n", "?", "\nsum "), {}),
    "content is probed for": (one_text.QWEN3_NO_THINKING, one_text.TWO_TURNS, {}),
    "markers": (one_text.MARKED, one_text.TWO_TURNS, {}),
    "markers of turns left out": (
        one_text.MARKED,
        [*one_text.TWO_TURNS, served.user("?"), served.said("!", weight=0)],
        {},
    ),
    "tool calls": (one_text.TOOLS, [served.user("?"), served.said("Well.", "", served.CALL)], {}),
    "a text per answer": (served.QWEN3, [*served.THINKING, *served.TWICE], {}),
    "prompt and answer joined": (served.GPT_OSS, [*served.THINKING, *served.TWICE], {}),
    "reasoning is dropped": (served.R1, [served.user("?"), served.said(THOUGHT)], {}),
    "rows of tokens": (one_text.CHATML, TOKENS, {}),
}


def digest(template: str, row: Any, options: dict[str, Any]) -> str:
    """Return a digest of the tokens, masks and notes of a conversation's rows, and of its prompt."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(SPECIALS, special_tokens=True)
    renderer = Renderer(tokenizer, DataOptions(**options), "2026-01-02T03:04:05")
    rows = list(renderer.render([parse_row("x", row if row is TOKENS else {"messages": row})]))
    assert all(isinstance(row, Rendered) and row.loss_mask.any() for row in rows), rows
    data: list[Any] = [
        (row.token_ids.tolist(), row.loss_mask.tolist(), row.notes)
        for row in rows
        if isinstance(row, Rendered)
    ]
    if row is not TOKENS:
        data.append(renderer.prompt_ids(Conversation("x", tuple(row))))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_rendered_changes_with_the_format_number_alone(way: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    rendered = {"format": FORMAT, way: digest(*WAYS[way])}
    assert rendered == {"format": golden["format"], way: golden["rows"].get(way)}, (
        f"{way}: rendering changed: raise FORMAT in draftcore_data/rendering.py and renew this golden, "
        f"{GOLDEN.name}, with\n"
        + json.dumps(
            {"format": FORMAT, "rows": {way: digest(*WAYS[way]) for way in WAYS}}, indent=2
        )
    )
