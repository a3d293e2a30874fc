"""A run by its verbs: the step that is best, what is trained already, and memory that does not suffice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from draftcore_sdk.targets import conversations

from draftcore.cli import main
from tests.faults import conftest

Verb = Callable[..., str]


@pytest.fixture
def verb(tmp_path: Path, target_folder: Path) -> Verb:
    """Do a verb of a run of four steps, of eight rows in two epochs; returns what it said."""
    sizes = {"checkpoint_every": 1, "eval_every": 1, "keep_checkpoints": 1, "eval_prompts": 0}
    held_out = {"eval": str(conversations(tmp_path / "eval.jsonl", 5))}
    run = conftest.Run(tmp_path / "of", target_folder, samples=8, train=sizes, data=held_out)
    files = conftest.HERE / "usecount.py", Path(__file__).with_name("odd_run.py")
    loose = [part for file in files for part in ("--plugin", str(file))]

    def verb(name: str, *arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, [*loose, name, str(run.yaml), *arguments])
        assert done.exit_code == code, (done.output, done.exc_info)
        return done.output

    return verb


def test_the_best_step_is_spared_named_and_exported(verb: Verb, tmp_path: Path) -> None:
    run = tmp_path / "of/run"
    assert "best: step-00000002, held-out loss 0\n" in verb("train")
    assert {f.name for f in (run / "checkpoints").iterdir()} == {"step-00000002", "step-00000004"}
    assert "exported step 2 to" in verb("export", "--checkpoint", "best")
    assert "exported step 4 to" in verb("export", "--force")
    best = "export", "--checkpoint", "best", "--force"
    known = (file := run / "run.json").read_text()
    file.write_text(known.replace("step-00000002", "step-00000004"))
    assert "run.json is not as draftcore wrote it\n  delete it" in verb(*best, code=2)
    file.unlink()
    said = verb(*best, code=2)
    assert "best is no checkpoint\n  choose a step-* folder" in said
    assert "best needs train.eval_every" in said


def test_a_run_beyond_what_is_asked_says_where_it_stands(verb: Verb, tmp_path: Path) -> None:
    """Also one of several drafts, while another is trained up to there."""
    two = ["algorithm=null", *(f"drafts.{label}.algorithm.name=usecount" for label in "ab")]
    verb("train", *two)
    assert verb("train", *two, "train.max_steps=2").splitlines()[1:] == [
        f"already trained: 4 steps in {tmp_path}/of/run/{label}" for label in "ab"
    ]
    (tmp_path / "of/run/b/checkpoints").rename(tmp_path / "elsewhere")
    said = verb("train", *two, "train.max_steps=2")
    assert f"already trained: 4 steps in {tmp_path}/of/run/a\n" in said
    assert "b: complete: step 2 of 2, 8 samples" in said
    assert "a: complete" not in said
    assert max(f.name for f in tmp_path.glob("of/run/a/checkpoints/*")) == "step-00000004"


def test_each_epoch_ends_with_an_evaluation_and_a_checkpoint_unless_asked_otherwise(
    verb: Verb, tmp_path: Path
) -> None:
    said = verb("train", "train.checkpoint_every=99", "train.eval_every=null")
    assert "trained in fp32 on cpu\n" in said
    assert "best: step-00000002, held-out loss 0\n" in said
    metrics = (tmp_path / "of/run/metrics.jsonl").read_text()
    assert re.findall(r'"step": (\d+),[^{]*"evaluation"', metrics) == ["2", "4"]
    assert "best" not in verb("train", "train.eval_every=0", f"run={tmp_path}/never")


@pytest.mark.parametrize("place", ["building", "a capture", "a step", "an evaluation", "a GPU"])
def test_too_little_memory_is_answered_in_words(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """No plugin is at fault. Afterwards the same command goes on."""
    monkeypatch.setenv("FULL", place)
    dflash = ["algorithm.name=dflash", "algorithm.options.num_layers=1"]
    other = dflash if place in ("building", "a capture") else []
    said = verb("train", *other, code=1)
    cpu = "can't allocate memory: you tried to allocate 144115188075855872 bytes."
    assert (cpu in said) != ("GiB of which 1.20 GiB is free.\n" in said) == (place == "a GPU")
    assert "  asked: train.batch=4, data.max_length=256, " in said
    assert (", algorithm.options.num_anchors=512, " in said) == bool(other)
    step = r"where a step takes up to [1-9][\d.]* .iB beside weights"
    free = r"free beside GPUs: [\d.]+ .iB\n  lower these, in th"
    assert re.search(rf", vocabulary \d+(, {step})?; {free}", said)
    assert place != "a capture" or re.search(step, said)
    assert "hook" not in said
    monkeypatch.setenv("FULL", "the plugin in a step")
    assert "\nerror: its ring is out of memory\n  make it larger\n" in verb("train", code=1)
    monkeypatch.delenv("FULL")
    assert "complete: step 4 of 4" in verb("train")
