"""Captures beside training on a CUDA device, on a stream of their own: `nox -s gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from draftcore_sdk.streams import busy_streams
from draftcore_sdk.targets import conversations, tiny_target
from torch.profiler import ProfilerActivity, profile

from draftcore.config import load_config
from draftcore.contracts.algorithm import Sample
from draftcore.contracts.channel import PlannedStep
from draftcore.plugins.registry import load
from draftcore.run.parts import Run
from draftcore.run.trainer import prepare, train

if TYPE_CHECKING:
    from tests.together.conftest import NewProject


pytestmark = pytest.mark.gpu

CUDA = ("target.device=cuda", "train.device=cuda", "store=memory")
ROUNDING = 1e-4  # of kernels that add in the order in which their threads come by


def prefill(backend: str, *buckets: str) -> tuple[str, ...]:
    """The keys of a run that captures eagerly, or through graphs of a backend."""
    if backend == "eager":
        return ()
    return ("runner.prefill.name=graphs", f"runner.prefill.options.backend={backend}", *buckets)


@pytest.mark.parametrize("backend", ["eager", "full", "breakable", "piecewise"])
def test_overlap_changes_no_loss(tmp_path: Path, new_project: NewProject, backend: str) -> None:
    """To the bit, where two runs without overlap agree to the bit, and else as far as they do.

    A capture runs the same kernels on any stream, so its features are the same bits; a draft's own
    backward may add by atomic operations, whose order no stream decides.
    """
    losses = []
    for number, overlap in enumerate(("false", "false", "true")):
        project = new_project(tmp_path / str(number), samples=48)
        evaluated = ("train.eval_every=5", "train.eval_prompts=1", "train.eval_samples=4")
        runner = prefill(backend, "runner.prefill.options.lengths=[64]")
        project.cli("train", *CUDA, *evaluated, *runner, f"train.overlap={overlap}")
        losses.append(project.losses())
    plain, again, beside = losses
    assert len(plain) == 12
    if plain == again:
        assert beside == plain
    else:
        assert again == pytest.approx(plain, rel=ROUNDING)
        assert beside == pytest.approx(plain, rel=ROUNDING)


@pytest.mark.parametrize("backend", ["eager", "full"])
def test_kernels_of_capture_and_training_run_at_once(
    tmp_path: Path, new_project: NewProject, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a trace of the device says; with a target that computes longer than its launches take.

    No two samples are of one length, so that each step needs one group, as it would of much data.
    """
    wide: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "head_dim": 512,
        "num_hidden_layers": 8,
    }
    target = tiny_target(tmp_path / "wide", std=0.02, max_position_embeddings=2048, **wide)
    data = conversations(tmp_path / "long.jsonl", ["a" * (800 + 4 * row) for row in range(96)])
    changes = {
        "target": {"path": str(target)},
        "data": {"train": str(data), "max_length": 2048},
        "train": {"batch": 8},
    }
    project = new_project(tmp_path / "project", **changes, capture={"batch": 8})
    keys = [*CUDA, *prefill(backend), "train.overlap=true"]
    run = Run(load_config(project.yaml, keys), load())
    tracer = profile(activities=[ProfilerActivity.CUDA])
    try:
        (trainer,) = prepare(run)
        advance = trainer.advance

        def traced(
            planned: PlannedStep, samples: Mapping[int, Sample], fetch_seconds: float
        ) -> None:
            if planned.index == 3:  # what is loaded, recorded and tuned once is behind
                tracer.start()
            advance(planned, samples, fetch_seconds)

        monkeypatch.setattr(trainer, "advance", traced)
        train(run, [trainer])
        torch.cuda.synchronize()
        tracer.stop()
    finally:
        run.close()
    tracer.export_chrome_trace(str(tmp_path / "trace.json"))
    busy = busy_streams(tmp_path / "trace.json")
    assert len(busy.streams) >= 2, busy
    assert busy.at_once > 0, busy
