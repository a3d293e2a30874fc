"""A whole run: a trainer and two producers, whose features come from a server, into the run's ring."""

import importlib.util
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from capturing import losses, write_run
from draftcore_sdk.serving import Serving
from draftcore_sdk.suite import child_environment

import draftcore

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


def test_a_run_trains_on_what_a_server_stored(
    start_server: Callable[..., Serving], served_folder: Path, tmp_path: Path
) -> None:
    """The same losses as with transformers in the trainer: the plan's order, each sample once."""
    store = f"shm:test-{uuid.uuid4().hex}?max_bytes=64MiB"
    server = start_server(DRAFTCORE_SINK=store, DRAFTCORE_LAYERS="0,1,2")
    options = {"servers": [server.url], "self_test": False}
    changes = {"capture": {"name": "sglang-server", "options": options}, "store": store}
    ours = write_run(tmp_path / "server", served_folder, topology={"producers": 2}, **changes)
    done = subprocess.run(
        [sys.executable, "-m", "draftcore", "train", str(ours)],
        env=mended_environment(ours.parent),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pass through this process" not in done.stderr
    assert "POST /generate" in server.log.read_text()
    assert server.alive
    draftcore.train(theirs := write_run(tmp_path / "hf", served_folder))
    assert losses(ours) == pytest.approx(losses(theirs), rel=RTOL)
