"""Several ranks: the update that one would have made, and an end to the run when one ends.

Ranks are real processes, forked from one that has imported everything; one test starts torchrun.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ODD = Path(__file__).with_name("odd_algorithm.py")
BLOCKS = {"num_layers": 2, "layers": [1, 3], "block_size": 4, "num_anchors": 8}
DRAFTS = {
    "eagle": {
        "algorithm": {
            "name": "eagle3",
            "options": {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2},
        }
    },
    "blocks": {"algorithm": {"name": "dflash", "options": BLOCKS}},
    "domino": {
        "algorithm": {"name": "domino", "options": {**BLOCKS, "gru_hidden_dim": 16, "emb_dim": 8}}
    },
    "odd": {"algorithm": {"name": "odd"}},
}
SERVER = """
import json, os, resource, sys
import transformers.models.qwen3.modeling_qwen3, torch.distributed.fsdp
import draftcore.training.trainer, draftcore.cli
for line in sys.stdin:
    order = json.loads(line)
    if "poll" in order:
        pid, status = os.waitpid(order["poll"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
    elif pid := os.fork():
        print(pid, flush=True)
    else:
        os.environ.update(order["env"])
        output = os.open(order["output"], os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        if order["largest_file"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest_file"],) * 2)
        draftcore.cli.main(order["argv"])
"""


@dataclass
class Ranks:
    """The ranks of a run: their processes, what they printed, how they ended."""

    server: subprocess.Popen
    folder: Path
    pids: list[int] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)

    def ask(self, **order):
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, argv, rank, size, port, largest_file=None):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        output = str(self.folder / f"output.{rank}")
        env = {name: str(value) for name, value in env.items()}
        self.pids.append(self.ask(argv=argv, env=env, output=output, largest_file=largest_file))

    def alive(self, rank):
        if rank not in self.statuses:
            status = self.ask(poll=self.pids[rank])
            if status is not None:
                self.statuses[rank] = status
        return rank not in self.statuses

    def until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output(0) + self.output(1)
            assert all(map(self.alive, range(len(self.pids)))), self.output(0) + self.output(1)
            time.sleep(0.002)

    def finish(self, seconds=60):
        """Wait for all ranks; returns their exit statuses."""
        deadline = time.monotonic() + seconds
        while any([self.alive(rank) for rank in range(len(self.pids))]):
            assert time.monotonic() < deadline, self.output(0) + self.output(1)
            time.sleep(0.01)
        return [self.statuses[rank] for rank in range(len(self.pids))]

    def output(self, rank):
        return (self.folder / f"output.{rank}").read_text()


@pytest.fixture(scope="module")
def server():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], env=env, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def start(server, tmp_path):
    """Start two ranks of `train`; `second` are the arguments of rank 1 where they differ."""
    started = []

    def start(project, *arguments, plugin=None, second=None, verb="train", largest_file=None):
        loose = ["--plugin", str(plugin)] if plugin else []
        folder = tmp_path / f"ranks-{len(started)}"
        folder.mkdir()
        ranks, port = Ranks(server, folder), free_port()
        started.append(ranks)
        for rank in range(2):
            own = arguments if second is None or rank == 0 else second
            ranks.start(
                [*loose, verb, str(project.yaml), *own], rank, 2, port, None if rank else largest_file
            )
        return ranks

    yield start
    for ranks in started:
        for rank, pid in enumerate(ranks.pids):
            if ranks.alive(rank):
                os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steps(project, label=""):
    file = project.run / label / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def tensors(folder, step, file="draft"):
    return load_file(folder / f"checkpoints/step-{step:08d}/{file}.safetensors")


def evaluations(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["evaluation"] for line in lines if "evaluation" in line]


def require_close(ours, theirs):
    """Losses to 1e-5, weights to a hundredth of the learning rate: sums in another order."""
    assert ours.losses().keys() == theirs.losses().keys()


def test_two_ranks_give_the_update_of_one(tmp_path, new_project, start):
    """Of steps of 5 samples, and one of a single sample, rank 1 lacks some or all."""
    changes = {"algorithm": None, "drafts": DRAFTS, "samples": 26}
    whole = {"batch": 5, "eval_every": 3, "eval_samples": 3, "eval_prompts": 0}
    one = new_project(tmp_path / "one", **changes, train=whole)
    one.cli("train", plugin=ODD)
    two = new_project(tmp_path / "two", **changes, train={**whole, "batch": 1, "accumulate": 5})
    ranks = start(two, plugin=ODD)
    assert ranks.finish() == [0, 0], ranks.output(0)
    assert "odd: complete: step 6 of 6, 26 samples" in ranks.output(0)
    assert ranks.output(1) == ""
    for label in DRAFTS:
        ours, theirs = two.run / label, one.run / label
        assert two.losses(ours) == pytest.approx(one.losses(theirs), rel=1e-5)
        for ours_at, theirs_at in zip(evaluations(ours), evaluations(theirs), strict=True):
            assert ours_at == pytest.approx(theirs_at, rel=1e-5)
        for file in ("draft", "optimizer"):
            found, wanted = tensors(ours, 6, file), tensors(theirs, 6, file)
            for name in wanted.keys() - {"rng.cpu"}:
                # Updates are lr-sized, and Adam's division makes noise of near-zero gradients.
                torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=3e-5)
