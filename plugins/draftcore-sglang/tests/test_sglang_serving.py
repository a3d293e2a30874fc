"""Drafts that were trained here, served by a real sglang: it accepts as many tokens as `eval` says.

sglang's speculative workers want CUDA: on its out-of-tree CPU platform 0.5.23 refuses EAGLE-3's
trees by name, and DFlash's worker calls `record_stream` on a CPU tensor. Run by `nox -s gpu`.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang_on_cpu import flags

pytest.importorskip("sglang")

from draftcore_eval.api import evaluate
from draftcore_sdk.serving import Serving
from draftcore_sglang.ranks import free_port

import draftcore

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
PROMPTS, NEW_TOKENS = 100, 128
BLOCKS = {"num_layers": 3, "layers": [1, 3, 5], "block_size": 8, "num_anchors": 64}
DRAFTS = {"eagle3": {"layers": [1, 3, 4], "ttt_length": 3}, "dflash": BLOCKS}
SETTINGS = {
    "dtype": "bfloat16", "attention_backend": "triton", "sampling_backend": "pytorch",
    "grammar_backend": "none", "context_length": 1024, "max_running_requests": 32,
    "mem_fraction_static": 0.3, "log_level": "info", "disable_radix_cache": True,
    "skip_server_warmup": True, "disable_cuda_graph": True,
}  # fmt: skip
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
ARGUMENTS = {
    "eagle3": {"speculative_algorithm": "EAGLE3", **CHAIN},
    "dflash": {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 8},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's YAML whose drafts have learned enough to be accepted, evaluated and exported."""
    folder = tmp_path_factory.mktemp("served")
    data = {name: str(QUICKSTART / "data" / f"{name}.jsonl") for name in ("train", "eval")}
    config = {
        "run": str(folder / "run"),
        "target": {"path": str(QUICKSTART / "target"), "dtype": "bfloat16"},
        "data": {**data, "max_length": 512, "limit": 2000},
        "drafts": {n: {"algorithm": {"name": n, "options": o}} for n, o in DRAFTS.items()},
        "train": {"max_steps": 200, "epochs": 4, "batch": 32, "lr": 2e-3, "eval_every": 0},
        "eval": {"batch": 50, "prompts": PROMPTS, "max_new_tokens": NEW_TOKENS},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    draftcore.train(file)
    draftcore.export(file)
    return file


def generate(server: Serving, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Answer prompts greedily; what sglang says of each."""
    greedy = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    body = json.dumps({"input_ids": prompts, "sampling_params": greedy}).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/generate", body, kind)
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return [one["meta_info"] for one in json.load(answer)]
    except OSError:
        raise AssertionError(server.tail) from None


@pytest.mark.parametrize("label", DRAFTS)
def test_a_server_accepts_as_many_tokens_as_eval_says(
    label: str, trained: Path, tmp_path: Path
) -> None:
    """By sglang's own launcher. An answer's first token comes from the prompt's forward; a round is
    one verification."""
    with draftcore.open_run(trained) as run:
        prompts = [list(ids) for ids in run.data.prompts(PROMPTS).token_ids]
    port, export = free_port(), trained.parent / "run" / label / "export"
    where = {"model_path": QUICKSTART / "target", "speculative_draft_model_path": export}
    settings = {**where, "host": "127.0.0.1", "port": port, **SETTINGS, **ARGUMENTS[label]}
    command = [sys.executable, "-m", "sglang.launch_server", *flags(settings)]
    offline: dict[str, Any] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with Serving(command, port, tmp_path / "log", **offline) as server:
        answers = generate(server, prompts)
    tokens = sum(answer["completion_tokens"] - 1 for answer in answers)
    rounds = sum(answer["spec_verify_ct"] for answer in answers)
    (report,) = [report.to_json() for report in evaluate(trained, draft=label)]
    ours, (low, high) = report["acceptance_length"], report["acceptance_length_95"]
    print(f"{label}: sglang {tokens / rounds:.3f}, eval {ours:.3f} ({low:.3f} to {high:.3f})")
    assert low <= tokens / rounds <= high
