"""The dist's plugin and its prompt sets: our own, published ones in their files' forms, conversations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from draftcore_bench.prompts import PUBLISHED, read_prompts
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.prompts import PromptsSuite

from draftcore.errors import UsageError

ROWS = {
    "mt-bench": {"category": "writing", "turns": ["Write.", "Write anew."]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n"},
    "gsm8k": {"question": "How many?", "answer": "2"},
    "math-500": {"problem": "Solve.", "solution": "x", "level": 2},
}
ASKED = {
    "mt-bench": ("mt-bench/writing", "Write."),
    "humaneval": ("humaneval", "Complete this Python function.\n\ndef add(a, b):\n"),
    "gsm8k": ("gsm8k", "How many?"),
    "math-500": ("math-500", "Solve."),
}


class TestPlugin(PluginSuite):
    plugin = "draftcore_bench.plugin"


class TestOwn(PromptsSuite):
    plugin = "draftcore_bench.plugin"
    name = "own"


class TestPublished(PromptsSuite):
    plugin = "draftcore_bench.plugin"
    name = "mt-bench"

    @pytest.fixture
    def prompts_uri(self, tmp_path: Path) -> str:
        (tmp_path / "question.jsonl").write_text(2 * (json.dumps(ROWS["mt-bench"]) + "\n"))
        return f"mt-bench:{tmp_path}/question.jsonl"


def test_our_own_are_two_dozen_of_four_categories() -> None:
    counts = Counter(prompt.category for prompt in read_prompts("own", "own"))
    assert counts == dict.fromkeys(("chat", "code", "math", "long"), 6)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sets_are_read_from_their_files(name: str, tmp_path: Path) -> None:
    (file := tmp_path / "it.jsonl").write_text(json.dumps(ROWS[name]))
    (prompt,) = read_prompts(name, f"{name}:{file}")
    category, text = ASKED[name]
    assert (prompt.category, prompt.messages[0]["content"]) == (category, text)
    file.write_text(json.dumps({"other": 1}))
    with pytest.raises(UsageError, match=r"it.jsonl:1 asks nothing\n  each row has to have"):
        read_prompts(name, f"{name}:{file}")


def test_conversations_are_asked_up_to_their_last_question(tmp_path: Path) -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    (tmp_path / "mine.jsonl").write_text(json.dumps({"messages": turns}))
    (prompt,) = read_prompts("files", f"files:{tmp_path}/mine.jsonl")
    assert (prompt.category, [m["role"] for m in prompt.messages]) == ("mine", ["system", "user"])
    (tmp_path / "mine.jsonl").write_text("no json")
    with pytest.raises(UsageError, match="is no object of JSON"):
        read_prompts("files", f"files:{tmp_path}/mine.jsonl")
