"""A whole run: a trainer and two producers, whose features come from a server, into the run's ring."""

import json
import subprocess
import sys
import uuid

import pytest
import yaml

from draftcore.testing import child_environment
from draftcore.testing.targets import conversations

pytest.importorskip("draftcore_eagle3")  # this dist does not depend on it
pytestmark = pytest.mark.sglang
SAMPLES, BATCH = 24, 4


def test_a_run_trains_on_what_a_server_stored(start_server, served_folder, tmp_path):
    store = f"shm:test-{uuid.uuid4().hex}?max_bytes=64MiB"
    server = start_server(DRAFTCORE_SINK=store, DRAFTCORE_LAYERS="0,1,2")
    config = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(served_folder), "dtype": "float32", "device": "cpu"},
        "data": {"train": str(conversations(tmp_path / "train.jsonl", SAMPLES)), "max_length": 256},
        "algorithm": {"name": "eagle3", "options": {"layers": [0, 1, 2]}},
        "capture": {
            "name": "sglang-server",
            "batch": BATCH,
            "options": {"servers": [server.url], "self_test": False},
        },
        "store": store,
        "topology": {"producers": 2},
        "train": {"batch": BATCH, "epochs": 2, "log_every": 1, "device": "cpu"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "draftcore", "train", "run.yaml"],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pass through this process" not in done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 2 * SAMPLES // BATCH
    assert losses[-1] < losses[0]
    assert "POST /generate" in server.log.read_text()
    assert server.alive
