"""`draftcore status`: of a run that is under way, from another process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from draftcore_disagg.api import status
from draftcore_disagg.status import latest
from draftcore_sdk.targets import tiny_target

from draftcore.cli import main
from draftcore.contracts.run import LOCK
from draftcore.errors import DraftcoreError
from tests.faults.conftest import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    target = tiny_target(tmp_path / "target")
    run = Run(tmp_path, target, producers=1, train={"epochs": 4000})
    yield run
    run.kill(*run.processes())


def said(run: Run, *arguments: str, verb: str = "status") -> str:
    """Return what the verb says here, with its exit status before it."""
    result = CliRunner().invoke(main, run.line(*arguments, verb=verb)[3:])
    return f"{result.exit_code} {result.output}"


def test_a_run_under_way_says_how_it_stands_and_its_end_is_noticed(run: Run) -> None:
    now = "--seconds", "0.5"
    assert re.search(r"(?s)1 .*has no step yet", said(run, *now))
    process = run.start()
    output = run.until(lambda: (text := said(run, *now)).startswith("0") and text, process)
    assert re.search(r"\brun +under way on .+, step \d+( of 48000)?\n", output)
    assert re.search(r"\bstep +\d+, loss [\d.]+, [\d,]+ tokens/s$", output, re.MULTILINE)
    assert re.search(r"^producers +1, capturing [\d.]+ batches/s$", output, re.MULTILINE)
    assert re.search(r"^batches +\d+ with producers, \d+ ready", output, re.MULTILINE)
    assert said(run, "producers=2", verb="scale").startswith("0")
    run.until(lambda: "producers                     2, " in said(run, *now), process)
    process.send_signal(signal.SIGINT)
    assert run.wait(process) == 130
    assert "no run with producers is under way" in said(run, "producers=2", verb="scale")
    assert re.search(r"run +interrupted, step (\d+) of 48000; .* from step \1\n", said(run, *now))
    (run.run / "run.json").unlink()
    assert re.search(r"run +killed, step \d+ of 48000; the same command", said(run, *now))
    (run.run / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    for torn in ("", "[]", "null", "7", '{"address', "[" * 100_000):  # as a kill may leave it
        (run.run / "queue.json").write_text(torn)
        assert "none: the trainer captures for itself, or is not at work" in said(run, *now)


def test_a_finished_run_says_so_and_nothing_heavy_is_imported(tmp_path: Path) -> None:
    (run := Run(tmp_path, tiny_target(tmp_path / "target"), samples=8)).finish("train.log_every=3")
    code = "import sys, draftcore.cli as cli; cli.main(sys.argv[1:], standalone_mode=False)"
    code += "; assert not {'torch', 'transformers', 'numpy'} & {*sys.modules}"
    line = [sys.executable, "-c", code, "status", str(run.yaml)]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    assert re.match(r"run +finished, step 4 of 4\nstep +4, loss [-\d.e+]+ at 3, ", done.stdout)
    told = status(run.yaml)  # as a program is told
    assert [(one.step, one.standing) for one in told.drafts] == [(4, "finished, step 4 of 4")]
    assert told.queue is None


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
