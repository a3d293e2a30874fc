"""Drafts that were trained here, served by a real sglang: it accepts as many tokens as `eval` says.

sglang's speculative workers want CUDA: on its out-of-tree CPU platform 0.5.23 refuses EAGLE-3's
trees by name, and DFlash's worker calls `record_stream` on a CPU tensor. Run by `nox -s gpu`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

pytest.importorskip("sglang")

from draftcore.cli import main
from draftcore.data.dataset import read_prompts
from draftcore.target import TargetSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
PROMPTS, NEW_TOKENS = 100, 128
BLOCKS = {"num_layers": 3, "layers": [1, 3, 5], "block_size": 8, "num_anchors": 64}
DRAFTS = {
    "eagle3": {"layers": [1, 3, 4], "ttt_length": 3},
    "dflash": BLOCKS,
}
ARGUMENTS = {
    "eagle3": {
        "speculative-algorithm": "EAGLE3",
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
    },
    "dflash": {"speculative-algorithm": "DFLASH", "speculative-num-draft-tokens": 8},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's YAML whose drafts have learned enough to be accepted, evaluated and exported."""
    folder = tmp_path_factory.mktemp("served")
    config = {
        "run": str(folder / "run"),
        "target": {"path": str(QUICKSTART / "target"), "dtype": "bfloat16"},
        "data": {
            "train": str(QUICKSTART / "data" / "train.jsonl"),
            "eval": str(QUICKSTART / "data" / "eval.jsonl"),
            "max_length": 512,
            "limit": 2000,
        },
        "drafts": {
            name: {"algorithm": {"name": name, "options": options}}
            for name, options in DRAFTS.items()
        },
        "capture": {"batch": 32},
        "train": {"max_steps": 200, "epochs": 4, "batch": 32, "lr": 2e-3, "precision": "bf16"},
        "eval": {"batch": 50, "prompts": PROMPTS, "max_new_tokens": NEW_TOKENS},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    for verb in ("train", "export"):
        result = CliRunner().invoke(main, [verb, str(file)])
        assert result.exit_code == 0, result.output
    return file


@pytest.fixture(scope="module")
def reports(trained: Path) -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(main, ["eval", str(trained), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, dict[str, object]] = json.loads(result.stdout)
    return found


class Server:
    """sglang's own launcher with a draft, on loopback."""

    def __init__(self, draft: Path, log: Path, arguments: dict[str, object]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
            port = free.getsockname()[1]
        settings = {
            "model-path": QUICKSTART / "target",
            "speculative-draft-model-path": draft,
            "host": "127.0.0.1",
            "port": port,
            "dtype": "bfloat16",
            "attention-backend": "triton",
            "sampling-backend": "pytorch",
            "grammar-backend": "none",
            "context-length": 1024,
            "max-running-requests": 32,
            "mem-fraction-static": 0.3,
            "log-level": "info",
            **arguments,
        }
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        flags += ["--disable-radix-cache", "--skip-server-warmup", "--disable-cuda-graph"]
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *flags],
                env={**os.environ, **offline},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"no answer in {seconds} s\n{self.log.read_text()[-4000:]}")

    def generate(self, prompts: list[list[int]]) -> list[dict[str, object]]:
        greedy = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        body = json.dumps({"input_ids": prompts, "sampling_params": greedy}).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/generate", body, kind)
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return [one["meta_info"] for one in json.load(answer)]
        except OSError:
            raise AssertionError(self.log.read_text()[-4000:]) from None

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def serve(tmp_path: Path, trained: Path) -> Iterator[object]:
    running: list[Server] = []

    def start(label: str) -> Server:
        draft = trained.parent / "run" / label / "export"
        running.append(Server(draft, tmp_path / "server.log", ARGUMENTS[label]))
        running[-1].wait()
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.mark.parametrize("label", DRAFTS)
def test_a_server_accepts_as_many_tokens_as_eval_says(label, serve, trained, reports):
    """The first token of an answer comes from the prompt's forward; a round is one verification."""
    target = TargetSpec(str(QUICKSTART / "target"))
    prompts, _ = read_prompts(
        str(QUICKSTART / "data" / "eval.jsonl"), target.tokenizer, PROMPTS, 512
    )
    server = serve(label)
    answers = server.generate([list(prompt.token_ids) for prompt in prompts])
    tokens = sum(answer["completion_tokens"] - 1 for answer in answers)
    rounds = sum(answer["spec_verify_ct"] for answer in answers)
    low, high = reports[label]["acceptance_length_95"]
    ours = reports[label]["acceptance_length"]
    print(f"{label}: sglang {tokens / rounds:.3f}, eval {ours:.3f} ({low:.3f} to {high:.3f})")
    assert low <= tokens / rounds <= high
