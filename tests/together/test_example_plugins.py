"""The examples of one file, by the command line: what they log, what they stop, what they schedule."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.together.conftest import Project, Start

FOLDER = Path(__file__).parents[2] / "examples" / "plugins"
EARLY_STOP, WSD = FOLDER / "early_stop.py", FOLDER / "wsd.py"
# At this rate no weight moves, and so no loss falls.
STUCK = ("train.lr=1e-30", "train.eval_every=1", "train.eval_samples=2", "train.eval_prompts=0")


def newest(project: Project) -> dict[str, Any]:
    folder = max((project.run / "checkpoints").glob("step-*"))
    found: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return found


def test_training_ends_when_the_held_out_loss_no_longer_falls_and_says_why(
    project: Project,
) -> None:
    """With a checkpoint, from which the same command goes on; status 0."""
    said = project.cli("train", *STUCK, plugin=EARLY_STOP).output.strip().splitlines()
    assert "stopped: step 4 of 6" in said[-2]
    assert said[-1].startswith("stopped by the plugin early_stop: the held-out loss was ")
    assert (newest(project)["step"], newest(project)["stopped"]) == (4, said[-1].partition(": ")[2])
    assert len(project.evaluations()) == 4
    for held_out in project.evaluations():
        assert held_out["perplexity"] == pytest.approx(math.exp(held_out["loss"]))
    for line in (line for line in project.lines() if "loss" in line):
        norms = [value for name, value in line.items() if name.startswith("grad_norm.")]
        assert len(norms) > 1
        assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-4)
    assert "complete: step 6 of 6" in project.cli("train", *STUCK, plugin=EARLY_STOP).output
    report = project.cli("eval", "--json", plugin=EARLY_STOP).stdout
    assert "perplexity" not in json.loads(report)


def test_a_run_of_several_processes_is_stopped_alike(project: Project) -> None:
    """The launcher asks for the last step's checkpoint, and takes that of a stop."""
    project.cli("train", *STUCK, "store=auto", "topology.producers=1", plugin=EARLY_STOP)
    assert (newest(project)["step"], bool(newest(project)["stopped"])) == (4, True)


def test_the_parts_of_a_sharded_draft_are_shown_whole(project: Project, start: Start) -> None:
    """Its gradients, to rank 0; and both ranks end when it is told to stop."""
    shared = ("train.shard=true", "train.epochs=2")
    ranks = start(project, *STUCK, *shared, plugin=EARLY_STOP)
    assert ranks.finish() == [0, 0], ranks.output(0)
    assert "stopped by the plugin early_stop" in ranks.output(0)
    assert newest(project)["step"] == 4
    steps = [line for line in project.lines() if "loss" in line]
    for line in steps:
        norms = [value for name, value in line.items() if name.startswith("grad_norm.")]
        assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-4)
    assert len(steps) == 4


def test_a_run_that_learns_is_not_stopped_and_is_as_without_the_plugin(project: Project) -> None:
    often = ("train.eval_every=1", "train.eval_prompts=0", "train.epochs=2")
    assert "complete: step 12 of 12" in project.cli("train", *often, plugin=EARLY_STOP).output
    watched = project.losses()
    project.cli("train", *often, f"run={project.folder / 'alone'}")
    assert project.losses("../alone") == watched


def test_the_rate_rises_holds_and_falls(project: Project) -> None:
    project.cli("train", "train.epochs=3", "train.warmup_ratio=0.25", plugin=WSD)
    rates = [line["lr"] / 0.003 for line in project.lines()]
    rising = [step / 4.5 for step in range(1, 5)]
    falling = [3 / 3.6, 2 / 3.6, 1 / 3.6]
    assert rates == pytest.approx([*rising, *[1.0] * 11, *falling])
