"""Target and draft run through graphs, from the command line, with every algorithm of ours.

The backend is the one that records on a CPU: what a graph would freeze, alias or refuse shows.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from draftcore_graphs.decode import DecodeGraphRunner

from draftcore.config import load_config
from draftcore.plugins.registry import load
from draftcore.run.parts import Run
from draftcore.run.trainer import prepare, train

ALGORITHMS = {
    "eagle3": {"layers": [1, 2, 4], "draft_vocab_size": 240, "ttt_length": 2, "num_drafts": 3},
    "dflash": {"layers": [1, 2, 4], "num_layers": 2, "block_size": 4, "num_anchors": 8},
    "domino": {
        "layers": [1, 2, 4],
        "num_layers": 2,
        "block_size": 4,
        "num_anchors": 8,
        "gru_hidden_dim": 16,
        "emb_dim": 8,
    },
}
DECODE = {"backend": "recording", "rows": [1, 2], "lengths": [256, 512]}
PREFILL = {"backend": "recording", "lengths": [64, 256]}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_evaluating_through_graphs_is_lossless_and_accepts_the_same(tmp_path, new_project, name):
    project = new_project(tmp_path / name, algorithm={"name": name, "options": ALGORITHMS[name]})
    project.cli("train")
    eager = json.loads(project.cli("eval", "--json").stdout)
    through(project, decode=DECODE)
    graphs = json.loads(project.cli("eval", "--json").stdout)
    assert graphs["lossless"] is True
    keys = ("tokens", "rounds", "acceptance_by_position", "acceptance_length")
    assert {key: graphs[key] for key in keys} == {key: eager[key] for key in keys}


def through(project, **phases):
    """The same project with these phases through graphs."""
    project.config["graphs"] = phases
    project.__post_init__()
    return project


def test_features_captured_through_graphs_train_to_the_same_losses(tmp_path, new_project):
    """Within rounding of eager ones; to the same bits wherever they are captured."""
    eager = new_project(tmp_path / "eager")
    eager.cli("train")
    offline = through(new_project(tmp_path / "offline"), prefill=PREFILL)
    output = offline.cli("capture").output
    assert "graphs.prefill                2 captured, 6 replayed" in output
    offline.cli("train")
    colocated = through(new_project(tmp_path / "colocated", store="memory"), prefill=PREFILL)
    colocated.cli("train")
    assert offline.losses() == colocated.losses()
    assert list(offline.losses()) == list(eager.losses())
    for step, loss in eager.losses().items():
        assert offline.losses()[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("batch", [4, 3])
def test_capture_by_halves_stores_the_features_of_the_whole(
    tmp_path, new_project, monkeypatch, batch
):
    """Two rows beside two, or one row cut in two; fp32, of numbers of about 3."""
    from draftcore_graphs import tbo

    cuts, split = [], tbo.split
    monkeypatch.setattr(tbo, "split", lambda rows, cut: (cuts.append(cut), split(rows, cut))[1])
    stored = {}
    for plugins in ({}, {"tbo": {}}):
        project = new_project(tmp_path / f"{len(plugins)}", capture={"batch": batch})
        through(project, prefill={**PREFILL, "rows": [batch], "plugins": plugins})
        assert "captured 24 samples" in project.cli("capture").output
        stored[bool(plugins)] = features(project)
        assert bool(cuts) == bool(plugins)
    assert {cut.inside > 0 for cut in cuts if not cut.row} <= {batch == 3}
    assert any(cut.inside for cut in cuts) == (batch == 3)
    assert stored[True].keys() == stored[False].keys()
    for name, whole in stored[False].items():
        torch.testing.assert_close(stored[True][name], whole, rtol=0, atol=4e-6)


def features(project) -> dict[tuple[str, str], torch.Tensor]:
    """All that a project's store holds, by sample and name."""
    run = Run(load_config(project.yaml, []), load())
    refs = list(run.store.lookup(run.samples.feature_ids).values())
    found = {}
    for ref, handle in zip(refs, run.store.get_many(refs), strict=True):
        found |= {(ref.feature_id, name): value.clone() for name, value in handle.tensors.items()}
        handle.close()
    run.close()
    return found


def test_features_by_halves_are_not_mixed_with_others(tmp_path, new_project):
    project = through(new_project(tmp_path / "p"), prefill=PREFILL)
    project.cli("capture")
    refused = project.cli("capture", "graphs.prefill.plugins={tbo: {}}", ok=False)
    assert "holds features that this run cannot use" in refused.output


def test_features_of_other_buckets_are_not_mixed(tmp_path, new_project):
    """Padding changes their last bits: a store and a run say so, whichever differs."""
    project = through(new_project(tmp_path / "p"), prefill=PREFILL)
    project.cli("capture")
    project.cli("train", "train.max_steps=2")
    other = ("graphs.prefill.lengths=[256]", "train.max_steps=4")
    refused = project.cli("train", *other, f"run={tmp_path / 'another'}", ok=False)
    assert "holds features that this run cannot use" in refused.output
    refused = project.cli("train", *other, "store=memory", ok=False)
    assert "graphs.prefill" in refused.output
    assert "differs from this one" in refused.output
    project.cli("train", "train.max_steps=4", "graphs.decode.backend=recording")


def test_evaluation_in_training_captures_once_and_changes_no_loss(tmp_path, new_project):
    settings = {"eval_every": 2, "eval_prompts": 2, "eval_samples": 2, "checkpoint_every": 6}
    plain = new_project(tmp_path / "plain")
    plain.cli("train")
    eager = new_project(tmp_path / "eager", train=settings)
    eager.cli("train")
    graphs = through(new_project(tmp_path / "graphs", train=settings), decode=DECODE)
    run = Run(load_config(graphs.yaml), load())
    (trainer,) = prepare(run)
    assert train(run, [trainer]) == "complete"
    runner = trainer.probe.runner
    assert isinstance(runner, DecodeGraphRunner)
    assert runner.captures == 2 + 2 + 1  # drafts and verdicts of two row buckets, a plain step
    assert runner.counts.keys() == {"replayed"}
    evaluations = [
        [line for line in map(json.loads, (p.run / "metrics.jsonl").open()) if "loss" not in line]
        for p in (eager, graphs)
    ]
    assert len(evaluations[0]) == 3
    assert evaluations[0] == evaluations[1]
    assert graphs.losses() == plain.losses()

    weight = next(iter(trainer.built.module.parameters()))
    weight.data = weight.data.clone()
    trainer.probe.evaluate(trainer.built, 6, 6)
    assert runner.captures == 10
    run.close()


def test_the_plan_says_what_is_run_and_who_decided(tmp_path, new_project):
    project = new_project(tmp_path / "p")
    lines = project.cli("eval", "--plan").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["PHASE", "KEY", "VALUE", "DECIDED", "BY"],
        ["prefill", "backend", "eager", "default"],
        ["decode", "backend", "eager", "default"],
    ]
    through(project, prefill={**PREFILL, "plugins": {"tbo": {}}}, decode={"backend": "auto"})
    assert columns(project.cli("capture", "--plan")) == [
        ["PHASE", "KEY", "VALUE", "DECIDED BY"],
        ["prefill", "backend", "recording", "you"],
        ["prefill", "options", "none", "default"],
        ["prefill", "rows", "4", "default"],
        ["prefill", "lengths", "64 256", "you"],
        ["prefill", "padding", "True", "default"],
        ["prefill", "plugins", "tbo", "you"],
        ["prefill", "rule masks", "an error if it speaks", "the first batch"],
        ["decode", "backend", "eager", "auto: no backend for cpu"],
    ]
    through(project, decode=DECODE)
    planned = columns(project.cli("eval", "--plan"))
    assert planned[-1] == [
        "decode", "rule drafter-state", "an error if it speaks", "the draft's state",
    ]  # fmt: skip
    assert not project.run.exists()


def columns(result) -> list[list[str]]:
    return [re.split(r"\s{2,}", line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "graphs.decode.bakend=full",
            "graphs.decode.bakend: unknown key (did you mean 'backend'?)",
        ),
        ("graphs.prefil.backend=full", "graphs.prefil: unknown key (did you mean 'prefill'?)"),
        ("graphs.decode.rows=[0]", "graphs.decode.rows.0: Input should be greater"),
        ("graphs.decode.backend=recordin", "did you mean 'recording'"),
        ("graphs.decode.plugins={nosuch: {}}", "nosuch"),
        (
            "graphs.decode.plugins=[tbo]",
            "graphs.decode.plugins: Input should be a valid dictionary",
        ),
        ("graphs.prefill.plugins.tbo.share=1", "share: unknown key (did you mean 'least_share'?)"),
        (
            "graphs.prefill.plugins={tbo: {}}",
            "graphs.prefill.plugins.tbo was set, and the rule 'nothing-captured' refuses it",
        ),
        (
            "graphs.decode={backend: recording, plugins: {tbo: {}}}",
            "graphs.decode.plugins.tbo was set, and the rule 'phase' refuses it",
        ),
    ],
)
def test_a_wrong_key_or_name_is_answered(tmp_path, new_project, override, says):
    refused = new_project(tmp_path / "p").cli("eval", "--plan", override, ok=False)
    assert refused.exit_code == 2
    assert says in refused.output


def test_what_a_rule_refuses_is_refused_before_anything_starts(tmp_path, new_project):
    project = new_project(tmp_path / "p", train={"eval_every": 2})
    hot = ("graphs.decode.backend=recording", "eval.temperature=0.5")
    for verb in ("train", "eval"):
        refused = project.cli(verb, *hot, *(["--plan"] if verb == "eval" else []), ok=False)
        assert refused.exit_code == 2
        assert "graphs.decode.backend=recording was set, and the rule 'sampling'" in refused.output
        assert "set graphs.decode.backend=eager, or set eval.temperature=0" in refused.output
    assert not (project.run / "checkpoints").exists()


def test_a_drafter_whose_state_no_graph_can_hold_is_refused_by_the_rule(
    tmp_path, new_project, monkeypatch
):
    from draftcore_eagle3.drafter import Eagle3Drafter

    project = new_project(tmp_path / "p")
    project.cli("train")
    allocate = Eagle3Drafter.allocate
    monkeypatch.setattr(
        Eagle3Drafter,
        "allocate",
        lambda self, *a: [state := allocate(self, *a), len(state.start_B)],
    )
    refused = project.cli("eval", "graphs.decode.backend=recording", ok=False)
    assert "the rule 'drafter-state' refuses it" in refused.output
    assert "state[1] is a int, which a graph would freeze" in refused.output


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
    tmp_path, new_project, monkeypatch
):
    project = new_project(tmp_path / "p")
    project.cli("train")
    (tmp_path / "chosen.py").write_text(CHOSEN)
    auto = "graphs.decode={backend: auto, rows: [1, 2], lengths: [256, 512]}"
    planned = columns(project.cli("eval", "--plan", auto, plugin=tmp_path / "chosen.py"))
    assert ["decode", "backend", "chosen", "auto, for cpu"] in planned
    assert ["decode", "rule drafter-state", "eager if it speaks", "the draft's state"] in planned
    output = project.cli("eval", auto, plugin=tmp_path / "chosen.py").output
    assert re.search(r"^graphs\.decode +\d+ captured, \d+ replayed$", output, re.MULTILINE)
    monkeypatch.setattr("draftcore_graphs.opening.fault", lambda state, rows: "state[1] is a int")
    output = project.cli("eval", auto, plugin=tmp_path / "chosen.py").output
    said = "eager, rule drafter-state: the algorithm's decoding state cannot lie in static buffers"
    assert f"{said}: state[1] is a int" in output
