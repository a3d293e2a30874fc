"""What is evaluated, exported and called done is what was trained, or it is said why not."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from draftcore_eval import curves, plots
from draftcore_sdk.targets import CHATML

from tests.together.conftest import NewProject, Project

# Of eagle3, without a tensor of another shape: what a draft is fed, and how it is computed.
OTHERWISE: dict[str, tuple[Any, ...]] = {
    "layers": ([0, 2, 4], [1, 3, 4], [0, 1, 2]),
    "norm_output": (True, False),
    "rope_theta": (1e4, 5e5),
    "step_decay": (0.5, 0.9),
}


def test_a_trained_draft_brings_its_options_and_others_are_refused_by_name(
    tmp_path: Path, new_project: NewProject
) -> None:
    """Whatever options it was trained with, for a checkpoint and for an export."""
    dice = random.Random(31)
    project = new_project(tmp_path, store="auto", train={"max_steps": 2, "checkpoint_every": 1})
    project.cli("train")  # what the configuration says
    for number in range(3):
        trained = {name: dice.choice(values) for name, values in OTHERWISE.items()}
        words = [f"algorithm.options.{name}={json.dumps(v)}" for name, v in trained.items()]
        run = f"run={tmp_path / str(number)}"
        project.cli("train", run, *words)
        bare = make_bare(project, run)
        bare.cli("export")
        bare.cli("eval", "algorithm.options.num_drafts=2")  # which is free
        report = json.loads((bare.run / "eval" / "report.json").read_text())
        origin = json.loads((bare.run / "export" / "draftcore.json").read_text())
        assert origin["algorithm"]["options"]["layers"] == trained["layers"]
        assert report["num_drafts"] == 2
        exported = ("--export", bare.run / "export", "algorithm.options.num_drafts=2")
        again = json.loads(bare.cli("eval", *exported, "--json").stdout)
        assert again["acceptance_length"] == report["acceptance_length"]
        assert again["about"]["origin"]["files"]["config.json"]
        assert report["about"]["origin"]["checkpoint"].endswith("step-00000002")
        name = dice.choice(list(OTHERWISE))
        other = dice.choice([v for v in OTHERWISE[name] if v != trained[name]])
        for verb in (["export", "--force"], ["eval"], ["eval", "--export", bare.run / "export"]):
            said = bare.cli(*verb, f"algorithm.options.{name}={json.dumps(other)}", ok=False)
            assert (said.exit_code, f"algorithm.options.{name}: " in said.output) == (2, True), said


def make_bare(project: Project, run: str) -> Project:
    """Return the project of a run whose configuration says nothing of its algorithm but the name."""
    config = {**project.config, "run": run.removeprefix("run="), "algorithm": {"name": "eagle3"}}
    folder = Path(config["run"]) / "bare"
    folder.mkdir(parents=True)
    return type(project)(folder, config)


def test_a_copy_of_a_checkpoint_is_neither_exported_nor_deleted(project: Project) -> None:
    project.cli("train", "train.max_steps=2", "store=auto")
    checkpoints = project.run / "checkpoints"
    for copy in ("step-best", "step-00000002.bak", "mystep-2"):
        shutil.copytree(checkpoints / "step-00000002", checkpoints / copy)
    (checkpoints / "mystep-2" / "COMPLETE").unlink()
    done = project.cli("train", "store=auto", "train.max_steps=6", "train.keep_checkpoints=1")
    assert "resuming from step 2" in done.output
    assert "exported step 6" in project.cli("export").output
    left = ["mystep-2", "step-00000002.bak", "step-00000006", "step-best"]
    assert sorted(path.name for path in checkpoints.iterdir()) == left
    (checkpoints / "step-best").rename(checkpoints / "step-00000009")
    said = project.cli("export", "--force", ok=False).output
    assert "step-00000009 holds the checkpoint of step 2" in said


def test_prompts_are_what_they_are_said_to_be(project: Project) -> None:
    """Held out, different ones, and written as the rows that were trained on."""
    project.cli("train", "train.max_steps=2", "store=auto")
    train, held_out = project.config["data"]["train"], Path(project.config["data"]["eval"])
    said = project.cli("eval", f"data.eval={train}", ok=False).output
    assert "data.eval is data.train" in said
    rows = Path(train).read_text().splitlines()[:2]
    held_out.write_text("\n".join([*rows, rows[0].replace("q0?", "another?"), *rows * 9]) + "\n")
    report = json.loads(project.cli("eval", "--json").stdout)
    about = report["about"]
    assert (report["prompts"], about["trained_on"]) == (3, 2)
    assert about["left_out"] == {"another row asks the same": 18}
    (project.folder / "other.jinja").write_text("Now:\n" + CHATML)
    other = f"data.chat_template={project.folder / 'other.jinja'}"
    said = project.cli("eval", other, ok=False).output
    assert "another chat template" in said
    said = project.cli("eval", "eval.max_new_tokens=1000000", ok=False).output
    assert "positions, and the target has 512" in said
    os.mkfifo(pipe := project.folder / "pipe.jsonl")
    assert "pipe.jsonl" in project.cli("eval", f"data.eval={pipe}", ok=False).output


def test_nothing_is_written_through_a_link_in_a_runs_folder(project: Project) -> None:
    (victim := project.folder / "victim").write_text("mine")
    train = "train", "train.max_steps=2", "store=auto"
    for name in (".lock", "data/train/lock", "data/train/rows.partial", "metrics.jsonl"):
        (link := project.run / name).parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        said = project.cli(*train, ok=False)
        assert (said.exit_code, name in said.output) == (1, True), said.output
        link.unlink()
    project.cli(*train)
    (project.run / "eval").mkdir()
    (plot := project.run / "eval" / "acceptance.png").symlink_to(victim)
    project.cli("eval")
    assert victim.read_text() == "mine"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_leaves_its_curves_and_a_plot_that_cannot_be_drawn_ends_none(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has named what draws them; a resumed run's are whole, and no link is followed."""
    drawn: list[Any] = []
    monkeypatch.setattr(curves, "SHORT", 0.0)
    monkeypatch.setattr(plots, "save", lambda figure, file: drawn.append(figure))
    more = "train.eval_every=2", "train.eval_prompts=0", "store=auto"
    project.cli("train", "train.max_steps=2", *more)
    project.cli("train", "train.max_steps=4", *more)
    loss, acceptance = drawn[-1].axes
    faint, mean, held_out = (list(line.get_xdata()) for line in loss.lines)
    assert (faint, mean, held_out) == ([1, 2, 3, 4], [1, 2, 3, 4], [2, 4])
    assert len(acceptance.lines) == 2 * len(loss.lines)  # of two positions
    monkeypatch.undo()
    monkeypatch.setattr(curves, "SHORT", 0.0)
    (victim := project.folder / "victim").write_text("mine")
    (plot := project.run / "metrics.png").symlink_to(victim)
    project.cli("train", "train.max_steps=5", *more)
    assert (victim.read_text(), plot.read_bytes()[:4]) == ("mine", b"\x89PNG")
    plot.unlink()
    plot.mkdir()
    done = project.cli("train", "train.max_steps=6", *more)
    assert "complete: step 6 of 6" in done.output
    assert done.output.count("the run goes on without curves") == 1


def test_a_run_that_has_nothing_to_learn_ends_with_its_first_step(
    tmp_path: Path, new_project: NewProject
) -> None:
    project = new_project(tmp_path, store="auto", data={"eval": None})
    row = {"input_ids": [30, 31, 32, 33], "loss_mask": [0, 0, 0, 1]}
    (tmp_path / "train.jsonl").write_text(8 * (json.dumps(row) + "\n"))
    said = project.cli("train", ok=False)
    assert (said.exit_code, "the rows of the first step teach nothing" in said.output) == (1, True)
    assert not list(project.run.glob("checkpoints/step-*"))
