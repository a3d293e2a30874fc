"""vLLM itself on the CPU, unpatched, in an environment of its own: what it captures, and what it serves.

`nox -s vllm` makes the environment, and names its Python in DRAFTCORE_VLLM_PYTHON. A start takes some
20 seconds of a processor, so there are as few as the claims allow: seven.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from draftcore_eval.api import evaluate
from draftcore_eval.engines import Serving
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import REQUESTS, CaptureSuite, capture_target
from draftcore_sdk.engines import EngineSuite
from draftcore_sdk.suite import opened
from draftcore_vllm.capture import VllmCapture

import draftcore
from draftcore.errors import DraftcoreError, UsageError

pytestmark = pytest.mark.timeout(1800)  # with training, and starts of vLLM
PYTHON = os.environ["DRAFTCORE_VLLM_PYTHON"]
PLUGIN = "draftcore_vllm.plugin"
STARTED: dict[str, Any] = {"python": PYTHON, "kv_cache": "64MiB", "max_tokens": 1024}


@pytest.fixture(scope="module")
def capturing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCapture]:
    """A capture of all that vLLM gives, which shares its server with all others of its target."""
    folder = capture_target(tmp_path_factory.mktemp("target"), "qwen3", head_dim=32)
    target = TransformersTarget(str(folder), device="cpu")
    asked = {"target": target, "request": Everything().everything}
    with closing(opened(PLUGIN, "capture", "vllm", STARTED, **asked)) as capture:
        yield capture


class Everything(CaptureSuite):
    plugin, name, options = PLUGIN, "vllm", STARTED

    @pytest.fixture
    def target_folder(self, capturing: VllmCapture) -> Path:
        return Path(capturing.target.path)


class TestStarted(Everything):
    """One server serves all of them."""


class TestServer(Everything):
    """The same server, as any other that runs."""

    name: ClassVar[str] = "vllm-server"

    @pytest.fixture(autouse=True)
    def running(self, capturing: VllmCapture) -> None:
        """The self-test would run the target here, which the suite takes for the capture's doing."""
        place = {"server": capturing.source.server.url, "folder": str(capturing.source.folder)}
        type(self).options = {**place, "in_flight": 4, "self_test": False}

    def test_a_server_of_another_target_is_refused_and_that_of_the_runs_is_not(
        self, capturing: VllmCapture, tmp_path: Path
    ) -> None:
        folder = capture_target(tmp_path / "other", "qwen3", head_dim=32, seed=1)
        other = TransformersTarget(str(folder), device="cpu")
        options = {**self.options, "self_test": True}
        for target, says in (
            (other, r"vLLM does not predict|differs from transformers'"),
            (capturing.target, ""),
        ):
            asked = {"target": target, "request": REQUESTS["bfloat16"]}
            with pytest.raises(UsageError, match=says) if says else nullcontext():
                opened(PLUGIN, "capture", self.name, options, **asked).close()


class TestEngine(EngineSuite):
    plugin, name = PLUGIN, "vllm"  # of its exports no manifest says the method
    options: ClassVar[dict[str, Any]] = {"python": PYTHON, "kv_cache": "64MiB", "method": "eagle3"}
    target_config: ClassVar[dict[str, Any]] = {"head_dim": 32}  # the least that its kernels take


# ---------------------------------------------------------------- drafts that are served

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
PROMPTS, LONGEST = 24, 40
DRAFTS = {
    "eagle3": {
        "draft_vocab_size": 2048,
        "ttt_length": 2,
        "intermediate_size": 384,
        "num_drafts": 7,
    },
    "dflash": {"num_layers": 1, "layers": [1, 3, 5], "block_size": 8, "num_anchors": 64},
    "peagle": {
        "draft_vocab_size": 2048,
        "num_layers": 2,
        "num_depths": 7,
        "down_sample_ratio": 0.9,
        "intermediate_size": 384,
    },
}


@dataclass
class Trained:
    """A run whose drafts learned the target's own answers to its eval prompts."""

    yaml: Path
    prompts: list[list[int]]
    plain: list[list[int]]  # the answers

    def serve(self, label: str, num_drafts: int = 7, **more: Any) -> Any:
        export = self.yaml.parent / "run" / label / "export"
        longest = max(map(len, self.prompts)) + LONGEST
        serving = Serving(QUICKSTART / "target", export, num_drafts, longest, **more)
        options = {"python": PYTHON, "kv_cache": "256MiB"}
        return closing(opened(PLUGIN, "engine", "vllm", options, serving=serving))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    asked, taught, yaml = (folder / name for name in ("eval.jsonl", "train.jsonl", "run.yaml"))
    lines = (QUICKSTART / "data" / "eval.jsonl").read_text().splitlines()[:PROMPTS]
    asked.write_text("\n".join(lines))
    config: dict[str, Any] = {
        "run": str(folder / "run"),
        "target": {"path": str(QUICKSTART / "target"), "dtype": "float32", "device": "cpu"},
        "data": {"eval": str(asked), "max_length": 512},
        "drafts": {n: {"algorithm": {"name": n, "options": o}} for n, o in DRAFTS.items()},
        "train": {"batch": 4, "lr": 2e-3, "epochs": 17, "device": "cpu", "eval_every": 0},
        "eval": {"max_new_tokens": LONGEST, "batch": 12},
    }
    with draftcore.open_run(config) as run:
        prompts = [list(ids) for ids in run.data.prompts().token_ids]
        plain = run.target.load_model().generate(prompts, LONGEST)
    rows = (
        {"input_ids": [*ids, *answer], "loss_mask": [0] * (len(ids) - 1) + [1] * (len(answer) + 1)}
        for ids, answer in zip(prompts, plain, strict=True)
    )
    taught.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config["data"]["train"] = str(taught)
    yaml.write_text(json.dumps(config))
    draftcore.train(yaml)
    draftcore.export(yaml)
    return Trained(yaml, prompts, plain)


@pytest.mark.parametrize("label", DRAFTS)
def test_a_draft_is_served_with_the_rounds_that_eval_counts_until_its_server_ends(
    trained: Trained, label: str
) -> None:
    (report,) = evaluate(trained.yaml, draft=label)
    assert report.acceptance_length > 1.5
    with trained.serve(label) as engine:
        answers = [engine.decode(prompt, LONGEST) for prompt in trained.prompts]
        assert [list(answer.tokens) for answer in answers] == trained.plain
        rounds = [answer.rounds for answer in answers]
        assert rounds == [row["rounds"] for row in report.rows]
        accepted = np.array([answer.accepted for answer in answers]).sum(0) / sum(rounds)
        # Here also what is accepted behind an answer's end counts.
        assert accepted == pytest.approx(report.acceptance_by_position, abs=0.03)
        url = engine.server.url
        with trained.serve(label, url=url) as running:
            assert running.decode(trained.prompts[0], LONGEST) == answers[0]
        with pytest.raises(UsageError, match="counts 7 drafts a round, and 3 are"):
            trained.serve(label, 3, url=url)
        with pytest.raises(UsageError, match=r"takes \d+ tokens, and .* up to 4096"):
            opened(
                PLUGIN, "engine", "vllm", {}, serving=Serving(QUICKSTART, None, 7, 4096, url=url)
            )
        os.kill(engine.server.child.process.pid, signal.SIGKILL)
        with pytest.raises(DraftcoreError, match="vLLM has ended, with status -9"):
            engine.decode(trained.prompts[0], LONGEST)
