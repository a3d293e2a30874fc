"""Rendered datasets: what is kept, what is left out and said, what is reused and rebuilt."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast as Tokenizer

from draftcore.data.conversations import conversations
from draftcore.data.dataset import DataOptions, build_dataset, read_prompts
from draftcore.data.rendering import Renderer
from draftcore.errors import UsageError

Jsonl = Callable[..., str]
MakeTokenizer = Callable[..., Tokenizer]

OPTIONS = DataOptions(max_length=64)


def chat(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


LONG = chat("Hi", "yes " * 100)
LONG_QUESTION = chat("why " * 100, "Four.")
NO_ANSWER = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def source(jsonl: Jsonl) -> str:
    return jsonl(chat("Hi", "Four."), chat("What is 2+2?", "It is the sum."))


def test_a_dataset_holds_what_the_renderer_renders(
    tmp_path: Path, chatml: Tokenizer, source: str
) -> None:
    dataset = build_dataset(source, chatml, OPTIONS, tmp_path / "data")
    renderer, lines = Renderer(chatml), Path(source).read_text().splitlines()
    rows = [renderer.render(json.loads(line)["messages"]) for line in lines]
    assert len(dataset) == 2
    for i, row in enumerate(rows):
        assert dataset.tokens(i).tolist() == row.token_ids
        assert dataset.loss_mask(i).tolist() == row.loss_mask
    assert dataset.tokens(0).dtype == np.int64
    assert dataset.loss_mask(0).dtype == np.bool_
    assert dataset.lengths.dtype == np.int64
    assert dataset.lengths.tolist() == [len(row.token_ids) for row in rows]

    learned = Counter(
        token
        for row in rows
        for token, keep in zip(row.token_ids, row.loss_mask, strict=True)
        if keep
    )
    assert dataset.summary.token_counts == learned
    assert dataset.summary.loss_tokens == learned.total()
    assert dataset.summary.tokens == dataset.lengths.sum()
    assert dataset.summary.max_length == dataset.lengths.max()
    assert dataset.summary.samples == 2
    assert dataset.summary.fingerprint == dataset.fingerprint


def test_rows_past_a_chunk_stay_in_order(tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl) -> None:
    """More rows than are tokenized in one call, with bad ones between them."""
    rows = [NO_ANSWER if i % 7 == 3 else chat("Hi", str(i)) for i in range(600)]
    dataset = build_dataset(jsonl(*rows), chatml, OPTIONS, tmp_path / "data")
    answers = [chatml.decode(dataset.tokens(i)[dataset.loss_mask(i)]) for i in range(len(dataset))]
    assert answers == [f"{i}<|im_end|>" for i in range(600) if i % 7 != 3]


def test_ids_name_row_content_and_dataset(tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl) -> None:
    rows = [chat("Hi", "a"), chat("Hi", "b"), chat("Hi", "a")]
    first = build_dataset(jsonl(*rows), chatml, OPTIONS, tmp_path / "1")
    other = build_dataset(jsonl(*rows[:2], name="b.jsonl"), chatml, OPTIONS, tmp_path / "2")
    bad_between = jsonl(rows[0], "{", *rows[1:], name="c.jsonl")
    same = build_dataset(bad_between, chatml, OPTIONS, tmp_path / "3")
    assert len({*first.feature_ids, *other.feature_ids}) == 5
    assert all(len(i) == 24 and int(i, 16) >= 0 for i in first.feature_ids)
    assert first.fingerprint != other.fingerprint
    assert (same.fingerprint, same.feature_ids) == (first.fingerprint, first.feature_ids)


def test_the_mask_is_part_of_the_fingerprint(
    tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl
) -> None:
    turns = chat("Hi", "a")["messages"] + chat("And?", "b")["messages"]
    source = jsonl({"messages": turns})
    whole = build_dataset(source, chatml, OPTIONS, tmp_path / "1")
    last = dataclasses.replace(OPTIONS, last_turn_only=True)
    last_only = build_dataset(source, chatml, last, tmp_path / "2")
    assert whole.tokens(0).tolist() == last_only.tokens(0).tolist()
    assert whole.fingerprint != last_only.fingerprint
    assert whole.feature_ids != last_only.feature_ids


# ---------------------------------------------------------------- policies


def test_every_row_left_out_is_counted_and_written_down(
    tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl
) -> None:
    source = jsonl(*["{"] * 25, chat("Hi", "Four."), NO_ANSWER, LONG)
    dataset = build_dataset(source, chatml, OPTIONS, tmp_path / "data")
    report = dataset.report
    assert (report.rows, report.kept) == (28, 1)
    counts = {s.reason: s.rows for s in report.skipped}
    assert counts == {"not valid JSON": 25, "no assistant turn": 1, "longer than 64 tokens": 1}
    assert report.skipped[0].examples == tuple(f"train.jsonl:{i}" for i in range(1, 21))
    log = (dataset.folder / "skipped.jsonl").read_text().splitlines()
    places = [json.loads(line)["where"] for line in log]
    assert places == [f"train.jsonl:{i}" for i in (*range(1, 26), 27, 28)]
    assert report.text().splitlines() == [
        f"{source}: 1 of 28 rows kept",
        "  25 left out: not valid JSON (train.jsonl:1, train.jsonl:2, train.jsonl:3, ...)",
        "  1 left out: no assistant turn (train.jsonl:27)",
        "  1 left out: longer than 64 tokens (train.jsonl:28)",
    ]


def test_truncation_keeps_the_head_and_drops_what_has_no_answer_left(
    tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl
) -> None:
    options = dataclasses.replace(OPTIONS, overlong="truncate")
    dataset = build_dataset(jsonl(LONG, LONG_QUESTION), chatml, options, tmp_path / "data")
    assert dataset.lengths.tolist() == [64]
    assert dataset.tokens(0).tolist() == Renderer(chatml).render(LONG["messages"]).token_ids[:64]
    assert dataset.loss_mask(0)[-1]
    assert dataset.report.truncated == 1
    assert [s.reason for s in dataset.report.skipped] == [
        "no token of an assistant in the first 64"
    ]


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ("{", {"bad_rows": "refuse"}, r"train\.jsonl:2: not valid JSON"),
        (NO_ANSWER, {"bad_rows": "refuse"}, r"train\.jsonl:2: no assistant turn"),
        (LONG, {"overlong": "refuse"}, r"train\.jsonl:2: longer than 64 tokens: \d+ tokens"),
        (
            LONG_QUESTION,
            {"bad_rows": "refuse", "overlong": "truncate"},
            r"train\.jsonl:2: no token of an assistant in the first 64",
        ),
    ],
)
def test_refusing_names_the_line_and_leaves_nothing_behind(
    tmp_path: Path,
    chatml: Tokenizer,
    jsonl: Jsonl,
    row: Any,
    options: dict[str, Any],
    says: str,
) -> None:
    source = jsonl(chat("Hi", "Four."), row)
    folder = tmp_path / "data"
    with pytest.raises(UsageError, match=says):
        build_dataset(source, chatml, dataclasses.replace(OPTIONS, **options), folder)
    assert [p.name for p in folder.iterdir()] == ["lock"]


def test_refusing_bad_rows_does_not_refuse_long_ones(
    tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl
) -> None:
    options = dataclasses.replace(OPTIONS, bad_rows="refuse", overlong="skip")
    dataset = build_dataset(jsonl(chat("Hi", "Four."), LONG), chatml, options, tmp_path / "data")
    assert dataset.report.kept == 1


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "has no rows"),
        (["{", "{"], r"can be used(.|\n)*train\.jsonl:1: not valid JSON"),
        (
            [NO_ANSWER] * 3,
            r"token of an assistant(.|\n)*train\.jsonl:1(.|\n)*check that the answers",
        ),
    ],
)
def test_a_dataset_without_a_usable_row_is_an_error(
    tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl, rows: list[Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        build_dataset(jsonl(*rows), chatml, OPTIONS, tmp_path / "data")


def test_markers_around_nothing_are_reported_as_no_assistant_token(
    tmp_path: Path, make_tokenizer: MakeTokenizer, source: str
) -> None:
    template = (
        "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(UsageError, match=r"\{% generation %\} markers"):
        build_dataset(source, make_tokenizer(template), OPTIONS, tmp_path / "data")


def test_the_limit_counts_rows_read(tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl) -> None:
    options = dataclasses.replace(OPTIONS, limit=2)
    source = jsonl("{", chat("Hi", "a"), chat("Hi", "b"))
    assert build_dataset(source, chatml, options, tmp_path / "data").report.rows == 2


# ---------------------------------------------------------------- reuse and crashes


def marker_age(folder: Path) -> int:
    return (folder / "dataset.json").stat().st_mtime_ns


def test_a_finished_folder_is_reused_until_something_it_depends_on_changes(
    tmp_path: Path, chatml: Tokenizer, make_tokenizer: MakeTokenizer, source: str
) -> None:
    folder = tmp_path / "data"

    def build(tokenizer: Tokenizer, options: DataOptions) -> tuple[str, int]:
        dataset = build_dataset(source, tokenizer, options, folder)
        return dataset.fingerprint, marker_age(folder)

    first = build(chatml, OPTIONS)
    os.utime(source)  # a new date is no new content
    assert build(chatml, OPTIONS) == first

    other_template = make_tokenizer(str(chatml.chat_template).replace("<|im_start|>", "<s>"))
    rendered_otherwise = build(other_template, OPTIONS)
    assert rendered_otherwise[0] != first[0]
    with Path(source).open("a") as file:
        file.write(json.dumps(chat("Hi", "more")) + "\n")
    longer = build(other_template, OPTIONS)
    assert longer[0] != rendered_otherwise[0]
    same_rows = build(other_template, dataclasses.replace(OPTIONS, max_length=63))
    assert same_rows[0] == longer[0]
    assert same_rows[1] != longer[1]


def test_a_short_file_is_noticed_and_built_again(
    tmp_path: Path, chatml: Tokenizer, source: str
) -> None:
    folder = tmp_path / "data"
    tokens = build_dataset(source, chatml, OPTIONS, folder).tokens(1).tolist()
    os.truncate(folder / "tokens.bin", 8)
    assert build_dataset(source, chatml, OPTIONS, folder).tokens(1).tolist() == tokens


BUILD_AND_DIE = """
import os, signal, sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from draftcore.data import dataset

source, tokenizer, folder = sys.argv[1:]
read = dataset.conversations

def die(*given):
    for number, row in enumerate(read(*given)):
        if number == 300:
            assert (Path(folder) / "partial" / "tokens.bin").exists()
            os.kill(os.getpid(), signal.SIGKILL)
        yield row

dataset.conversations = die
tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer)
dataset.build_dataset(source, tokenizer, dataset.DataOptions(max_length=64), Path(folder))
"""


def test_what_a_killed_process_left_is_replaced(
    tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl
) -> None:
    source, folder = jsonl(*[chat("Hi", str(i)) for i in range(600)]), tmp_path / "data"
    chatml.save_pretrained(tmp_path / "tokenizer")
    program = [sys.executable, "-c", BUILD_AND_DIE, source, tmp_path / "tokenizer", folder]
    assert subprocess.run(list(map(str, program))).returncode == -signal.SIGKILL
    assert (folder / "partial").exists()
    dataset = build_dataset(source, chatml, OPTIONS, folder)
    assert len(dataset) == 600
    assert not (folder / "partial").exists()


def test_one_process_builds_while_the_others_wait_and_reuse(
    tmp_path: Path, chatml: Tokenizer, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is locked from before the first row is read until the marker is in place."""
    folder = tmp_path / "data"
    entered, go_on = threading.Event(), threading.Event()

    def slowly_once(*given: Any) -> Iterator[Any]:
        assert not entered.is_set(), "the second one renders again"
        entered.set()
        assert go_on.wait(30)
        yield from conversations(*given)

    monkeypatch.setattr("draftcore.data.dataset.conversations", slowly_once)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(build_dataset, source, chatml, OPTIONS, folder)
        assert entered.wait(30)
        second = pool.submit(build_dataset, source, chatml, OPTIONS, folder)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)
        go_on.set()
        assert first.result(30).fingerprint == second.result(30).fingerprint


def test_a_reader_keeps_its_rows_while_another_dataset_takes_the_folder(
    tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl, source: str
) -> None:
    folder = tmp_path / "data"
    before = build_dataset(source, chatml, OPTIONS, folder)
    expected = before.tokens(1).tolist()
    build_dataset(jsonl(chat("Other", "rows"), name="b.jsonl"), chatml, OPTIONS, folder)
    assert before.tokens(1).tolist() == expected


def test_a_row_outside_the_dataset_is_an_index_error(
    tmp_path: Path, chatml: Tokenizer, source: str
) -> None:
    dataset = build_dataset(source, chatml, OPTIONS, tmp_path / "data")
    for row in (-1, 2):
        with pytest.raises(IndexError, match=f"row {row} of 2"):
            dataset.tokens(row)


# ---------------------------------------------------------------- prompts


def test_prompts_drop_the_last_answer_and_report_what_is_left_out(
    chatml: Tokenizer, jsonl: Jsonl
) -> None:
    source = jsonl(chat("Hi", "Four."), "{", LONG_QUESTION, chat("Hi", "beyond the limit"))
    (prompt,), report = read_prompts(source, chatml, limit=3, max_prompt=64)
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.where == "train.jsonl:1"
    assert chatml.decode(prompt.token_ids, skip_special_tokens=False) == expected
    assert (report.rows, report.kept) == (3, 1)
    reasons = {s.reason for s in report.skipped}
    assert reasons == {"not valid JSON", "the prompt is longer than 64 tokens"}
    with pytest.raises(UsageError, match="can be used"):
        read_prompts(source, chatml, limit=3, max_prompt=2)
