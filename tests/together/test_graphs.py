"""Target and draft run through graphs, from the command line, with every algorithm of ours.

The backend is the one that records on a CPU: what a graph would freeze, alias or refuse shows.
"""

from __future__ import annotations

import json

import pytest

from draftcore.config import load_config
from draftcore.graphs.decode import DecodeGraphRunner
from draftcore.plugins import load
from draftcore.run import Run
from draftcore.training.trainer import prepare, train

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
    through(project, prefill=PREFILL, decode={"backend": "auto"})
    lines = [
        line.split(maxsplit=2) for line in project.cli("capture", "--plan").stdout.splitlines()
    ]
    assert lines[1:] == [
        ["prefill", "backend", "recording  you"],
        ["prefill", "options", "{}         default"],
        ["prefill", "rows", "4          default"],
        ["prefill", "lengths", "64 256     you"],
        ["prefill", "padding", "True       default"],
        ["prefill", "plugins", "none       default"],
        ["decode", "backend", "eager      auto: no backend for cpu"],
    ]
    assert not project.run.exists()


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
        ("graphs.decode.plugins=[nosuch]", "nosuch"),
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
