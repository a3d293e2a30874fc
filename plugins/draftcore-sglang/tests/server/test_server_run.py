"""A whole run: a trainer and two producers, whose features come from a server, into the run's ring."""

import importlib.util
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from capturing import losses, write_run
from draftcore_sdk.serving import Serving
from draftcore_sdk.suite import child_environment

pytest.importorskip("draftcore_eagle3")
pytestmark = pytest.mark.sglang
RTOL = 1e-5  # features differ by 1e-6; losses of about 5 by 1e-6 of their size


def mended_environment(folder: Path) -> dict[str, str]:
    """Where sglang runs on the CPU, torchvision is mended in each process; see the platform."""
    environment = child_environment()
    if importlib.util.find_spec("draftcore_sglang_cpu"):
        (folder / "sitecustomize.py").write_text(
            "import draftcore_sglang_cpu\ndraftcore_sglang_cpu.mend_torchvision()\n"
        )
        environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment['PYTHONPATH']}"
    return environment


def train(folder: Path, target: Path, **changes: Any) -> list[float]:
    """Train by the command line and return the loss of each step."""
    file = write_run(folder, target, **changes)
    done = subprocess.run(
        [sys.executable, "-m", "draftcore", "train", str(file)],
        env=mended_environment(folder),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pass through this process" not in done.stderr
    return losses(file)


def test_a_run_trains_on_what_a_server_stored(
    start_server: Callable[..., Serving], served_folder: Path, tmp_path: Path
) -> None:
    """The same losses as with transformers in the trainer: the plan's order, each sample once."""
    store = f"shm:test-{uuid.uuid4().hex}?max_bytes=64MiB"
    server = start_server(DRAFTCORE_SINK=store, DRAFTCORE_LAYERS="0,1,2")
    options = {"servers": [server.url], "self_test": False}
    capture, producers = {"name": "sglang-server", "options": options}, {"producers": 2}
    ours = train(
        tmp_path / "server", served_folder, capture=capture, store=store, topology=producers
    )
    assert ours == pytest.approx(train(tmp_path / "hf", served_folder), rel=RTOL)
    assert "POST /generate" in server.log.read_text()
    assert server.alive
