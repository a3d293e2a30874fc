"""Runs through graphs on a CUDA device: `nox -s gpu`. The dist tests its backends by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.together.conftest import OPTIONS

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project

gpu = pytest.mark.gpu

CUDA = ("target.device=cuda", "train.device=cuda")


def graphs(phase: str, backend: str) -> str:
    """The override that runs a phase through a graph backend; `eager` is none."""
    return f"runner.{phase}={{name: graphs, options: {{backend: {backend}}}}}"


@gpu
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_decoding_through_graphs_is_that_of_eager(
    tmp_path: Path, new_project: NewProject, algorithm: str
) -> None:
    """Lossless, and with the same drafts accepted; fp32."""
    chosen = {"name": algorithm, "options": OPTIONS[algorithm]}
    project = new_project(tmp_path, algorithm=chosen)
    project.cli("train", *CUDA)
    found = {}
    for backend in ("eager", "full", "breakable"):
        result = project.cli("eval", *CUDA, graphs("decode", backend), "--json")
        found[backend] = json.loads(result.stdout)
        assert found[backend]["lossless"] is True
    lengths = {name: report["acceptance_length"] for name, report in found.items()}
    assert len(set(lengths.values())) == 1, lengths


@gpu
@pytest.mark.parametrize("backend", ["full", "breakable", "piecewise"])
def test_a_draft_trains_on_features_that_graphs_captured(project: Project, backend: str) -> None:
    """And evaluates in training through graphs as well, while more is captured."""
    both = (graphs("prefill", backend), graphs("decode", "full"))
    evaluated = ("train.eval_every=3", "train.eval_prompts=2")
    project.cli("train", *CUDA, *both, *evaluated, "store=auto")
    assert len(project.losses()) == 6


@gpu
def test_eager_and_graphs_train_alike(tmp_path: Path, new_project: NewProject) -> None:
    """fp32; the two differ in how the mask is made, so in the last bits of a feature."""
    losses = {}
    for backend in ("eager", "full"):
        project = new_project(tmp_path / backend)
        project.cli("train", *CUDA, graphs("prefill", backend))
        losses[backend] = project.losses()
    assert losses["full"] == pytest.approx(losses["eager"], rel=1e-4)


def test_a_target_on_the_cpu_is_refused_by_the_rule_that_says_so(project: Project) -> None:
    result = project.cli("train", graphs("prefill", "full"), ok=False)
    assert result.exit_code == 2
    assert "the rule 'device'" in result.output
