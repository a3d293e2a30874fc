"""A draft trained on what sglang captures, beside one on transformers' features."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from capturing import SAMPLES, losses, write_run
from draftcore_sdk.targets import tiny_target
from draftcore_sglang.internals import Runner

import draftcore

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]

# Measured on a CPU: no difference, as both then add in the same order; longer rows differ by 2e-6.
RTOL = 1e-5


def train(folder: Path, target: Path, **capture: Any) -> list[float]:
    """Train, evaluating on the way, and return the loss of each step."""
    file = write_run(folder, target, capture=capture, train={"eval_every": 6, "eval_prompts": 2})
    draftcore.train(file)
    return losses(file)


def test_a_draft_trains_on_what_sglang_captures_as_on_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process: target in sglang, held-out samples, decoding by transformers, checkpoints."""
    prompts, true = 0, Runner.forward

    def counted(runner: Runner, given: Sequence[Sequence[int]], *others: Any) -> Any:
        nonlocal prompts
        prompts += len(given)
        return true(runner, given, *others)

    monkeypatch.setattr(Runner, "forward", counted)
    target = tiny_target(tmp_path / "target")
    theirs = train(tmp_path / "hf", target, name="hf")
    assert prompts == 0
    ours = train(tmp_path / "sglang", target, name="sglang", options={"max_tokens": 1024})
    assert prompts >= SAMPLES + 3, "every training and held-out sample, and self-tests"
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, rel=RTOL)
