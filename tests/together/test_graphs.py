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
from draftcore.run.features import open_features, open_samples
from draftcore.run.train import trainer_parts
from tests.together.conftest import OPTIONS

if TYPE_CHECKING:
    from tests.together.conftest import NewProject, Project

DECODE = {"backend": "recording", "rows": [1, 2], "lengths": [256, 512]}
PREFILL = {"backend": "recording", "lengths": [64, 256]}
RECORDING = ("runner.decode.name=graphs", "runner.decode.options.backend=recording")


@pytest.mark.parametrize("name", OPTIONS)
def test_evaluating_through_graphs_is_lossless_and_accepts_the_same(
    tmp_path: Path, new_project: NewProject, name: str
) -> None:
    project = new_project(tmp_path / name, algorithm={"name": name, "options": OPTIONS[name]})
    project.cli("train")
    eager = json.loads(project.cli("eval", "--json").stdout)
    through(project, decode=DECODE)
    graphs = json.loads(project.cli("eval", "--json").stdout)
    assert graphs["lossless"] is True
    keys = ("tokens", "rounds", "acceptance_by_position", "acceptance_length")
    assert {key: graphs[key] for key in keys} == {key: eager[key] for key in keys}


def through(project: Project, **phases: Any) -> Project:
    """The same project with these phases through graphs, by their options."""
    project.config["runner"] = {
        phase: {"name": "graphs", "options": options} for phase, options in phases.items()
    }
    project.__post_init__()
    return project


def test_features_captured_through_graphs_train_to_the_same_losses(
    tmp_path: Path, new_project: NewProject
) -> None:
    """Within rounding of eager ones; to the same bits wherever they are captured."""
    eager = new_project(tmp_path / "eager")
    eager.cli("train")
    offline = through(new_project(tmp_path / "offline"), prefill=PREFILL)
    output = offline.cli("capture").output
    assert "runner.prefill                2 captured, 6 replayed" in output
    offline.cli("train")
    colocated = through(new_project(tmp_path / "colocated", store="auto"), prefill=PREFILL)
    colocated.cli("train")
    assert offline.losses() == colocated.losses()
    assert list(offline.losses()) == list(eager.losses())
    for step, loss in eager.losses().items():
        assert offline.losses()[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("batch", [4, 3])
def test_capture_by_halves_stores_the_features_of_the_whole(
    tmp_path: Path, new_project: NewProject, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Two rows beside two, or one row cut in two; fp32, of numbers of about 3."""
    from draftcore_graphs import tbo

    cuts, split = list[Any](), tbo.split

    def noted(rows: Any, cut: Any) -> Any:
        cuts.append(cut)
        return split(rows, cut)

    monkeypatch.setattr(tbo, "split", noted)
    stored = {}
    chosen: list[dict[str, Any]] = [{}, {"tbo": {}}]
    for plugins in chosen:
        project = new_project(tmp_path / f"{len(plugins)}", train={"batch": batch})
        through(project, prefill={**PREFILL, "rows": [batch], "plugins": plugins})
        assert "captured 24 samples" in project.cli("capture").output
        stored[bool(plugins)] = features(project)
        assert bool(cuts) == bool(plugins)
    assert {cut.inside > 0 for cut in cuts if not cut.row} <= {batch == 3}
    assert any(cut.inside for cut in cuts) == (batch == 3)
    assert stored[True].keys() == stored[False].keys()
    for name, whole in stored[False].items():
        torch.testing.assert_close(stored[True][name], whole, rtol=0, atol=4e-6)


def features(project: Project) -> dict[tuple[str, str], torch.Tensor]:
    """All that a project's store holds, by sample and name."""
    run = Run(load_config(project.yaml, []), load_plugins())
    held = open_features(run)
    assert held.store is not None
    refs = list(held.store.lookup(open_samples(run, held).feature_ids).values())
    found: dict[tuple[str, str], torch.Tensor] = {}
    for ref, handle in zip(refs, held.store.get_many(refs), strict=True):
        found |= {(ref.feature_id, name): value.clone() for name, value in handle.tensors.items()}
        handle.close()
    held.store.close()
    return found


def test_features_of_halves_or_other_buckets_are_not_mixed(
    tmp_path: Path, new_project: NewProject
) -> None:
    """Padding changes their last bits: a store and a run say so, whichever differs."""
    project = through(new_project(tmp_path / "p"), prefill=PREFILL)
    project.cli("capture")
    refused = project.cli("capture", "runner.prefill.options.plugins={tbo: {}}", ok=False)
    assert "holds features that this run cannot use" in refused.output
    project.cli("train", "train.max_steps=2")
    other = ("runner.prefill.options.lengths=[256]", "train.max_steps=4")
    refused = project.cli("train", *other, f"run={tmp_path / 'another'}", ok=False)
    assert "holds features that this run cannot use" in refused.output
    refused = project.cli("train", *other, "store=auto", ok=False)
    assert "runner.prefill" in refused.output
    assert "differs from this one" in refused.output
    project.cli("train", "train.max_steps=4", *RECORDING)


def test_evaluation_in_training_captures_once_and_changes_no_loss(
    tmp_path: Path, new_project: NewProject
) -> None:
    settings = {"eval_every": 2, "eval_prompts": 2, "eval_samples": 2, "checkpoint_every": 6}
    plain = new_project(tmp_path / "plain")
    plain.cli("train")
    eager = new_project(tmp_path / "eager", train=settings)
    eager.cli("train")
    graphs = through(new_project(tmp_path / "graphs", train=settings), decode=DECODE)
    said = graphs.cli("train").output
    captures = 2 + 2 + 1  # drafts and verdicts of two row buckets, a plain step
    assert re.search(rf"runner.decode +{captures} captured, \d+ replayed\n", said)
    evaluations = [
        [line for line in map(json.loads, (p.run / "metrics.jsonl").open()) if "loss" not in line]
        for p in (eager, graphs)
    ]
    for line in [line for lines in evaluations for line in lines]:
        del line["time"]
    assert len(evaluations[0]) == 3
    assert evaluations[0] == evaluations[1]
    assert all(e["evaluation"]["acceptance_length"] >= 1 for e in evaluations[0])
    assert graphs.losses() == plain.losses() == eager.losses()

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


def test_the_plan_says_what_is_run_and_who_decided(tmp_path: Path, new_project: NewProject) -> None:
    project = new_project(tmp_path / "p")
    lines = project.cli("runners").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["PHASE", "KEY", "VALUE", "DECIDED", "BY"],
        ["prefill", "runner", "eager", "default"],
        ["decode", "runner", "eager", "default"],
    ]
    through(project, prefill={**PREFILL, "plugins": {"tbo": {}}}, decode={"backend": "auto"})
    assert columns(project.cli("runners")) == [
        ["PHASE", "KEY", "VALUE", "DECIDED BY"],
        ["prefill", "runner", "graphs", "you"],
        ["prefill", "backend", "recording", "you"],
        ["prefill", "options", "none", "default"],
        ["prefill", "rows", "4", "default"],
        ["prefill", "lengths", "64 256", "you"],
        ["prefill", "padding", "True", "default"],
        ["prefill", "plugins", "tbo", "you"],
        ["prefill", "rule masks", "an error if it refuses", "the first batch"],
        ["decode", "runner", "graphs", "you"],
        ["decode", "backend", "eager", "auto: no backend for cpu"],
    ]
    through(project, decode=DECODE)
    planned = columns(project.cli("runners"))
    assert planned[-1] == [
        "decode", "rule drafter-state", "an error if it refuses", "the draft's state",
    ]  # fmt: skip
    assert not project.run.exists()


def columns(result: Result) -> list[list[str]]:
    return [re.split(r"\s{2,}", line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "runner.decode={name: graphs, options: {bakend: full}}",
            "bakend: unknown key (did you mean 'backend'?)",
        ),
        ("runner.prefil.name=graphs", "runner.prefil: unknown key (did you mean 'prefill'?)"),
        ("runner.prefill.name=grahps", "(did you mean 'graphs'?)"),
        (
            "runner.decode={name: graphs, options: {backend: recordin}}",
            "runner.decode.options.backend: there is no graph 'recordin' (did you mean 'recording'?)",
        ),
        (
            "runner.decode={name: graphs, options: {plugins: {nosuch: {}}}}",
            "runner.decode.options.plugins.nosuch: there is no graph-plugin 'nosuch'",
        ),
        (
            "runner.prefill={name: graphs, options: {plugins: {tbo: {share: 1}}}}",
            "share: unknown key (did you mean 'least_share'?)",
        ),
        (
            "runner.prefill={name: graphs, options: {backend: full}}",
            "runner.prefill.options.backend=full was set, and the rule 'device' refuses it",
        ),
    ],
)
def test_a_wrong_key_or_name_is_answered(
    tmp_path: Path, new_project: NewProject, override: str, says: str
) -> None:
    refused = new_project(tmp_path / "p").cli("runners", override, ok=False)
    assert refused.exit_code == 2
    assert says in refused.output


def test_what_a_rule_refuses_is_refused_before_anything_starts(
    tmp_path: Path, new_project: NewProject
) -> None:
    project = new_project(tmp_path / "p", train={"eval_every": 2})
    hot = (*RECORDING, "eval.temperature=0.5")
    for verb in ("train", "runners"):
        refused = project.cli(verb, *hot, ok=False)
        assert refused.exit_code == 2
        asked = "runner.decode.options.backend=recording"
        assert f"{asked} was set, and the rule 'sampling'" in refused.output
        assert "set runner.decode.name=eager, or set eval.temperature=0" in refused.output
    assert not (project.run / "checkpoints").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_a_backend_that_cannot_be_opened_is_refused_before_the_target_is_read(
    tmp_path: Path, new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftcore_hf.target.TransformersModel", None)
    project = through(new_project(tmp_path / "p"), prefill={"backend": "piecewise"})
    for verb in ("runners", "capture", "train"):
        refused = project.cli(verb, ok=False)
        assert refused.exit_code == 2
        asked = "runner.prefill.options.backend: the graph backend 'piecewise' records CUDA graphs"
        assert asked in refused.output


def test_a_drafter_whose_state_or_trees_no_graph_can_hold_is_refused_by_the_rule(
    tmp_path: Path, new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftcore_eagle3.drafter import Eagle3Drafter

    project = new_project(tmp_path / "p")
    project.cli("train")
    allocate = Eagle3Drafter.allocate
    monkeypatch.setattr(
        Eagle3Drafter,
        "allocate",
        lambda self, *a: [state := allocate(self, *a), len(state.start_B)],
    )
    refused = project.cli("eval", *RECORDING, ok=False)
    assert "the rule 'drafter-state' refuses it" in refused.output
    assert "state[1] is a int, which a graph would freeze" in refused.output
    monkeypatch.setattr(Eagle3Drafter, "allocate", allocate)
    monkeypatch.setattr(Eagle3Drafter, "depth", 2, raising=False)
    refused = project.cli("eval", *RECORDING, ok=False)
    assert "the rule 'drafter-trees' refuses it" in refused.output
    assert "depth 2\n  set runner.decode.name=eager" in refused.output


CHOSEN = """
from draftcore import hookimpl
from draftcore.contracts.offers import Offer

@hookimpl
def describe():
    return [Offer("graph", "chosen", frozenset({"auto:cpu"}))]

@hookimpl
def graph_backend(name):
    from draftcore_graphs.recording import RecordingBackend
    return RecordingBackend() if name == "chosen" else None
"""


def test_what_auto_leaves_to_eager_is_open_in_the_plan_and_said_by_the_run(
    tmp_path: Path, new_project: NewProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = new_project(tmp_path / "p")
    project.cli("train")
    (tmp_path / "chosen.py").write_text(CHOSEN)
    auto = "runner.decode={name: graphs, options: {rows: [1, 2], lengths: [256, 512]}}"
    planned = columns(project.cli("runners", auto, plugin=tmp_path / "chosen.py"))
    assert ["decode", "backend", "chosen", "auto, for cpu"] in planned
    assert ["decode", "rule drafter-state", "eager if it refuses", "the draft's state"] in planned
    output = project.cli("eval", auto, plugin=tmp_path / "chosen.py").output
    assert re.search(r"^runner\.decode +\d+ captured, \d+ replayed$", output, re.MULTILINE)
    monkeypatch.setattr("draftcore_graphs.graphs.fault", lambda state, rows: "state[1] is a int")
    output = project.cli("eval", auto, plugin=tmp_path / "chosen.py").output
    said = "eager, rule drafter-state: the algorithm's decoding state cannot lie in static buffers"
    assert f"{said}: state[1] is a int" in output
