"""A draft trained on what sglang captures, by the command line, beside one on transformers' features."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from draftcore_sdk.targets import conversations, tiny_target
from draftcore_sglang.internals import Runner

from draftcore.cli import main

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]

# Measured on a CPU: no difference, as both then add in the same order; longer rows differ by 2e-6.
RTOL = 1e-5


def train(folder: Path, target: Path, capture: dict[str, Any]) -> list[float]:
    """Train, evaluating on the way, and return the loss of each step."""
    folder.mkdir()
    config = {
        "run": str(folder / "run"),
        "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "data": {
            "train": str(conversations(folder / "train.jsonl", 24)),
            "eval": str(conversations(folder / "eval.jsonl", ["yes it is", "abcabcabc", "no"])),
        },
        "algorithm": {"name": "eagle3", "options": {"layers": [1, 2, 4], "ttt_length": 2}},
        "capture": capture,
        "train": {
            "batch": 4, "epochs": 2, "lr": 0.003, "log_every": 1, "device": "cpu",
            "eval_every": 6, "eval_prompts": 2,
        },
        "eval": {"max_new_tokens": 8},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(main, ["train", str(folder / "run.yaml")])
    assert result.exit_code == 0, result.output
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_a_draft_trains_on_what_sglang_captures_as_on_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process: target in sglang, held-out samples, decoding by transformers, checkpoints."""
    prompts, true = 0, Runner.forward

    def counted(runner: Runner, given: Sequence[Sequence[int]], layers: Sequence[int]) -> Any:
        nonlocal prompts
        prompts += len(given)
        return true(runner, given, layers)

    monkeypatch.setattr(Runner, "forward", counted)
    target = tiny_target(tmp_path / "target")
    theirs = train(tmp_path / "hf", target, {"name": "hf"})
    assert prompts == 0
    ours = train(tmp_path / "sglang", target, {"name": "sglang", "options": {"max_tokens": 1024}})
    assert prompts >= 24 + 3, "every training and held-out sample, and self-tests"
    assert len(theirs) == 12
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, rel=RTOL)
