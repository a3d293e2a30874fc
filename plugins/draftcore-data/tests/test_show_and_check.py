"""`draftcore data show` and `check`: what is learned, and whose words it is."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftcore_data.api import check, show
from talking import QUICKSTART, Cli, Json, chat, rows_of, write_rows, write_run

Config = Callable[..., Path]


@pytest.fixture
def config(tmp_path: Path, target_folder: Path) -> Config:
    """Write the YAML of a run on these rows."""

    def write(*rows: Json, options: Json | None = None, **data: Any) -> Path:
        train = str(write_rows(tmp_path / "rows.jsonl", *rows))
        return write_run(tmp_path, target_folder, options, train=train, **data)

    return write


def test_on_a_terminal_what_is_learned_is_coloured_and_control_escaped(config: Config) -> None:
    """By a process of its own, whose standard output is a terminal."""
    file = config(chat("one\x1b[2J", "uno"))
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "draftcore", "data", "show", str(file)]
    with subprocess.Popen(command, stdout=theirs) as child:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert child.returncode == 0
    assert b"assistant\r\n\x1b[32muno<|im_end|>\x1b[0m" in shown
    assert b"one\\x1b[2J<|im_end|>" in shown
    assert "⟦".encode() not in shown


@pytest.mark.parametrize("overlong", ["skip", "truncate"])
def test_lengths_are_of_all_rows_those_too_long_too(
    cli: Cli, config: Config, overlong: str
) -> None:
    """Else nobody sees how long `max_length` would have to be."""
    rows = [chat("q", "a" * n) for n in range(1, 101)]
    limits = {"max_length": 92, "overlong": overlong}  # a row has 32 tokens beside its answer
    file = config(*rows, {"messages": []}, **limits)
    found = json.loads(cli("data", "show", file, "--json", "--rows", 2).stdout)
    base = found["lengths"]["min"] - 1
    expected = {"min": 1, "median": 50, "p95": 95, "max": 100}
    assert found["lengths"] == {name: base + length for name, length in expected.items()}
    assert found["max_length_for_95"] == base + 95
    assert found["within_max_length"] == (92 - base) / 100
    left = 1 + (overlong == "skip") * (100 - (92 - base))
    assert len(found["left_out"]) == left
    bad = {"where": "rows.jsonl:101", "reason": "the conversation is empty", "detail": ""}
    assert bad in found["left_out"]
    assert found["kept"] == 101 - left
    assert len(found["rows"]) == 2
    assert Path(found["report"]).exists()
    told = cli("data", "show", file)
    assert "left out: the conversation is empty (rows.jsonl:101)" in told.stderr
    assert found["report"] in told.stdout
    larger = json.loads(cli("data", "show", file, "data.max_length=200", "--json").stdout)
    assert larger["lengths"] == found["lengths"]


def test_what_a_template_drops_is_said(cli: Cli, config: Config) -> None:
    row = chat("one", "uno")
    row["messages"][1]["reasoning_content"] = "it is Spanish"
    said = "reasoning of 1 answers is not in the rendered text"
    result = cli("data", "show", config(row), "--json")
    assert json.loads(result.stdout)["notes"] == [said]
    assert said in result.stderr


def test_own_answers_are_told_from_those_of_others(
    cli: Cli, config: Config, tmp_path: Path
) -> None:
    """A target that was trained: its own are made by `regenerate`, and then given to other questions."""
    tiny = f"target.path={QUICKSTART / 'target'}", "target.dtype=float32"
    source, out = f"data.train={QUICKSTART / 'data' / 'eval.jsonl'}", tmp_path / "own.jsonl"
    asked, given = ("--max-tokens", 48), ("--out", out, "--in-process", "--rows", 8)
    cli("data", "regenerate", config(), *tiny, source, *given, *asked)
    own = [row["messages"] for row in rows_of(out)]

    def check(answers: Sequence[str], *more: str, status: int = 0) -> str:
        pairs = zip((messages[0]["content"] for messages in own), answers, strict=True)
        file = config(*(chat(*pair) for pair in pairs))
        return cli("data", "check", file, *tiny, *asked, *more, status=status).stdout

    answers = [messages[1]["content"] for messages in own]
    found = json.loads(check(answers, "--json"))
    assert (found["rows"], found["verdict"]) == (8, "own")
    assert found["data"]["argmax"] > 0.95, "but for the ends of answers that were cut"
    assert found["own"]["argmax"] == 1.0
    foreign = json.loads(check([*answers[1:], answers[0]], "--json", status=1))
    assert foreign["verdict"] == "foreign"
    assert foreign["data"]["likelihood"] < foreign["data"]["expected_likelihood"] - 0.5
    assert foreign["data"]["argmax"] < 0.8
    assert foreign["own"] == found["own"], "it answers the same prompts alike"
    people = ["We would rather not write this one, since a library has it already."] * 8
    assert "the answers are not the target's own" in check(people, status=1)


def test_a_program_gets_rows_figures_and_the_verdict_as_records(config: Config) -> None:
    file = config(*(chat("one", "uno") for _ in range(3)))
    shown = show(file, rows=1)
    assert (len(shown.rows), shown.figures["kept"]) == (1, 3)
    assert ("uno<|im_end|>", True) in [(text.strip(), on) for text, on in shown.rows[0].parts]
    verdict = check(yaml.safe_load(file.read_text()), rows=2, max_tokens=4)
    assert (verdict.rows, verdict.name) == (2, "foreign")
