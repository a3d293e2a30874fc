"""`draftcore status`: of a run that is under way, from another process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from draftcore_disagg.status import latest
from draftcore_sdk.suite import child_environment
from draftcore_sdk.targets import conversations, tiny_target

from draftcore.cli import main
from draftcore.errors import DraftcoreError

SOON = 150.0  # seconds on a busy machine


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(tiny_target(tmp_path / "target")), "device": "cpu"},
        "data": {"train": str(conversations(tmp_path / "train.jsonl", 24))},
        "algorithm": {
            "name": "eagle3",
            "options": {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2},
        },
        "topology": {"producers": 1},
        "train": {"batch": 2, "epochs": 4000, "log_every": 1, "device": "cpu"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def status(run: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["status", str(run), "--seconds", "0.5"])
    return result.exit_code, result.output


def test_a_run_under_way_says_how_it_stands_and_its_end_is_noticed(
    run: Path, tmp_path: Path
) -> None:
    assert status(run)[0] == 1
    assert "has no step yet" in status(run)[1]
    command = [sys.executable, "-m", "draftcore", "train", str(run)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=child_environment(), stdout=quiet, stderr=quiet)
    try:
        deadline = time.monotonic() + SOON
        while (found := status(run))[0] and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.2)
        code, output = found
        assert code == 0, output
        assert re.search(r"^step +\d+, loss [\d.]+, [\d,]+ tokens/s$", output, re.MULTILINE)
        assert re.search(r"^producers +1, capturing [\d.]+ batches/s$", output, re.MULTILINE)
        scaled = CliRunner().invoke(main, ["scale", str(run), "producers=2"])
        assert scaled.exit_code == 0, scaled.output
        while "producers                     2, " not in status(run)[1]:
            assert time.monotonic() < deadline
        assert re.search(r"^batches +\d+ with producers, \d+ ready", output, re.MULTILINE)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(SOON)
    late = CliRunner().invoke(main, ["scale", str(run), "producers=2"])
    assert "no run with producers is under way" in late.output
    for torn in ("", "[]", "null", "7", '{"address', "[" * 100_000):  # as a kill may leave it
        (tmp_path / "run" / "queue.json").write_text(torn)
        assert "none: the trainer captures for itself, or is not at work" in status(run)[1]


def test_lines_that_a_kill_tore_and_those_of_others_are_not_read(tmp_path: Path) -> None:
    step = {"step": 3, "loss": 1.5, "seconds": 0.2, "fetch_seconds": 0.1, "tokens": 60}
    others = [{**step, "seconds": seconds} for seconds in (None, 0)]
    lines = [*map(json.dumps, (step, *others, {"step": 3, "evaluation": {}}, [], "[[[["))]
    lines.append('{"step": 4, "lo')
    (file := tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert latest(file) == [step]
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(DraftcoreError, match="has no step yet"):
        latest(file)
