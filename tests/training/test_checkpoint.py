"""Checkpoints: whole or not there, named where they are damaged, and restored to the bit."""

from __future__ import annotations

import errno
import itertools
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore import hookimpl
from draftcore.contracts.algorithm import Draft, StepContext
from draftcore.errors import DraftcoreError, UsageError
from draftcore.training import checkpoint
from draftcore.training.checkpoint import MARK, best, latest, open_checkpoint
from tests.training.conftest import NewRun, Run, same

Patch = pytest.MonkeyPatch
FILES = ("draft.safetensors", "optimizer.safetensors", "state.json")


def folder(run: Run, step: int) -> Path:
    return run.folder / f"checkpoints/step-{step:08d}"


def steps(run: Run) -> list[int]:
    """The steps of which something that is whole is kept."""
    return sorted(int(f.parent.name[-8:]) for f in run.folder.glob(f"checkpoints/step-*/{MARK}"))


@pytest.fixture
def run(new_run: NewRun) -> Run:
    """A run with checkpoints of steps 3 and 4."""
    return new_run(dropout=0.5, checkpoint_every=1).trained()


def test_the_newest_whole_checkpoint_is_found(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One without its mark was being written when its process was killed: it does not exist."""
    state, root = run.last().state, run.folder / "checkpoints"
    assert (run.last().step, run.last().folder) == (4, folder(run, 4))
    assert state["plan"] == run.plan.key
    assert (state["accumulate"], state["samples_seen"], state["skipped"]) == (2, 13, [])
    assert state["config"]["train"]["lr"] == 0.05
    assert open_checkpoint(folder(run, 3)).step == 3
    weights = load_file(folder(run, 4) / FILES[0])
    assert "head" not in weights, "that is the target's"
    assert torch.equal(weights["first.bias"], weights["second.bias"]), "one weight of two names"
    (folder(run, 4) / MARK).unlink()
    assert run.last().step == 3
    assert f"{folder(run, 4)} has no COMPLETE and is left out" in caplog.text
    with pytest.raises(UsageError, match=f"is not complete\n.*{MARK}"):
        open_checkpoint(folder(run, 4))
    (folder(run, 3) / MARK).unlink()
    assert latest(root) is latest(tmp_path) is latest(tmp_path / "absent") is None
    with pytest.raises(UsageError, match="is no checkpoint"):
        open_checkpoint(tmp_path)


def test_what_a_killed_process_left_is_replaced_or_goes(run: Run, new_run: NewRun) -> None:
    """Of the step's folder without a mark, and of the one under another name."""
    wanted = {name: (folder(run, 4) / name).read_bytes() for name in FILES}
    (folder(run, 4) / MARK).unlink()
    for torn in (folder(run, 4), run.folder / "checkpoints/.step-00000004.tmp"):
        torn.mkdir(exist_ok=True)
        (torn / FILES[0]).write_bytes(b"torn")
    for other in (".step-00000009.tmp", "step-00000009"):
        (run.folder / "checkpoints" / other).mkdir()
    new_run(dropout=0.5, checkpoint_every=1).train()
    assert sorted((run.folder / "checkpoints").iterdir()) == [folder(run, 3), folder(run, 4)]
    assert {name: (folder(run, 4) / name).read_bytes() for name in FILES} == wanted
    assert open_checkpoint(folder(run, 4)).step == 4


ALTERED: dict[str, Callable[[Path, bytes], object]] = {
    "missing": lambda file, data: file.unlink(),
    "empty": lambda file, data: file.write_bytes(b""),
    "torn": lambda file, data: file.write_bytes(data[: len(data) // 2]),
    "flipped": lambda file, data: file.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ALTERED)
def test_an_altered_file_is_named(run: Run, new_run: NewRun, name: str, way: str) -> None:
    file = folder(run, 4) / name
    ALTERED[way](file, file.read_bytes())
    with pytest.raises(DraftcoreError) as caught:
        new_run(dropout=0.5).build()
    assert str(file) in str(caught.value)
    assert "delete its folder to go on from the checkpoint before" in str(caught.value)
    shutil.rmtree(folder(run, 4))
    assert new_run(dropout=0.5).build().trainers[0].step == 3


def test_a_mark_of_another_format_or_that_is_none_is_named_with_a_remedy(run: Run) -> None:
    for mark in ("", "[]", "7", '{"form', "null", '{"format": 99}'):
        (folder(run, 4) / MARK).write_text(mark)
        with pytest.raises(DraftcoreError, match=f"{MARK}.*\n  ") as caught:
            run.found()
    assert caught.type is UsageError
    assert "has the format 99" in str(caught.value)
    assert "go on with the version that wrote it" in str(caught.value)


def test_a_checkpoint_of_another_draft_names_what_does_not_fit(run: Run) -> None:
    draft = run.draft()
    draft.module.first = torch.nn.Linear(4, 5)
    with pytest.raises(UsageError, match=r"does not fit the configured draft: first\.") as caught:
        run.last().load_draft(draft)
    assert "second.weight" not in str(caught.value)


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


@pytest.mark.parametrize("plugins", [[], [Brings()]], ids=["AdamW", "another"])
def test_a_resumed_run_ends_with_the_bits_of_a_whole_one(
    new_run: NewRun, plugins: list[object]
) -> None:
    """Weights, random numbers, and all that any optimizer keeps of weights and groups, in its types."""
    settings: dict[str, Any] = {"dropout": 0.5, "epochs": 3, "weight_decay": 0.1, "lr": 0.01}
    settings["plugins"] = plugins
    straight = new_run("straight", **settings).trained()
    for stopped in (2, 9):
        part = new_run("parts", **settings).build()
        part.stop_after = stopped
        part.train()
        torch.manual_seed(stopped)  # whatever else moves torch's random numbers
        torch.rand(stopped)
    last = new_run("parts", **settings)
    assert last.train() == ("complete", {})
    assert last.losses() == straight.losses()
    total = straight.plan.total_steps
    assert len(last.losses()) == total
    for name in FILES[:2]:
        assert same(*(load_file(folder(one, total) / name) for one in (last, straight)))
    ours, theirs = (run.trainers[0].optimizer.state_dict() for run in (last, straight))
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys() == {0, 1, 2}
    if plugins:
        assert ours["param_groups"][0]["count"] == total
        assert ours["state"][0].keys() == {"exact", "signs", "seen", "phase", "none"}
    for at, state in theirs["state"].items():
        assert ours["state"][at].keys() == state.keys()
        for key, value in state.items():
            found = ours["state"][at][key]
            assert type(found) is type(value)
            tensor = isinstance(value, Tensor)
            assert torch.equal(found, value) if tensor else found == value
            assert not tensor or found.dtype == value.dtype


class Slow:
    """Lets the writing of the checkpoint of step 3 wait until step 5 is finished, or the run failed."""

    def __init__(self, patch: Patch) -> None:
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


def test_training_goes_on_beside_a_write(new_run: NewRun, monkeypatch: Patch) -> None:
    """It is of its own step; the next one, and the end of the run, wait for it."""
    settings: dict[str, Any] = {"dropout": 0.5, "epochs": 2, "checkpoint_every": 3}
    settings["keep_checkpoints"] = 9
    straight = new_run("straight", **settings).trained()
    slow = Slow(monkeypatch)
    run = new_run("slow", **settings, plugins=[slow]).trained()
    assert slow.said.index("step 5") < slow.said.index("written 3") < slow.said.index("written 6")
    saved = [said for said in slow.said if said.startswith("saved")]
    assert saved == ["saved 3", "saved 6", "saved 8"]
    for step, name in itertools.product((3, 6, 8), FILES[:2]):
        assert same(*(load_file(folder(one, step) / name) for one in (run, straight)))


def test_a_checkpoint_is_whole_though_the_run_fails_meanwhile(
    new_run: NewRun, monkeypatch: Patch
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
    assert run.last().step == 3


def test_only_the_newest_are_kept_and_torn_ones_do_not_count(run: Run, new_run: NewRun) -> None:
    (folder(run, 3) / MARK).unlink()
    new_run(dropout=0.5, checkpoint_every=1, epochs=2, keep_checkpoints=3).train()
    assert steps(run) == [6, 7, 8]


def test_the_best_step_of_the_same_held_out_rows_is_kept_with_the_newest(new_run: NewRun) -> None:
    """Of those that are saved and evaluated; a resumed run knows it, and forgets one that is gone."""
    losses = [math.inf, 3.0, 1.0, 0.5, 0.1, 2.0, 1.5, math.nan, 1.5, 8.0, 9.0, 9.0, 8.5]

    def train(epochs: int, **settings: Any) -> tuple[list[int], Any]:
        evaluate = lambda built, context: {"loss": losses[context.step]}  # noqa: E731
        often = {"checkpoint_every": 1, "eval_every": 1, "keep_checkpoints": 1, **settings}
        run = new_run(epochs=epochs, evaluate=evaluate, **often).trained()
        return steps(run), best(run.folder / "checkpoints").get("step")

    assert train(1, eval_every=2, checkpoint_every=3) == ([4], "step-00000004")
    (new_run().folder / "run.json").unlink()
    shutil.rmtree(new_run().folder / "checkpoints")
    assert train(1, max_steps=2) == ([1, 2], "step-00000002")  # rotated before it was known
    losses[3:5] = 1.0, 2.0
    assert train(2) == ([2, 8], "step-00000002")
    assert train(3, max_steps=9, held_out="others") == ([2, 9], "step-00000009")
    assert train(3, held_out="others") == ([9, 12], "step-00000009")
    shutil.rmtree(folder(new_run(), 9))
    assert best(new_run().folder / "checkpoints") == {}


def test_where_prompts_are_decoded_the_longest_acceptance_is_best(new_run: NewRun) -> None:
    """Before any was, that is the lowest loss."""

    def train(**settings: Any) -> Any:
        found = lambda _, at: {"loss": at.step, "acceptance_length": [2, 3, 1, 1.5][at.step % 4]}  # noqa: E731
        run = new_run(evaluate=found, checkpoint_every=1, eval_every=1, **settings).trained()
        return best(run.folder / "checkpoints")

    named = train(max_steps=2, eval_prompts=0)
    assert (named["step"], named["loss"]) == ("step-00000001", 1)
    assert train()["step"] == "step-00000004"
    assert train(epochs=2)["acceptance_length"] == 3


def test_a_run_goes_on_in_the_precision_that_it_began_with(new_run: NewRun) -> None:
    assert new_run().build().trainers[0].precision == "fp32"  # on a CPU
    new_run(precision="bf16", max_steps=2).train()
    assert new_run().build().trainers[0].precision == "bf16"


def test_a_full_disk_leaves_no_half_checkpoint(
    run: Run, new_run: NewRun, monkeypatch: Patch
) -> None:
    def full(tensors: dict[str, Tensor], file: Path) -> None:
        if file.name == FILES[1]:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, file)

    monkeypatch.setattr("draftcore.training.checkpoint.save_file", full)
    with pytest.raises(DraftcoreError, match="No space left on device\n  earlier checkpoints"):
        new_run(dropout=0.5, epochs=2).train()
    assert sorted((run.folder / "checkpoints").iterdir()) == [folder(run, 3), folder(run, 4)]
    assert run.last().step == 4
