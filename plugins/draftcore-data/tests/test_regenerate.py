"""`draftcore data regenerate` against servers that fail, die and come back."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from draftcore_data.conversations import Conversation
from draftcore_data.endpoints import Endpoints
from draftcore_data.servers import server_lines
from draftcore_data.sources import read_conversations
from talking import (
    Cli,
    Json,
    Serve,
    Server,
    chat,
    echo,
    require_generated,
    rows_of,
    write_rows,
    write_run,
)  # fmt: skip

VERB = ("data", "regenerate")
QUESTIONS = [f"q{i}" for i in range(12)]


class Asking:
    """The verb, asking servers for answers to twelve questions unless it is given other rows."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli, self.out = cli, folder / "answers.jsonl"
        self.failed = Path(f"{self.out}.failed.jsonl")
        self.source = write_rows(folder / "rows.jsonl", *(chat(one, "old") for one in QUESTIONS))

    def arguments(self, server: Server) -> tuple[str, ...]:
        return (*VERB, str(self.source), "--out", str(self.out), "--endpoint", server.url)

    def __call__(self, server: Server, *more: Any, rows: Any = (), status: int = 0) -> Result:
        if rows:
            write_rows(self.source, *rows)
        return self.cli(*self.arguments(server), *more, status=status)

    @property
    def answered(self) -> list[str]:
        """The first questions of all rows, to count them."""
        return sorted(row["messages"][0]["content"] for row in rows_of(self.out))

    def require_each_once(self) -> None:
        assert self.answered == sorted(QUESTIONS)


@pytest.fixture
def ask(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asking:
    monkeypatch.setattr("draftcore_data.endpoints.FIRST", 0.01)
    return Asking(cli, tmp_path)


def question(asked: Json) -> str:
    return str(asked["messages"][0]["content"])


def said(messages: list[Json]) -> list[str]:
    return [message["content"] for message in messages]


def test_every_turn_is_asked_anew_after_the_answers_given_before(ask: Asking, serve: Serve) -> None:
    server = serve()
    result = ask(server, rows=[chat("one", "old", "two", "old", "three")])
    answers = "answer 1 to one", "answer 3 to two", "answer 5 to three"
    turns = ["one", answers[0], "two", answers[1], "three"]
    assert [said(asked["messages"]) for asked in server.asked] == [turns[:1], turns[:3], turns]
    (row,) = rows_of(ask.out)
    assert said(row["messages"]) == [*turns, answers[2]]
    assert "answers to 1 of 1 rows" in result.stdout
    assert "9 tokens in, 9 out" in result.stdout
    (read,) = read_conversations(str(ask.out))
    assert isinstance(read, Conversation)
    assert read.messages == tuple(row["messages"]), "what was written is data to train on"


# ------------------------------------------------------------ servers that fail


def test_failing_servers_are_survived_and_every_row_is_there_once(
    ask: Asking, serve: Serve
) -> None:
    """Four of five questions are failed, each in its way, and answered when asked again."""
    tried, ways = Counter[str](), [(500, {}), (429, {"error": "busy"}), (503, {}), None]

    def fail_first(asked: Json) -> Any:
        tried[question(asked)] += 1
        at = int(question(asked)[1:])
        return echo(asked) if tried[f"q{at}"] > 1 or at % 5 == 4 else ways[at % 5]

    ask(serve(fail_first), "--concurrency", 3)
    ask.require_each_once()
    assert [tried[f"q{i}"] for i in range(5)] == [2, 2, 2, 2, 1]
    assert not ask.failed.exists()


def test_a_server_that_is_down_is_left_alone_while_another_works(ask: Asking, serve: Serve) -> None:
    down, up = serve(), serve()
    down.shutdown()
    down.server_close()
    result = ask(down, "--endpoint", f"{up.url}/v1/", "--concurrency", 4)
    ask.require_each_once()
    assert len(up.asked) == 12
    assert result.stderr.count(f"{down.url}/v1 is left alone") == 1


def test_several_servers_share_the_work_and_progress_has_rate_tokens_and_time_left(
    ask: Asking, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits until the other was asked: one alone would never end."""
    monkeypatch.setattr("draftcore_data.regenerate.EVERY", 0.0)
    both = threading.Barrier(2)

    def wait(asked: Json) -> Json:
        both.wait(300)
        return echo(asked)

    one, other = serve(wait), serve(wait)
    result = ask(one, "--endpoint", other.url, "--concurrency", 2)
    ask.require_each_once()
    assert [len(server.asked) for server in (one, other)] == [6, 6]
    for part in ("answering 12/12", "12 tokens in, 36 out", "rows an hour", "tokens/s", ":00 left"):
        assert part in result.stderr


def test_what_servers_refuse_or_fail_at_is_listed_and_asked_again(
    ask: Asking, serve: Serve
) -> None:
    ways = {"q3": (400, {"message": "too long"}), "q7": (500, {})}
    with ask.source.open("a") as file:
        file.write("{ torn\n")
    server = serve(lambda asked: ways.get(question(asked)) or echo(asked))
    result = ask(server, status=1)
    assert "2 rows failed" in result.stdout
    assert "1 rows of the source cannot be used" in result.stdout
    assert {row["where"]: row["reason"] for row in rows_of(ask.failed)} == {
        "rows.jsonl:13": "not valid JSON",
        "rows.jsonl:4": "the server refuses it",
        "rows.jsonl:8": "no answer in 8 tries",
    }
    assert Counter(map(question, server.asked))["q7"] == 8
    assert len(ask.answered) == 10
    server.behave = echo
    ask(server)
    ask.require_each_once()
    assert len(rows_of(ask.failed)) == 1


def test_it_gives_up_where_no_server_ever_answers(ask: Asking, serve: Serve) -> None:
    server = serve(lambda asked: (503, {}))
    assert "no server has answered" in ask(server, "--patience", 0, status=1).stderr
    wrong = ask.cli(*VERB, ask.source, "--out", ask.out, "--endpoint", f"{server.url}/x", status=2)
    assert "cannot be asked" in wrong.stderr or "models" in wrong.stderr


def test_killed_it_goes_on_and_loses_and_doubles_no_row(ask: Asking, serve: Serve) -> None:
    """Killed by SIGKILL while questions are under way, and the last line torn as by a power cut.

    Until then no other process writes to its file.
    """
    answers, go_on = threading.Semaphore(7), threading.Event()

    def stall(asked: Json) -> Any:
        if answers.acquire(blocking=False):
            return echo(asked)
        go_on.wait(300)
        return None

    server = serve(stall)
    command = [sys.executable, "-m", "draftcore", *ask.arguments(server), "--concurrency", "2"]
    child = subprocess.Popen(command)
    server.wait_for(9)  # seven answers, and two questions under way
    assert f"process {child.pid}" in ask(server, status=1).stderr
    child.kill()
    child.wait()
    go_on.set()
    there = len(rows_of(ask.out))
    assert 6 <= there <= 7, "a killed process loses what it had not been told"
    ask.out.write_bytes(ask.out.read_bytes()[:-9])
    server.behave = echo
    result = ask(server)
    ask.require_each_once()
    assert len(server.asked) == 9 + 12 - (there - 1), "what was there is not asked again"
    assert f"{12 - (there - 1)} of them made now" in result.stdout
    ask(server)
    ask.require_each_once()
    assert len(server.asked) == 9 + 12 - (there - 1)


def test_a_server_has_as_many_questions_as_it_keeps_up_with(serve: Serve) -> None:
    """One more with each answer; half of them where it has too many, and then a share of one more."""
    full = iter([False] * 8 + [True])
    server = serve(lambda asked: (429, {}) if next(full, False) else echo(asked))

    async def ask() -> list[float]:
        async with Endpoints([server.url], 600, 600, None, str) as endpoints:
            limits = list[float]()
            for _ in range(9):
                await endpoints.answer(chat("q")["messages"], ())
                limits += [one.limit for one in endpoints.endpoints]
            return limits

    assert asyncio.run(ask()) == [*range(33, 41), 20 + 1 / 20]


def test_where_nobody_answers_the_lines_that_start_servers_of_the_target_are_told(
    ask: Asking, serve: Serve, target_folder: Path, tmp_path: Path
) -> None:
    (template := tmp_path / "a.jinja").write_text("{{ enable_thinking }}")
    told: Json = {"train": str(ask.source), "chat_template": str(template)}
    ask.source, dead = write_run(tmp_path, target_folder, **told), serve()
    dead.server_close()
    more = f"--chat-template {template} --reasoning-parser qwen3"
    said = ask.cli(*VERB, ask.source, "--out", ask.out, status=2).stderr
    for server in ("python -m sglang.launch_server --model-path", "vllm serve"):
        assert f"{server} {target_folder} --port 8000 {more}" in said
    said = ask(dead, "--patience", 0, status=1).stderr
    assert f"vllm serve {target_folder} --port {dead.server_port} {more}" in said


@pytest.mark.parametrize(
    ("family", "template", "parsers"),
    [
        ("qwen3", "", ()),
        ("glm4_moe", "<think>", ("glm45", "glm45")),
        ("gpt_oss", "", ("gpt-oss", "openai_gptoss")),
        (
            "deepseek_v3",
            "{% if thinking %}<\uff5cAssistant|></think>",
            ("deepseek-v3", "deepseek_v3"),
        ),
        ("qwen2", "</think>\n<\uff5cAssistant|>", ("deepseek-r1", "deepseek_r1")),
    ],
)
def test_a_servers_line_has_the_reasoning_parser_where_it_is_known(
    tmp_path: Path, family: str, template: str, parsers: tuple[str, ...]
) -> None:
    (file := tmp_path / "a.jinja").write_text(template)
    text = SimpleNamespace(model_type=family)
    target: Any = SimpleNamespace(path="a model", text_config=text, revision="v1", source={})
    lines = server_lines(target, str(file), 9)
    assert lines[1].startswith("vllm serve 'a model' --port 9 --revision v1")
    assert re.findall(r"--reasoning-parser (\S+)", "\n".join(lines)) == list(parsers)


# ------------------------------------------------------------ what is asked and kept

CALL: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALLING = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize(("arguments", "turns"), [('{"a":1}', 4), ('{"a": 2}', 2), (None, 2)])
def test_results_of_tools_are_kept_where_the_same_call_was_made(
    ask: Asking, serve: Serve, arguments: str | None, turns: int
) -> None:
    """Otherwise they answer a call that nobody made, and the conversation ends with the new one."""
    called = {**CALL, "id": "new", "function": {"name": "add", "arguments": arguments}}

    def call(asked: Json) -> Json:
        first = len(asked["messages"]) == 1 and arguments
        return {"content": None, "tool_calls": [called]} if first else {"content": "it is 2"}

    server = serve(call)
    ask(server, rows=[{"messages": CALLING, "tools": [TOOL]}])
    (row,) = rows_of(ask.out)
    assert server.asked[0]["tools"] == row["tools"] == [TOOL]
    assert len(row["messages"]) == turns
    if turns == 4:
        assert row["messages"][1]["tool_calls"][0]["id"] == row["messages"][2]["tool_call_id"]
        assert server.asked[1]["messages"][1]["tool_calls"] == [CALL]
        assert server.asked[1]["messages"][2] == row["messages"][2]
        assert row["messages"][3]["content"] == "it is 2"


def test_reasoning_has_one_name_and_a_cut_or_empty_answer_ends_it(
    ask: Asking, serve: Serve
) -> None:
    def reason(asked: Json) -> Json:
        key, finish = question(asked), "length" if question(asked) == "cut" else "stop"
        return {"content": "" if key == "empty" else "yes", key: "because", "finish": finish}

    keys = ("reasoning", "reasoning_content", "cut", "empty")
    result = ask(serve(reason), rows=[chat(key, "old", "more") for key in keys], status=1)
    rows = {row["messages"][0]["content"]: row["messages"] for row in rows_of(ask.out)}
    for key in keys[:2]:
        assert [turn.get("reasoning_content") for turn in rows[key][1::2]] == ["because"] * 2
    assert said(rows["cut"]) == ["cut", "yes"]
    assert "1 answers were cut" in result.stdout
    (failed,) = rows_of(ask.failed)
    assert failed["reason"] == "the answer is empty"


def test_what_is_not_learned_stays_and_a_prompt_gets_an_answer(ask: Asking, serve: Serve) -> None:
    brief = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "c"}]
    kept = chat("one", "kept", "two", "old")["messages"]
    kept = [{"role": "assistant", "content": "hello"}, kept[0], {**kept[1], "weight": 0}, *kept[2:]]
    tokens = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    rows = [{"prompt": "a"}, {"instruction": "b"}, {"messages": brief}, {"messages": kept}, tokens]
    server = serve()
    ask(server, "--concurrency", 1, rows=rows)
    *found, last = (row["messages"] for row in rows_of(ask.out))
    assert [m[-1]["content"] for m in found] == ["answer 1 to a", "answer 1 to b", "answer 2 to c"]
    answers = [("hello", 0), ("kept", 0), ("answer 4 to two", 1)]
    assert [(m["content"], m.get("weight", 1)) for m in last[::2]] == answers
    assert "weight" not in json.dumps(server.asked), "a key of ours, unknown to servers"
    (listed,) = rows_of(ask.failed)
    assert "a row of tokens" in listed["reason"]


def test_a_run_says_what_to_ask_and_how_it_thinks(
    ask: Asking, serve: Serve, tmp_path: Path
) -> None:
    """Its sources are asked once each, whatever their weights, with what its template is told."""
    twice, how = {"source": str(ask.source), "weight": 2}, {"enable_thinking": False}
    ask.source = write_run(tmp_path, "none", train=[twice], template_options=how)
    server = serve()
    result = ask(server)
    ask.require_each_once()
    assert "answers to 12 of 12 rows" in result.stdout
    assert all(a["chat_template_kwargs"] == how for a in server.asked)
    thinks = ask(server, "data.template_options.enable_thinking=true", status=2)
    assert "template_options" in thinks.stderr


def test_sampling_and_the_key_reach_the_server_and_the_key_nobody_else(
    ask: Asking, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTCORE_API_KEY", "very-secret")
    server = serve(lambda asked: (400, {"message": f"bad key {server.headers['Authorization']}"}))  # type: ignore[has-type]
    sampling = ("--temperature", 0.5, "--top-p", 0.9, "--seed", 7, "--reasoning-effort", "low")
    result = ask(server, "--rows", 1, *sampling, status=1)
    body = {"model": "tiny", "max_tokens": 2048, "temperature": 0.5, "top_p": 0.9, "seed": 7}
    body |= {"reasoning_effort": "low", "messages": server.asked[0]["messages"]}
    assert server.asked[0] == body
    assert server.headers["Authorization"] == "Bearer very-secret"
    written = "".join(file.read_text() for file in ask.out.parent.glob("answers*"))
    assert "bad key Bearer ***" in written
    assert "very-secret" not in written + result.output
    refused = ask(server, "--endpoint", "http://me:pw@host/v1", status=2)
    assert "pw" not in refused.output


def test_answers_made_with_other_settings_do_not_join_a_file(ask: Asking, serve: Serve) -> None:
    server = serve()
    ask(server, "--seed", 1)
    assert "seed: 1 there, 2 now" in ask(server, "--seed", 2, status=2).stderr
    ask.out.write_text('{"messages": []}\n')
    assert "answers.jsonl:1 is no answer" in ask(server, "--seed", 1, status=2).stderr


def test_in_process_answers_are_what_it_generates(
    cli: Cli, tmp_path: Path, target_folder: Path
) -> None:
    """Whatever batches the prompts fall into; and answers in turn are asked after each other."""
    rows = [chat("hi" * i, "old", "more", "old") for i in range(1, 8)]
    train, out = str(write_rows(tmp_path / "rows.jsonl", *rows)), tmp_path / "answers.jsonl"
    run = write_run(tmp_path, target_folder, train=train)
    asked = (*VERB, run, "--out", out, "--in-process", "--max-tokens", 9)
    cli(*asked, "--concurrency", 3)
    assert require_generated(out, target_folder, 9) == 7
    assert "greedy" in cli(*asked, "--top-p", 0.5, status=2).stderr
