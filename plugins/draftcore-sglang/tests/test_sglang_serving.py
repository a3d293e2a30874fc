"""Drafts that were trained here, served by a real sglang on a GPU: it drafts as `eval` does. By `nox -s gpu`.

What sglang's code for EAGLE-3 does is tested on a CPU as well (test_sglang_engine.py); DFlash's worker
calls `record_stream` on the CPU tensors there, which torch refuses.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from draftcore_eval.api import served

import draftcore

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]

# Of an environment of its own, or sglang is in this one.
if (PYTHON := os.environ.get("DRAFTCORE_SGLANG_PYTHON")) is None:
    pytest.importorskip("sglang")

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
PROMPTS, NEW_TOKENS = 100, 128
BLOCKS = {"num_layers": 3, "layers": [1, 3, 5], "block_size": 8, "num_anchors": 64}
DRAFTS = {"eagle3": {"layers": [1, 3, 4], "ttt_length": 3}, "dflash": BLOCKS}
# sglang 0.5.17 has no float32 kernels on a GPU, and gives DFlash's worker the dtype of the export.
DTYPES = {"eagle3": "float16", "dflash": "bfloat16"}
SETTINGS = {
    "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
    "context_length": 1024, "mem_fraction_static": 0.3, "skip_server_warmup": True,
    "disable_cuda_graph": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's YAML whose drafts have learned enough to be accepted."""
    folder = tmp_path_factory.mktemp("served")
    data = {name: str(QUICKSTART / "data" / f"{name}.jsonl") for name in ("train", "eval")}
    config = {
        "run": str(folder / "run"),
        "target": {"path": str(QUICKSTART / "target"), "dtype": "float32"},
        "data": {**data, "max_length": 512, "limit": 2000},
        "drafts": {n: {"algorithm": {"name": n, "options": o}} for n, o in DRAFTS.items()},
        "train": {"max_steps": 200, "epochs": 4, "batch": 32, "lr": 2e-3, "eval_every": 0},
        "eval": {"batch": 50, "prompts": PROMPTS, "max_new_tokens": NEW_TOKENS},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    draftcore.train(file)
    return file


@pytest.mark.parametrize("label", DRAFTS)
def test_a_server_serves_a_draft_as_it_was_trained(label: str, trained: Path) -> None:
    """Outputs are plain decoding's, and rounds are ours, but for roundings: no known mistake fits better."""
    options = [f"args.{name}={json.dumps(value)}" for name, value in SETTINGS.items()]
    options += [f"python={PYTHON}"] if PYTHON else []
    (found,) = served(
        trained, engine="sglang", options=options, requests=32, draft=label, dtype=DTYPES[label]
    )
    lines = "\n".join(": ".join(line) for line in found.lines())
    print(lines)
    assert not found.different, lines
    assert len(found.outputs) <= PROMPTS // 50, lines  # in 16 bits and batches of 32
    lengths = found.lengths(range(PROMPTS))
    assert lengths["engine"] > 1.3
    assert lengths["engine"] == pytest.approx(lengths["here"], rel=0.02)
