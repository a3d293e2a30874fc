"""`draftcore data regenerate` against servers that fail, die and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from draftcore_data.conversations import Conversation
from draftcore_data.sources import read_conversations
from talking import Json, Server, chat, echo, rows_of, write_rows

Cli = Callable[..., Result]
Serve = Callable[..., Server]
VERB = ("data", "regenerate")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", *(chat(f"q{i}", "old") for i in range(12)))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def answered(file: Path) -> list[str]:
    """The first questions of all rows, to count them."""
    return sorted(row["messages"][0]["content"] for row in rows_of(file))


def each_once(file: Path) -> bool:
    return answered(file) == sorted(f"q{i}" for i in range(12))


def test_every_turn_is_asked_anew_after_the_answers_given_before(
    cli: Cli, serve: Serve, tmp_path: Path, out: Path
) -> None:
    source = write_rows(tmp_path / "a.jsonl", chat("one", "old", "two", "old", "three"))
    server = serve()
    result = cli(*VERB, source, "--out", out, "--endpoint", server.url)
    said = [[m["content"] for m in asked["messages"]] for asked in server.asked]
    assert said == [
        ["one"],
        ["one", "answer 1 to one", "two"],
        ["one", "answer 1 to one", "two", "answer 3 to two", "three"],
    ]
    (row,) = rows_of(out)
    assert [m["content"] for m in row["messages"][1::2]] == [
        "answer 1 to one", "answer 3 to two", "answer 5 to three",
    ]  # fmt: skip
    assert "answers to 1 of 1 rows" in result.stdout
    assert "9 tokens in, 9 out" in result.stdout
    (read,) = read_conversations(str(out))
    assert isinstance(read, Conversation)
    assert read.messages == tuple(row["messages"]), "what was written is data to train on"


def test_failures_of_servers_are_survived_and_every_row_is_there_once(
    cli: Cli, serve: Serve, source: Path, out: Path
) -> None:
    """Four of five questions are failed, each in its way, and answered when asked again."""
    tried = Counter[str]()
    ways = [(500, {}), (429, {"error": "busy"}), (503, {}), None]

    def fail_first(asked: Json) -> Any:
        question = asked["messages"][-1]["content"]
        tried[question] += 1
        at = int(question[1:])
        return echo(asked) if tried[question] > 1 or at % 5 == 4 else ways[at % 5]

    server = serve(fail_first)
    cli(*VERB, source, "--out", out, "--endpoint", server.url, "--concurrency", 3)
    assert each_once(out)
    assert [tried[f"q{i}"] for i in range(5)] == [2, 2, 2, 2, 1]
    assert not list(out.parent.glob("*failed*"))


def test_a_server_that_is_down_is_left_alone_while_another_works(
    cli: Cli, serve: Serve, source: Path, out: Path
) -> None:
    down, up = serve(), serve()
    down.shutdown()
    down.server_close()
    urls = ("--endpoint", down.url, "--endpoint", f"{up.url}/v1/")
    result = cli(*VERB, source, "--out", out, *urls, "--concurrency", 4)
    assert each_once(out)
    assert len(up.asked) == 12
    assert result.stderr.count(f"{down.url}/v1 is left alone") == 1


def test_several_servers_share_the_work(cli: Cli, serve: Serve, source: Path, out: Path) -> None:
    """Each waits until the other was asked: one alone would never end."""
    both = threading.Barrier(2)

    def wait(asked: Json) -> Json:
        both.wait(300)
        return echo(asked)

    servers = serve(wait), serve(wait)
    urls = [part for server in servers for part in ("--endpoint", server.url)]
    cli(*VERB, source, "--out", out, *urls, "--concurrency", 2)
    assert each_once(out)
    assert [len(server.asked) for server in servers] == [6, 6]


def test_killed_in_the_middle_it_goes_on_and_loses_and_doubles_no_row(
    cli: Cli, serve: Serve, source: Path, out: Path
) -> None:
    """Killed by SIGKILL while questions are under way, and the last line torn as by a power cut."""
    answers, go_on = threading.Semaphore(7), threading.Event()

    def stall(asked: Json) -> Any:
        if answers.acquire(blocking=False):
            return echo(asked)
        go_on.wait(300)
        return None

    server = serve(stall)
    asked = (*VERB, str(source), "--out", str(out), "--endpoint", server.url, "--concurrency", "2")
    child = subprocess.Popen([sys.executable, "-m", "draftcore", *asked])
    server.wait_for(9)  # seven answers, and two questions under way
    child.send_signal(signal.SIGKILL)
    child.wait()
    go_on.set()
    there = len(rows_of(out))
    assert 6 <= there <= 7, "a killed process loses what it had not been told"
    torn = out.read_bytes()[:-9]
    out.write_bytes(torn)
    server.behave = echo
    result = cli(*asked)
    assert each_once(out)
    assert len(server.asked) == 9 + 12 - (there - 1), "what was there is not asked again"
    assert f"{12 - (there - 1)} of them made now" in result.stdout
    cli(*asked)
    assert each_once(out)
    assert len(server.asked) == 9 + 12 - (there - 1)


def test_what_a_server_refuses_is_listed_and_asked_again_by_the_same_command(
    cli: Cli, serve: Serve, source: Path, out: Path
) -> None:
    def refuse(asked: Json) -> Any:
        long = asked["messages"][0]["content"] in ("q3", "q7")
        return (400, {"message": "too long"}) if long else echo(asked)

    with source.open("a") as file:
        file.write("{ torn\n")
    server = serve(refuse)
    result = cli(*VERB, source, "--out", out, "--endpoint", server.url, status=1)
    assert "2 rows failed" in result.stdout
    assert "1 rows of the source cannot be used" in result.stdout
    listed = {row["where"]: row["reason"] for row in rows_of(Path(f"{out}.failed.jsonl"))}
    assert listed == {
        "rows.jsonl:13": "not valid JSON",
        "rows.jsonl:4": "the server refuses it",
        "rows.jsonl:8": "the server refuses it",
    }
    assert len(answered(out)) == 10
    server.behave = echo
    cli(*VERB, source, "--out", out, "--endpoint", server.url)
    assert each_once(out)
    assert len(rows_of(Path(f"{out}.failed.jsonl"))) == 1


def test_a_row_that_servers_fail_at_is_given_up_and_the_others_are_not(
    cli: Cli, serve: Serve, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftcore_data.endpoints.FIRST", 0.0)
    server = serve(
        lambda asked: (500, {}) if asked["messages"][0]["content"] == "q2" else echo(asked)
    )
    cli(*VERB, source, "--out", out, "--endpoint", server.url, status=1)
    assert len(answered(out)) == 11
    assert "q2" not in answered(out)
    assert [a["messages"][0]["content"] for a in server.asked].count("q2") == 8


def test_it_gives_up_where_no_server_ever_answers(
    cli: Cli, serve: Serve, source: Path, out: Path
) -> None:
    server = serve(lambda asked: (503, {}))
    asked = (*VERB, source, "--out", out, "--endpoint", server.url, "--patience", 0)
    result = cli(*asked, status=1)
    assert "no server has answered" in result.stderr
    result = cli(*VERB, source, "--out", out, "--endpoint", f"{server.url}/wrong", status=2)
    assert "cannot be asked" in result.stderr or "models" in result.stderr


CALL: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {}}}


def with_tools() -> Json:
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "two"},
    ]
    return {"messages": messages, "tools": [TOOL]}


@pytest.mark.parametrize(
    ("arguments", "turns"),
    [('{"a":1}', 4), ('{"a": 2}', 2), (None, 2)],
    ids=["same", "other", "none"],
)
def test_results_of_tools_are_kept_where_the_same_call_was_made(
    cli: Cli, serve: Serve, tmp_path: Path, out: Path, arguments: str | None, turns: int
) -> None:
    """Otherwise they answer a call that nobody made, and the conversation ends with the new one."""
    called = {**CALL, "id": "new", "function": {"name": "add", "arguments": arguments}}

    def call(asked: Json) -> Json:
        first = len(asked["messages"]) == 1 and arguments
        return {"content": None, "tool_calls": [called]} if first else {"content": "it is 2"}

    server = serve(call)
    source = write_rows(tmp_path / "tools.jsonl", with_tools())
    cli(*VERB, source, "--out", out, "--endpoint", server.url)
    (row,) = rows_of(out)
    assert server.asked[0]["tools"] == row["tools"] == [TOOL]
    assert len(row["messages"]) == turns
    if turns == 4:
        assert row["messages"][1]["tool_calls"][0]["id"] == row["messages"][2]["tool_call_id"]
        assert server.asked[1]["messages"][1]["tool_calls"] == [CALL]
        assert server.asked[1]["messages"][2] == row["messages"][2]
        assert row["messages"][3]["content"] == "it is 2"


def test_an_answer_that_was_cut_ends_its_conversation_and_is_counted(
    cli: Cli, serve: Serve, tmp_path: Path, out: Path
) -> None:
    source = write_rows(tmp_path / "a.jsonl", chat("one", "old", "two", "old"))
    server = serve(lambda asked: {"content": "and so", "finish": "length"})
    result = cli(*VERB, source, "--out", out, "--endpoint", server.url)
    assert "1 answers were cut" in result.stdout
    assert [m["content"] for m in rows_of(out)[0]["messages"]] == ["one", "and so"]


def test_prompts_without_answers_are_answered_and_a_row_of_tokens_is_listed(
    cli: Cli, serve: Serve, tmp_path: Path, out: Path
) -> None:
    questions: list[Json] = [
        {"prompt": "a"},
        {"instruction": "b"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "c"}]},
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
    ]
    source = write_rows(tmp_path / "prompts.jsonl", *questions)
    cli(*VERB, source, "--out", out, "--endpoint", serve().url, "--concurrency", 1)
    said = [row["messages"][-1]["content"] for row in rows_of(out)]
    assert said == ["answer 1 to a", "answer 1 to b", "answer 2 to c"]
    (listed,) = rows_of(Path(f"{out}.failed.jsonl"))
    assert "a row of tokens" in listed["reason"]


def test_a_turn_that_is_not_learned_stays_as_it_is(
    cli: Cli, serve: Serve, tmp_path: Path, out: Path
) -> None:
    row = chat("one", "kept", "two", "old")
    row["messages"][1]["weight"] = 0
    row["messages"].insert(0, {"role": "assistant", "content": "hello"})
    server = serve()
    cli(*VERB, write_rows(tmp_path / "a.jsonl", row), "--out", out, "--endpoint", server.url)
    (found,) = rows_of(out)
    assert [(m["content"], m.get("weight", 1)) for m in found["messages"][::2]] == [
        ("hello", 0), ("kept", 0), ("answer 4 to two", 1),
    ]  # fmt: skip
    assert "weight" not in json.dumps(server.asked), "a key of ours, unknown to servers"


def test_a_run_says_what_is_asked_and_how_it_thinks(
    cli: Cli, serve: Serve, source: Path, out: Path, tmp_path: Path
) -> None:
    """Its sources are asked once each, whatever their weights, with what its template is told."""
    twice = {"source": str(source), "weight": 2}
    settings = {
        "run": "run",
        "target": {"path": "none"},
        "data": {"train": [twice], "template_options": {"enable_thinking": False}},
        "algorithm": {"name": "eagle3"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    server = serve()
    asked = (*VERB, tmp_path / "run.yaml", "--out", out, "--endpoint", server.url)
    result = cli(*asked)
    assert each_once(out)
    assert "answers to 12 of 12 rows" in result.stdout
    assert all(a["chat_template_kwargs"] == {"enable_thinking": False} for a in server.asked)
    thinks = cli(*asked, "data.template_options.enable_thinking=true", status=2)
    assert "template_options" in thinks.stderr


def test_progress_has_rate_tokens_and_time_left(
    cli: Cli, serve: Serve, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftcore_data.regenerate.EVERY", 0.0)
    result = cli(*VERB, source, "--out", out, "--endpoint", serve().url)
    assert "answering 5/12" in result.stderr
    assert "5 tokens in, 15 out" in result.stderr
    assert "rows/s" in result.stderr
    assert "tokens/s" in result.stderr
    assert ":00 left" in result.stderr


def test_reasoning_comes_back_by_one_name_and_an_empty_answer_is_a_failure(
    cli: Cli, serve: Serve, tmp_path: Path, out: Path
) -> None:
    def reason(asked: Json) -> Json:
        key = asked["messages"][0]["content"]
        return {"content": "" if key == "empty" else "yes", key: "because"}

    keys = ("reasoning", "reasoning_content", "empty")
    source = write_rows(tmp_path / "a.jsonl", *(chat(key, "old") for key in keys))
    cli(*VERB, source, "--out", out, "--endpoint", serve(reason).url, status=1)
    assert [row["messages"][1].get("reasoning_content") for row in rows_of(out)] == ["because"] * 2
    (failed,) = rows_of(Path(f"{out}.failed.jsonl"))
    assert failed["reason"] == "the answer is empty"


def test_sampling_and_the_key_reach_the_server_and_the_key_nobody_else(
    cli: Cli, serve: Serve, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTCORE_API_KEY", "very-secret")
    server = serve(lambda asked: (400, {"message": f"bad key {server.headers['Authorization']}"}))
    sampling = ("--temperature", 0.5, "--top-p", 0.9, "--seed", 7, "--reasoning-effort", "low")
    asked = (*VERB, source, "--out", out, "--endpoint", server.url, "--rows", 1, *sampling)
    result = cli(*asked, status=1)
    body = {key: value for key, value in server.asked[0].items() if key != "messages"}
    assert body == {
        "model": "tiny", "max_tokens": 2048, "temperature": 0.5, "top_p": 0.9, "seed": 7,
        "reasoning_effort": "low",
    }  # fmt: skip
    assert server.headers["Authorization"] == "Bearer very-secret"
    written = "".join(file.read_text() for file in out.parent.glob("answers*"))
    assert "bad key Bearer ***" in written
    assert "very-secret" not in written + result.output
    refused = cli(*VERB, source, "--out", out, "--endpoint", "http://me:pw@host/v1", status=2)
    assert "pw" not in refused.output


def test_answers_made_with_other_settings_do_not_join_a_file(
    cli: Cli, serve: Serve, source: Path, out: Path
) -> None:
    asked = (*VERB, source, "--out", out, "--endpoint", serve().url, "--seed")
    cli(*asked, 1)
    result = cli(*asked, 2, status=2)
    assert "seed: 1 there, 2 now" in result.stderr
    out.write_text('{"messages": []}\n')
    assert "answers.jsonl:1 is no answer" in cli(*asked, 1, status=2).stderr


def test_two_processes_do_not_write_to_one_file(
    cli: Cli, serve: Serve, source: Path, out: Path
) -> None:
    release = threading.Event()

    def wait(asked: Json) -> Json:
        release.wait(300)
        return echo(asked)

    server = serve(wait)
    asked = (*VERB, str(source), "--out", str(out), "--endpoint", server.url)
    child = subprocess.Popen([sys.executable, "-m", "draftcore", *asked])
    server.wait_for(1)
    assert f"process {child.pid}" in cli(*asked, status=1).stderr
    release.set()
    assert child.wait() == 0
    assert each_once(out)


def test_stopped_by_ctrl_c_it_says_so_and_keeps_what_it_has(
    serve: Serve, source: Path, out: Path
) -> None:
    first = threading.Semaphore(1)

    def once(asked: Json) -> Any:
        if first.acquire(blocking=False):
            return echo(asked)
        threading.Event().wait(300)
        return None

    server = serve(once)
    asked = (*VERB, str(source), "--out", str(out), "--endpoint", server.url, "--concurrency", "1")
    child = subprocess.Popen(
        [sys.executable, "-m", "draftcore", *asked], stderr=subprocess.PIPE, text=True
    )
    server.wait_for(2)
    os.kill(child.pid, signal.SIGINT)
    _, errors = child.communicate()
    assert (child.returncode, "interrupted" in errors) == (130, True)
    assert len(rows_of(out)) == 1


def test_the_target_in_this_process_answers_as_it_generates(
    cli: Cli, tmp_path: Path, target_folder: Path, out: Path
) -> None:
    """Whatever batches the prompts fall into; and answers in turn are asked after each other."""
    from draftcore_data.rendering import Renderer
    from draftcore_hf.target import TransformersTarget

    rows = [chat("hi" * i, "old", "more", "old") for i in range(1, 8)]
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "run": str(tmp_path / "run"),
                "target": {"path": str(target_folder), "device": "cpu"},
                "data": {"train": str(write_rows(tmp_path / "rows.jsonl", *rows))},
                "algorithm": {"name": "eagle3"},
            }
        )
    )
    asked = (*VERB, tmp_path / "run.yaml", "--out", out, "--in-process", "--max-tokens", 9)
    cli(*asked, "--concurrency", 3)
    target = TransformersTarget(str(target_folder), device="cpu")
    renderer = Renderer(target.load_tokenizer())
    for row in rows_of(out):
        for at in range(1, len(row["messages"]), 2):
            (tokens,) = target.load_model().generate(
                [renderer.prompt_ids(Conversation("x", tuple(row["messages"][: at + 1])))], 9
            )
            said = target.load_tokenizer().decode(tokens).removesuffix("<|im_end|>")
            assert row["messages"][at]["content"] == said
    assert len(rows_of(out)) == 7
    assert "greedy" in cli(*asked, "--top-p", 0.5, status=2).stderr
