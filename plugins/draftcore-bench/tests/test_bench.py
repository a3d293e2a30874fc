"""`draftcore bench` against servers on loopback, which stream over real connections."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from draftcore_bench.api import bench
from serving import COUNTS, DRAFTED, ROUNDS, TELLS, TOKENS, Serve

from draftcore.cli import main

SMALL = ("--concurrency", "1", "--concurrency", "2", "--repeats", "2")


def run(*arguments: object, status: int = 0, **environment: str) -> Result:
    command = ["bench", *map(str, arguments)]
    done = CliRunner().invoke(main, command, env=environment, catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done


@pytest.mark.parametrize("engine", [*TELLS, *COUNTS])
def test_acceptance_is_what_each_engine_tells_in_its_way(
    engine: str, serve: Serve, questions: Path
) -> None:
    server = serve(engine)
    told: dict[str, Any] = bench(
        server.url, prompts=[str(questions)], concurrency=(1, 2), repeats=1
    ).to_json()
    found = told["acceptance"]
    assert (found["length"], found["rounds"]) == ((TOKENS - 1) / ROUNDS, 8 * ROUNDS)
    if engine not in ("sglang of before", "llamacpp"):  # which tell less
        assert found["of_drafted"] == pytest.approx(8 / DRAFTED)
        assert found["by_position"][:2] == [1, 1]
    in_answers = told["categories"]["set/c0"]["acceptance"]
    assert (in_answers is None) == (engine in COUNTS)


def test_a_server_that_tells_nothing_is_measured_and_said_to_tell_nothing(
    serve: Serve, questions: Path
) -> None:
    text = run(serve("mine").url, "--prompts", questions, *SMALL).stdout
    assert "acceptance length         not told by this server\n" in text
    assert "may keep prompts that it has seen" in text
    assert "add --plain URL" in text


def test_a_prompt_set_of_ones_own_is_a_loose_file(serve: Serve, tmp_path: Path) -> None:
    """The one that the README shows."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (file := tmp_path / "haiku.py").write_text(readme.partition("```python\n")[2].split("```")[0])
    command = ["--plugin", str(file), "bench", (server := serve("sglang")).url, "--repeats", "1"]
    done = CliRunner().invoke(main, [*command, "--concurrency", "1", "--prompts", "haiku"])
    assert done.exit_code == 0, done.output
    assert "  verse                   3.00\n" in done.stdout
    assert "Write a haiku about bread." in {body["text"] for body in server.asked}


def test_both_sides_answer_the_same_prompts_in_turn_and_no_prompt_is_kept(
    serve: Serve, questions: Path, tmp_path: Path
) -> None:
    draft, plain = serve("vllm"), serve("vllm", draft=False)
    plain.asked = draft.asked  # one list, in the order of time
    out = ("--out", tmp_path / "out", "--prompts", questions)
    text = run(draft.url, "--plain", plain.url, *out, *SMALL).stdout
    counted = [body for body in draft.asked if body["max_tokens"] == 256]
    assert len(draft.asked) - len(counted) == 2 * (1 + 2), "each level is warmed up"
    rounds = [counted[at : at + 4] for at in range(0, len(counted), 4)]
    turns = [{body["server"] for body in part} for part in rounds]
    assert turns == 2 * [{draft.url}, {plain.url}, {plain.url}, {draft.url}]
    texts = [Counter(body["text"] for body in part) for part in rounds]
    assert texts == len(rounds) * [Counter(f"question {n}?" for n in range(4))]
    assert len({body["cache_salt"] for body in counted}) == len(counted)
    told = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [level["concurrency"] for level in told["levels"]] == [1, 2]
    for level in told["levels"]:
        assert level["draft"]["requests"] == level["plain"]["requests"] == 8
        assert level["speed_up"]["median"] > 1, "a third of the forwards"
        assert level["draft"]["first_token_seconds"]["median"] > 0
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    head, first, *_ = text.splitlines()
    assert head.split("  ")[0] == "requests at once"
    assert first.startswith("1 ")
    assert "x (" in first


@pytest.mark.parametrize(
    ("failing", "reason"),
    [("refuse", "HTTP 500"), ("cut", "RemoteProtocolError"), ("fail", "an error in the stream")],
)
def test_requests_that_fail_are_counted_and_named_and_the_rest_stands(
    failing: str, reason: str, serve: Serve, questions: Path
) -> None:
    server = serve("llamacpp", failing=failing)
    asked = (server.url, "--prompts", questions, "--concurrency", 2, "--json")
    done = run(*asked, status=1, DRAFTCORE_API_KEY="geheim")
    told = json.loads(done.stdout)
    ((why, count),) = told["failures"].items()
    assert why.startswith(f"draft: {reason}")
    assert count == told["levels"][0]["draft"]["failed"] == 3
    assert told["levels"][0]["draft"]["requests"] == 9
    assert told["acceptance"]["length"] == 3
    assert "geheim" not in done.output


def test_what_cannot_be_measured_is_refused_with_a_remedy(serve: Serve, questions: Path) -> None:
    server, away = serve("vllm"), serve()
    away.shutdown()
    away.server_close()
    for arguments, said in (
        ([away.url], r"lists no model: ConnectError"),
        ([f"{server.url}/v2"], r"HTTP 404"),
        ([server.url, "--plain", away.url], r"have --plain be the address"),
        ([server.url, "--model", "n"], "has no model 'n'; there are m"),
        (["localhost:80"], "write it like http://"),
        ([server.url, "--prompts", "gsm9k"], "did you mean 'gsm8k'"),
    ):
        assert said in run(*arguments, status=2).stderr
    server.key = "geheim"
    said = run(server.url, "--key-env", "MINE", status=2, MINE="other").stderr
    assert "refuses the API key\n  set MINE in the environment" in said
    run(server.url, "--prompts", questions, *SMALL, "--key-env", "MINE", MINE="geheim")
    broken = serve("vllm", failing="refuse")
    rows = questions.read_text().splitlines()
    (alone := questions.with_name("alone.jsonl")).write_text(rows[1])
    said = run(broken.url, "--prompts", alone, status=1).stderr
    assert "answers no request: draft: HTTP 500" in said


def test_ctrl_c_prints_what_was_measured(serve: Serve, questions: Path) -> None:
    server = serve("vllm")
    server.hold = 1 + 4 + 2 + 1  # warmed up, a round, warmed up, and then
    command = [sys.executable, "-m", "draftcore", "bench", server.url, "--prompts", str(questions)]
    child = subprocess.Popen([*command, *SMALL[:4], "--repeats", "1"], stdout=-1, text=True)
    assert server.holding.wait(120)
    child.send_signal(signal.SIGINT)
    text, _ = child.communicate(timeout=120)
    assert child.returncode == 130, text
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["requests", "1", "acceptance"]
    assert "measuring ended early: interrupted" in text
