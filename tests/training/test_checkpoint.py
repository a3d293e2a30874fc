"""Checkpoints: whole or not there, named where they are damaged, and restored to the bit."""

from __future__ import annotations

import errno
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore import hookimpl
from draftcore.contracts.algorithm import Draft, StepContext
from draftcore.errors import DraftcoreError, UsageError
from draftcore.training import checkpoint
from draftcore.training.checkpoint import MARK, latest, open_checkpoint

if TYPE_CHECKING:
    from tests.training.conftest import NewRun, Run

FILES = ("draft.safetensors", "optimizer.safetensors", "state.json")


def folder(run: Run, step: int) -> Path:
    return run.folder / f"checkpoints/step-{step:08d}"


@pytest.fixture
def run(new_run: NewRun) -> Run:
    """A run with checkpoints of steps 3 and 4."""
    found = new_run(dropout=0.5, checkpoint_every=1)
    found.train()
    return found


# ---------------------------------------------------------------- what is there


def test_the_newest_checkpoint_is_found_with_the_state_that_was_saved(run: Run) -> None:
    found = latest(run.folder / "checkpoints")
    assert found is not None
    assert (found.step, found.folder) == (4, folder(run, 4))
    state = found.state
    assert state["plan"] == run.plan.key
    assert (state["accumulate"], state["samples_seen"], state["skipped"]) == (2, 13, [])
    assert state["config"]["train"]["lr"] == 0.05
    assert open_checkpoint(folder(run, 3)).step == 3


def test_a_checkpoint_without_its_mark_does_not_exist(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """It was being written when its process was killed."""
    (folder(run, 4) / MARK).unlink()
    found = latest(run.folder / "checkpoints")
    assert found is not None
    assert found.step == 3
    assert f"{folder(run, 4)} has no COMPLETE and is left out" in caplog.text
    with pytest.raises(UsageError, match=f"is not complete\n.*{MARK}"):
        open_checkpoint(folder(run, 4))
    (folder(run, 3) / MARK).unlink()
    assert latest(run.folder / "checkpoints") is None


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    assert latest(tmp_path) is None
    with pytest.raises(UsageError, match="is no checkpoint"):
        open_checkpoint(tmp_path)


def test_what_a_killed_process_left_is_replaced_or_goes(run: Run, new_run: NewRun) -> None:
    """Of the step's folder without a mark, and of the one under another name."""
    wanted = {name: (folder(run, 4) / name).read_bytes() for name in FILES}
    (folder(run, 4) / MARK).unlink()
    (folder(run, 4) / "draft.safetensors").write_bytes(b"torn")
    aside = run.folder / "checkpoints/.step-00000004.tmp"
    aside.mkdir()
    (aside / "draft.safetensors").write_bytes(b"torn too")
    for other in (".step-00000009.tmp", "step-00000009"):
        (run.folder / "checkpoints" / other).mkdir()
    new_run(dropout=0.5, checkpoint_every=1).train()
    assert not list((run.folder / "checkpoints").glob("*00000009*"))
    assert {name: (folder(run, 4) / name).read_bytes() for name in FILES} == wanted
    assert open_checkpoint(folder(run, 4)).step == 4
    assert not aside.exists()


ALTERED: dict[str, Callable[[Path, bytes], object]] = {
    "missing": lambda file, data: file.unlink(),
    "empty": lambda file, data: file.write_bytes(b""),
    "torn": lambda file, data: file.write_bytes(data[: len(data) // 2]),
    "a bit flipped": lambda file, data: file.write_bytes(
        data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ALTERED)
def test_an_altered_file_is_named_with_a_remedy(
    run: Run, new_run: NewRun, name: str, way: str
) -> None:
    file = folder(run, 4) / name
    ALTERED[way](file, file.read_bytes())
    with pytest.raises(DraftcoreError) as caught:
        new_run(dropout=0.5).build()
    assert str(file) in str(caught.value)
    assert "delete its folder to go on from the checkpoint before" in str(caught.value)
    shutil.rmtree(folder(run, 4))
    assert new_run(dropout=0.5).build().trainers[0].step == 3


def test_a_checkpoint_of_another_format_is_refused_with_a_remedy(run: Run) -> None:
    (folder(run, 4) / MARK).write_text('{"format": 99}')
    with pytest.raises(UsageError, match=r"has the format 99.*\n  go on with the version"):
        latest(run.folder / "checkpoints")


@pytest.mark.parametrize("mark", ["", "[]", "7", '{"form', "null"])
def test_a_mark_that_is_none_is_named(run: Run, mark: str) -> None:
    (folder(run, 4) / MARK).write_text(mark)
    with pytest.raises(DraftcoreError, match=MARK):
        latest(run.folder / "checkpoints")


def test_a_checkpoint_of_another_draft_names_what_does_not_fit(run: Run, new_run: NewRun) -> None:
    again = new_run(dropout=0.5)
    draft, found = again.draft(), again.found()
    assert found is not None
    draft.module.first = torch.nn.Linear(4, 5)
    with pytest.raises(UsageError, match=r"does not fit the configured draft: first\.") as caught:
        found.load_draft(draft)
    assert "second.weight" not in str(caught.value)


def test_what_is_the_targets_is_not_in_a_checkpoint(run: Run) -> None:
    weights = load_file(folder(run, 4) / "draft.safetensors")
    assert "head" not in weights
    assert torch.equal(weights["first.bias"], weights["second.bias"]), "one weight of two names"


# ---------------------------------------------------------------- to the bit


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_stopped(new_run: NewRun) -> None:
    """Weights, moments and random numbers; and the number of steps of the optimizer."""
    settings: dict[str, Any] = {"dropout": 0.5, "epochs": 3, "weight_decay": 0.1}
    straight = new_run("straight", **settings)
    straight.train()
    for stopped in (2, 9, 13):
        part = new_run("parts", **settings).build()
        part.stop_after = stopped
        part.train()
        torch.manual_seed(stopped)  # whatever else moves torch's random numbers
        torch.rand(stopped)
    last = new_run("parts", **settings)
    assert last.train() == ("complete", {})
    assert last.losses() == straight.losses()
    assert len(last.losses()) == straight.plan.total_steps
    for ours, theirs in zip(last.moments(), straight.moments(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    total = straight.plan.total_steps
    for name in FILES[:2]:
        ours_, theirs_ = (load_file(folder(one, total) / name) for one in (last, straight))
        assert ours_.keys() == theirs_.keys()
        assert all(torch.equal(ours_[key], theirs_[key]) for key in theirs_)


class Odd(torch.optim.Optimizer):
    """Keeps tensors of two types, a number, a word and nothing; and counts in its group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "mean": 0.5, "betas": (0.5, 0.9)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["mean"] = 0.9 * group["mean"] + 0.1 / group["count"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    exact = torch.zeros_like(weight, dtype=torch.float64)
                    state |= {"exact": exact, "seen": 0, "phase": "even", "none": None}
                    state["signs"] = torch.zeros_like(weight, dtype=torch.int8)
                state["seen"] += 1 / 3
                state["phase"] = "odd" if state["phase"] == "even" else "even"
                state["exact"].mul_(0.9).add_(weight.grad.double())
                state["signs"].add_(weight.grad.sign().to(torch.int8))
                turn = 1 if state["phase"] == "odd" else state["seen"]
                move = state["exact"] * turn * group["mean"] + state["signs"]
                weight.sub_(move.to(weight.dtype), alpha=group["lr"])


class Brings:
    """Lets the draft be trained by `Odd`."""

    @hookimpl
    def optimizer(self, draft: Draft, lr: float) -> torch.optim.Optimizer:
        return Odd(draft.parameter_groups, lr)


def test_any_optimizer_resumes_to_the_bit_with_all_that_it_keeps(new_run: NewRun) -> None:
    """Of weights and of groups; tensors keep their type and numbers stay numbers."""
    settings: dict[str, Any] = {"dropout": 0.5, "epochs": 2, "plugins": [Brings()], "lr": 0.01}
    straight = new_run("straight", **settings)
    straight.train()
    for stopped in (2, 9):
        part = new_run("parts", **settings).build()
        part.stop_after = stopped
        part.train()
    last = new_run("parts", **settings)
    assert last.train() == ("complete", {})
    assert last.losses() == straight.losses()
    ours, theirs = (run.trainers[0].optimizer.state_dict() for run in (last, straight))
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["param_groups"][0]["count"] == straight.plan.total_steps
    assert ours["state"].keys() == theirs["state"].keys() == {0, 1, 2}
    for at, state in theirs["state"].items():
        assert state.keys() == {"exact", "signs", "seen", "phase", "none"}
        for key, value in state.items():
            found = ours["state"][at][key]
            assert type(found) is type(value)
            assert (
                (found.dtype == value.dtype and torch.equal(found, value))
                if isinstance(value, Tensor)
                else found == value
            )


# ---------------------------------------------------------------- writing


class Slow:
    """Lets the writing of the checkpoint of step 3 wait until step 5 is finished, or the run failed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.save, self.ready, self.said = checkpoint.save, threading.Event(), list[str]()
        patch.setattr(checkpoint, "save", self.write)

    def write(self, root: Path, weights: Any, kept: Any, state: Any, keep: int) -> Path:
        if state["step"] == 3:
            assert self.ready.wait(60), "training waits for the writing"
        self.said.append(f"written {state['step']}")
        return self.save(root, weights, kept, state, keep)

    @hookimpl
    def step_finished(self, step: int) -> None:
        self.said.append(f"step {step}")
        if step == 5:
            self.ready.set()

    @hookimpl
    def checkpoint_saved(self, step: int, folder: Path) -> None:
        self.said.append(f"saved {open_checkpoint(folder).step}")


def test_training_goes_on_while_a_checkpoint_is_written(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of its own step; the next one, and the end of the run, wait for it."""
    settings: dict[str, Any] = {"dropout": 0.5, "epochs": 2, "checkpoint_every": 3}
    straight = new_run("straight", **settings, keep_checkpoints=9)
    straight.train()
    slow = Slow(monkeypatch)
    run = new_run("slow", **settings, keep_checkpoints=9, plugins=[slow])
    run.train()
    assert slow.said.index("step 5") < slow.said.index("written 3") < slow.said.index("written 6")
    saved = [said for said in slow.said if said.startswith("saved")]
    assert saved == ["saved 3", "saved 6", "saved 8"]
    for step, name in itertools.product((3, 6, 8), FILES[:2]):
        ours, theirs = (load_file(folder(one, step) / name) for one in (run, straight))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_checkpoint_is_whole_though_the_run_fails_while_it_is_written(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    run = new_run(epochs=2, checkpoint_every=3, plugins=[slow])

    def fail(batch: Any, context: StepContext, loss: Tensor) -> Tensor:
        if context.step == 5:
            slow.ready.set()
            raise RuntimeError("the device is lost")
        return loss

    run.algorithms[""].wrong = fail
    with pytest.raises(RuntimeError, match="the device is lost"):
        run.train()
    found = run.found()
    assert found is not None
    assert found.step == 3


def test_only_the_newest_are_kept_and_torn_ones_do_not_count(run: Run, new_run: NewRun) -> None:
    (folder(run, 3) / MARK).unlink()
    more = new_run(dropout=0.5, checkpoint_every=1, epochs=2, keep_checkpoints=3)
    more.train()
    kept = {mark.parent for mark in run.folder.glob(f"checkpoints/step-*/{MARK}")}
    assert kept == {folder(run, 6), folder(run, 7), folder(run, 8)}


def test_a_full_disk_leaves_the_checkpoints_before_and_no_half_one(
    run: Run, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: dict[str, Tensor], file: Path) -> None:
        if file.name == FILES[1]:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, file)

    monkeypatch.setattr("draftcore.training.checkpoint.save_file", full)
    more = new_run(dropout=0.5, epochs=2)
    with pytest.raises(DraftcoreError, match="No space left on device\n  earlier checkpoints"):
        more.train()
    assert sorted((run.folder / "checkpoints").iterdir()) == [folder(run, 3), folder(run, 4)]
    found = latest(run.folder / "checkpoints")
    assert found is not None
    assert found.step == 4
