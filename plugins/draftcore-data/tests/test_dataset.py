"""Rendered datasets: what is kept, what is left out and said, what is reused and rebuilt."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftcore_data import parallel
from draftcore_data.dataset import Dataset, build_dataset, read_prompts
from draftcore_data.options import DataOptions
from draftcore_data.rendering import Renderer
from draftcore_sdk.targets import tiny_target
from talking import QUICKSTART, Jsonl, MakeTokenizer, chat, write_rows, write_run
from transformers import PreTrainedTokenizerFast as Tokenizer

from draftcore import open_run
from draftcore.contracts.algorithm import DataSummary
from draftcore.errors import DraftcoreError, UsageError

Build = Callable[..., Dataset]
LONG, LONG_QUESTION, NO_ANSWER = chat("Hi", "yes " * 100), chat("why " * 100, "Four."), chat("Hi")


@pytest.fixture
def source(jsonl: Jsonl) -> str:
    return jsonl(chat("Hi", "Four."), chat("What is 2+2?", "It is the sum."))


@pytest.fixture
def build(tmp_path: Path, make_tokenizer: MakeTokenizer) -> Build:
    def build(source: str, *template: str, name: str = "data", **options: Any) -> Dataset:
        config = DataOptions(**{"max_length": 64, "bad_rows": "skip", **options})
        return build_dataset(source, make_tokenizer(*template), config, tmp_path / name)

    return build


def test_what_checkpoints_hold_of_a_dataset_never_changes(tmp_path: Path, jsonl: Jsonl) -> None:
    """Written out: stores of features hold the ids, too."""
    tokenizer = Tokenizer.from_pretrained(QUICKSTART / "target")
    source = jsonl(chat("Hi", "a", "And?", "b"), chat("Hi", "b"))
    dataset = build_dataset(source, tokenizer, DataOptions(), tmp_path / "data")
    learned = [dataset.tokens(row)[dataset.loss_mask(row)].tolist() for row in (0, 1)]
    assert learned == [[67, 2, 68, 2], [68, 2]]
    assert dataset.tokens(0).dtype == dataset.lengths.dtype == np.int64
    assert dataset.loss_mask(0).dtype == np.bool_
    assert dataset.lengths.tolist() == [31, 15]
    assert dataset.feature_ids == ("997ff2ac5d0dbd3ed905479e", "93e04de88cc568aceb3e8b39")
    assert dataset.summary == DataSummary(
        fingerprint="c54f71e0c00107ae5830817855e04b1e", samples=2, tokens=46, loss_tokens=6, max_length=31,
        token_counts={2: 3, 67: 1, 68: 2}, chat_template="d7fc22e8f20b92957775bea292927515",
    )  # fmt: skip


def test_ids_name_row_content_mask_and_dataset(jsonl: Jsonl, build: Build) -> None:
    rows = [chat("Hi", "a"), chat("Hi", "b", "And?", "c"), chat("Hi", "a")]
    first = build(jsonl(*rows), name="1")
    fewer = build(jsonl(*rows[:2], name="b.jsonl"), name="2")
    last = build(jsonl(*rows), name="3", last_turn_only=True)
    assert last.tokens(1).tolist() == first.tokens(1).tolist()
    assert len({first.fingerprint, fewer.fingerprint, last.fingerprint}) == 3
    assert len({*first.feature_ids, *fewer.feature_ids, *last.feature_ids}) == 8
    same = build(jsonl(rows[0], "{", *rows[1:], name="c.jsonl"), name="4")
    assert (same.fingerprint, same.feature_ids) == (first.fingerprint, first.feature_ids)


# ---------------------------------------------------------------- policies


def test_rows_left_out_are_counted_and_written(tmp_path: Path, jsonl: Jsonl, build: Build) -> None:
    source = jsonl(*["{"] * 25, chat("Hi", "Four."), NO_ANSWER, LONG)
    for report in (build(source).report, build(source).report):  # rendered, and reused
        assert report.text().splitlines() == [
            f"{source}: 1 of 28 rows kept",
            "  25 left out: not valid JSON (train.jsonl:1, train.jsonl:2, train.jsonl:3, ...)",
            "  1 left out: no assistant turn (train.jsonl:27)",
            "  1 left out: longer than 64 tokens (train.jsonl:28)",
        ]
    written = json.loads((tmp_path / "data" / "dataset.json").read_text())["report"]["skipped"]
    assert [where for where, *_ in written] == [f"train.jsonl:{i}" for i in (*range(1, 26), 27, 28)]
    says = r"26 of 27 rows cannot be used, more than data.bad_rows=0.1"
    with pytest.raises(UsageError, match=says):
        build(source, bad_rows=0.1)
    report = build(jsonl(LONG, chat("Hi", "a"), "{"), bad_rows="refuse", limit=2).report
    assert (report.kept, len(report.skipped)) == (1, 1)  # nor long ones, nor what is past the limit


def test_truncation_keeps_the_head_and_drops_what_has_no_answer(jsonl: Jsonl, build: Build) -> None:
    source = jsonl(LONG, LONG_QUESTION)
    dataset, whole = build(source, overlong="truncate"), build(source, max_length=900, name="whole")
    assert dataset.lengths.tolist() == [64]
    assert dataset.tokens(0).tolist() == whole.tokens(0)[:64].tolist()
    assert dataset.loss_mask(0)[-1]
    assert dataset.report.truncated == 1
    reasons = [bad.reason for bad in dataset.report.skipped]
    assert reasons == ["no token of an assistant in the first 64"]


def test_what_a_target_cannot_read_is_left_out_or_refused(tmp_path: Path) -> None:
    """Rows and prompts beyond its positions, and a tokenizer that writes what it has no embedding of."""
    rows = [chat("Hi", "Four."), chat("why " * 100, "Four."), chat("Hello", "yes " * 100)]
    both = str(write_rows(tmp_path / "rows.jsonl", *rows))
    data: dict[str, Any] = {"train": both, "eval": both, "eval_on_train": True, "bad_rows": "skip"}

    def conversations(name: str, **config: Any) -> Any:
        (tmp_path / name).mkdir()
        target = tiny_target(tmp_path / name / "target", **config)
        with open_run(write_run(tmp_path / name, target, **data)) as run:
            return run.data

    short = conversations("short", max_position_embeddings=200)
    dataset = short.samples("train")
    assert "2 left out: longer than the target's 200 positions" in dataset.report.text()
    assert len(dataset.lengths) == 1
    prompts = short.prompts()
    assert len(prompts.token_ids) == 2
    assert prompts.about["left_out"] == {"the prompt is longer than the target's 200 positions": 1}
    narrow = conversations("narrow", vocab_size=250, pad_token_id=None, eos_token_id=1)
    for ask in (narrow.prompts, lambda: narrow.samples("train")):
        with pytest.raises(UsageError, match=r"wrote the token 257, and .* has 250 rows"):
            ask()


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ("{", {"bad_rows": "refuse"}, "not valid JSON"),
        (NO_ANSWER, {"bad_rows": "refuse"}, "no assistant turn"),
        (LONG, {"overlong": "refuse"}, r"longer than 64 tokens: \d+ tokens"),
        (LONG_QUESTION, {"bad_rows": "refuse", "overlong": "truncate"}, "in the first 64"),
    ],
)
def test_refusing_names_the_line_and_keeps_the_earlier_dataset(
    source: str, jsonl: Jsonl, build: Build, row: Any, options: dict[str, Any], says: str
) -> None:
    before = build(source)
    bad = jsonl(*[chat("Hi", "Four.")] * 300, row, name="bad.jsonl")
    with pytest.raises(UsageError, match=rf"bad\.jsonl:301: .*{says}"):
        build(bad, **options)
    assert build(source).fingerprint == before.fingerprint
    assert build(bad).report.kept == 300  # and what the refused build left behind does no harm
    assert before.tokens(1).tolist() == build(source).tokens(1).tolist()


UNMARKED = "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("rows", "template", "says"),
    [
        ([], [], r"train\.jsonl is empty"),
        (["{", "{"], [], r"be used\n  2 left out: not valid JSON: Exp.*train\.jsonl:1.*\n.*\.csv"),
        (
            [NO_ANSWER] * 4,
            [],
            r"be used\n  4 left out: no assistant turn: .*\n.*\n.*data regenerate",
        ),
        (
            [{"q": "x"}],
            [],
            r"no known shape: keys 'q' .*\n  a row has messages(.|\n)*data\.columns",
        ),
        ([chat("Hi", "a")], [UNMARKED], r"no token(.|\n)*\{% generation %\} markers"),
    ],
)
def test_a_dataset_without_a_usable_row_is_an_error(
    jsonl: Jsonl, build: Build, rows: list[Any], template: list[str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        build(jsonl(*rows), *template)


# ---------------------------------------------------------------- reuse and crashes


def test_a_finished_folder_is_reused_until_something_it_depends_on_changes(
    tmp_path: Path, chatml: Tokenizer, source: str, build: Build
) -> None:
    def built(*template: str, **options: Any) -> tuple[str, int]:
        fingerprint = build(source, *template, **options).fingerprint
        return fingerprint, (tmp_path / "data" / "dataset.json").stat().st_mtime_ns

    first = built()
    os.utime(source)  # a new date is no new content
    assert built() == first
    other = str(chatml.chat_template).replace("<|im_start|>", "<s>")
    rendered_otherwise = built(other)
    assert rendered_otherwise[0] != first[0]
    with Path(source).open("a") as file:
        file.write(json.dumps(chat("Hi", "more")) + "\n")
    longer, same_rows = built(other), built(other, max_length=63)
    assert rendered_otherwise[0] != longer[0] == same_rows[0]
    assert same_rows[1] != longer[1]


@pytest.mark.parametrize("file", ["rows.bin", "dataset.json"])
def test_a_file_that_is_not_as_it_was_written_is_noticed_and_written_again(
    tmp_path: Path, source: str, build: Build, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, written = build(source).tokens(1).tolist(), tmp_path / "data" / file
    for damaged in (written.read_bytes()[:10], written.read_bytes()[::-1]):
        written.write_bytes(damaged)
        assert build(source).tokens(1).tolist() == tokens
        assert "dataset.json is not what was written there" in caplog.text
        caplog.clear()
    assert build(source).tokens(1).tolist() == tokens
    assert not caplog.text


def test_a_row_that_changes_in_use_is_not_learned(
    tmp_path: Path, source: str, build: Build
) -> None:
    """Whatever byte of it does, and no other row."""
    dataset, rows = build(source), tmp_path / "data" / "rows.bin"
    whole, first = rows.read_bytes(), dataset.tokens(0).tolist()
    for at in range(5 * int(dataset.lengths[0]), len(whole)):
        with rows.open("r+b") as file:
            file.write(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DraftcoreError, match=r"row 1 in .*rows\.bin was altered"):
            dataset.loss_mask(1)
    assert dataset.tokens(0).tolist() == first


def test_a_build_waits_for_the_one_under_way(tmp_path: Path, source: str, build: Build) -> None:
    (tmp_path / "data").mkdir()
    with ThreadPoolExecutor(1) as pool, (tmp_path / "data" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = pool.submit(build, source)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
    assert waiting.result().report.kept == 2


# ---------------------------------------------------------------- prompts


def test_prompts_drop_the_last_answer_and_those_that_are_too_long_and_say_how_many(
    chatml: Tokenizer, jsonl: Jsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    unasked = {"messages": chat("", "Welcome!")["messages"][1:]}
    rows = (chat("Hi", "Four."), NO_ANSWER, "{", unasked, LONG_QUESTION, chat("past the limit"))
    source = jsonl(*rows, {"input_ids": [7, 8, 9, 10, 11], "loss_mask": [0, 1, 0, 0, 1]})
    options = DataOptions(max_length=64)
    (prompt,) = read_prompts(source, chatml, 5, options).token_ids
    assert read_prompts(source, chatml, None, options).token_ids[-1] == (7, 8, 9, 10)
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.decode(prompt, skip_special_tokens=False) == expected
    told = capsys.readouterr().err
    assert "1 of 5 rows kept" in told
    assert "1 left out: another row asks the same" in told
    assert "1 left out: the prompt is longer than 64 tokens" in told
    with pytest.raises(UsageError, match=r"3 left out: the prompt is longer than 2 tokens"):
        read_prompts(source, chatml, 5, DataOptions(max_length=2))


# ---------------------------------------------------------------- many rows


def test_many_rows_stay_in_order_and_are_rendered_by_other_processes_to_the_same_bytes(
    tmp_path: Path, chatml: Tokenizer, jsonl: Jsonl, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than are tokenized in one call, with some that cannot be read or rendered."""
    others: dict[int, Any] = {3: NO_ANSWER, 5: chat("Hi", "\ud800"), 6: "{", 2: LONG}
    source = jsonl(*[others.get(i % 9, chat("Hi", str(i), "And?", "b", n=i)) for i in range(600)])
    alone, here = build(source, name="alone"), list[str]()
    rows = range(len(alone.lengths))
    answers = [chatml.decode(alone.tokens(i)[alone.loss_mask(i)]) for i in rows]
    kept = [i for i in range(600) if i % 9 not in others]
    assert answers == [f"{i}<|im_end|>b<|im_end|>" for i in kept]
    render = Renderer.render

    def counted(renderer: Renderer, rows: Any) -> Any:
        return render(renderer, (here.append(row.where) or row for row in rows))  # type: ignore[func-returns-value]

    monkeypatch.setattr(parallel, "ROWS_RENDERED_HERE", 50)
    monkeypatch.setattr(parallel, "ROWS_PER_TASK", 30)
    monkeypatch.setattr(Renderer, "render", counted)
    together = build(source, name="together")
    assert here == [f"train.jsonl:{line}" for line in range(1, 51)]
    assert together.report == alone.report
    assert f"keys that are not read: n ({len(kept)} rows)" in alone.report.text()
    for name in ("rows.bin", "dataset.json"):
        one, other = (tmp_path / folder / name for folder in ("together", "alone"))
        assert one.read_bytes() == other.read_bytes()


def test_a_renderer_that_dies_ends_the_build_with_an_error(
    jsonl: Jsonl, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "ROWS_RENDERED_HERE", 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(Renderer, "__reduce__", lambda renderer: (os._exit, (3,)))
    with pytest.raises(DraftcoreError, match=r"rendered rows ended(.|\n)*EXIT\(3\)"):
        build(jsonl(*[chat("Hi", "a")] * 9))


def test_what_is_rendered_is_told_while_it_takes_long(
    source: str, build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(source, name="quick")
    assert "rendered" not in capsys.readouterr().err
    monkeypatch.setattr(parallel, "SECONDS_BETWEEN_LINES", 0.0)
    build(source)
    assert re.search(r"^rendered 2 rows, [\d,]+ a second$", capsys.readouterr().err, re.MULTILINE)
