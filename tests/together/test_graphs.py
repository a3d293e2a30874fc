"""Target and draft run through graphs, from the command line, with every algorithm of ours.

The backend is the one that records on a CPU: what a graph would freeze, alias or refuse shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import Result

from draftcore.config import load_config
from draftcore.contracts.algorithm import StepContext
from draftcore.plugins.registry import load_plugins
from draftcore.run import Run
from draftcore.run.train import trainer_parts

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project

DECODE = {"backend": "recording", "rows": [1, 2], "lengths": [256, 512]}
PREFILL = {"backend": "recording", "lengths": [64, 256]}
RECORDING = ("runner.decode.name=graphs", "runner.decode.options.backend=recording")


def through(project: Project, **phases: Any) -> Project:
    """The same project with these phases through graphs, by their options."""
    project.config["runner"] = {
        phase: {"name": "graphs", "options": options} for phase, options in phases.items()
    }
    project.__post_init__()
    return project


def test_features_captured_through_graphs_train_to_the_same_losses(
    tmp_path: Path, new_project: NewProject, original: Project
) -> None:
    """Within rounding of eager ones; to the same bits wherever they are captured."""
    offline = through(new_project(tmp_path / "offline"), prefill=PREFILL)
    output = offline.cli("capture").output
    assert "runner.prefill                2 captured, 6 replayed" in output
    offline.cli("train")
    colocated = through(new_project(tmp_path / "colocated", store="auto"), prefill=PREFILL)
    colocated.cli("train")
    assert offline.losses() == colocated.losses()
    assert offline.losses() == pytest.approx(original.losses(), rel=1e-5)
    # Other buckets, and halves, change their last bits: a store and a run say so, whichever differs.
    halves = "runner.prefill.options.plugins={tbo: {}}"
    refused = offline.cli("capture", halves, ok=False)
    assert "holds features that this run cannot use" in refused.output
    other = ("runner.prefill.options.lengths=[256]", "train.epochs=2", "train.max_steps=8")
    refused = offline.cli("train", *other, f"run={tmp_path / 'another'}", ok=False)
    assert "holds features that this run cannot use" in refused.output
    refused = offline.cli("train", *other, "store=auto", ok=False)
    assert "runner.prefill" in refused.output
    assert "differs from this one" in refused.output
    offline.cli("train", *other[1:], *RECORDING)
    output = offline.cli("capture", halves, f"store=file:{tmp_path / 'halves'}").output
    assert "captured 24 samples" in output


def test_evaluation_in_training_captures_once_and_changes_no_loss(
    tmp_path: Path, new_project: NewProject, original: Project
) -> None:
    """And is lossless, with the same tokens accepted."""
    settings = {"eval_every": 2, "eval_prompts": 2, "eval_samples": 2, "checkpoint_every": 6}
    eager = new_project(tmp_path / "eager", train=settings)
    eager.cli("train")
    graphs = through(new_project(tmp_path / "graphs", train=settings), decode=DECODE)
    said = graphs.cli("train").output
    captures = 2 + 2 + 1  # drafts and verdicts of two row buckets, a plain step
    assert re.search(rf"runner.decode +{captures} captured, \d+ replayed\n", said)
    assert len(eager.evaluations()) == 3
    assert eager.evaluations() == graphs.evaluations()
    assert all(report["acceptance_length"] >= 1 for report in eager.evaluations())
    assert graphs.losses() == original.losses() == eager.losses()
    ours, theirs = (json.loads(p.cli("eval", "--json").stdout) for p in (graphs, eager))
    assert ours["lossless"] is True
    for key in ("tokens", "rounds", "acceptance_by_position", "acceptance_length"):
        assert ours[key] == theirs[key]

    run = Run(load_config(graphs.yaml), load_plugins())
    evaluation: Any = run.evaluation()
    parts = trainer_parts(run, "both")
    (trainer,) = parts.trainers
    assert trainer.evaluate is not None
    context = StepContext(6, parts.plan.total_steps, trainer.config.seed, training=False)
    trainer.evaluate(trainer.built, context)
    weight = next(iter(trainer.built.module.parameters()))
    weight.data = weight.data.clone()  # what was captured reads the old ones
    trainer.evaluate(trainer.built, context)
    assert next(iter(evaluation.runner.report())).startswith(f"{2 * captures} captured")
    assert parts.features.store is not None
    parts.features.store.close()


def columns(result: Result) -> list[list[str]]:
    return [re.split(r"\s{2,}", line) for line in result.stdout.splitlines()]


def test_the_plan_says_what_is_run_and_who_decided(tmp_path: Path, new_project: NewProject) -> None:
    project = new_project(tmp_path / "p")
    head = ["PHASE", "KEY", "VALUE", "DECIDED BY"]
    eager = [[phase, "runner", "eager", "default"] for phase in ("prefill", "decode")]
    assert columns(project.cli("runners")) == [head, *eager]
    through(project, prefill={**PREFILL, "plugins": {"tbo": {}}}, decode=DECODE)
    shown = columns(project.cli("runners"))
    assert ["prefill", "lengths", "64 256", "you"] in shown
    assert ["prefill", "plugins", "tbo", "you"] in shown
    last = ["decode", "rule drafter-state", "an error if it refuses", "the draft's state"]
    assert shown[-1] == last
    assert not project.run.exists()


@pytest.mark.parametrize(
    ("phase", "options", "says"),
    [
        ("decode", "{bakend: full}", "did you mean 'backend'?"),
        (
            "decode", "{backend: recordin}",
            "runner.decode.options.backend: there is no graph 'recordin' (did you mean 'recording'?)",
        ),
        (
            "decode", "{plugins: {nosuch: {}}}",
            "runner.decode.options.plugins.nosuch: there is no graph-plugin 'nosuch'",
        ),
        ("prefill", "{plugins: {tbo: {share: 1}}}", "did you mean 'least_share'?"),
        (
            "decode", "{backend: recording}",
            "for every batch\n  set runner.decode.name=eager, or set eval.temperature=0",
        ),
        pytest.param(
            "prefill", "{backend: piecewise}",
            "runner.prefill.options.backend: the graph backend 'piecewise' records CUDA graphs",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_the_target_is_read(
    tmp_path: Path, new_project: NewProject, monkeypatch: pytest.MonkeyPatch,
    phase: str, options: str, says: str,
) -> None:  # fmt: skip
    """A wrong key or name, and what a rule refuses of a run that decodes at a temperature."""
    monkeypatch.setattr("draftcore_hf.target.TransformersModel", None)
    project = new_project(tmp_path / "p", train={"eval_every": 2}, eval={"temperature": 0.5})
    for verb in ("runners", "train"):
        given = f"runner.{phase}={{name: graphs, options: {options}}}"
        refused = project.cli(verb, given, ok=False)
        assert (refused.exit_code, says in refused.output) == (2, True), refused.output
    assert not (project.run / "checkpoints").exists()


def test_a_drafter_whose_state_or_trees_no_graph_can_hold_is_refused_by_the_rule(
    trained: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftcore_eagle3.drafter import Eagle3Drafter

    allocate = Eagle3Drafter.allocate
    monkeypatch.setattr(
        Eagle3Drafter,
        "allocate",
        lambda self, *a: [state := allocate(self, *a), len(state.start_B)],
    )
    refused = trained.cli("eval", *RECORDING, ok=False)
    assert "the rule 'drafter-state' refuses it" in refused.output
    assert "state[1] is a int, which a graph would freeze" in refused.output
    monkeypatch.setattr(Eagle3Drafter, "allocate", allocate)
    monkeypatch.setattr(Eagle3Drafter, "depth", 2, raising=False)
    refused = trained.cli("eval", *RECORDING, ok=False)
    assert "the rule 'drafter-trees' refuses it" in refused.output
    assert "depth 2\n  set runner.decode.name=eager" in refused.output


CHOSEN = """
from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore_graphs.recording import RecordingBackend

@hookimpl
def describe():
    return [Offer("graph", "chosen", frozenset({"auto:cpu", "breaks"}))]

@hookimpl
def graph_backend(name):
    return RecordingBackend() if name == "chosen" else None
"""


def test_what_auto_leaves_to_eager_and_that_there_is_no_break_is_in_the_plan_and_said_by_the_run(
    trained: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chosen.py").write_text(CHOSEN)
    auto = "runner.decode={name: graphs, options: {rows: [1, 2], lengths: [256, 512]}}"

    def said(verb: str) -> Result:
        return trained.cli(verb, auto, plugin=tmp_path / "chosen.py")

    planned = columns(said("runners"))
    no_break = "none: a round of decoding is one graph, as with full"
    assert ["decode", "backend", "chosen", "auto, for cpu"] in planned
    assert ["decode", "breaks", no_break, "chosen"] in planned
    assert ["decode", "rule drafter-state", "eager if it refuses", "the draft's state"] in planned
    output = said("eval").stdout
    assert re.search(r"^runner\.decode +\d+ captured, \d+ replayed$", output, re.MULTILINE)
    assert re.search(rf"^runner\.decode +breaks of chosen: {no_break}$", output, re.MULTILINE)
    monkeypatch.setattr("draftcore_graphs.graphs.fault", lambda state, rows: "state[1] is a int")
    why = "eager, rule drafter-state: the algorithm's decoding state cannot lie in static buffers"
    assert f"{why}: state[1] is a int" in said("eval").stdout
