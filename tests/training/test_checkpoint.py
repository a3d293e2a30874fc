"""Checkpoints: whole or not there, named where they are damaged, and restored to the bit."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftcore.errors import DraftcoreError, UsageError
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


def test_a_checkpoint_without_its_mark_does_not_exist(run: Run) -> None:
    """It was being written when its process was killed."""
    (folder(run, 4) / MARK).unlink()
    found = latest(run.folder / "checkpoints")
    assert found is not None
    assert found.step == 3
    with pytest.raises(UsageError, match=f"is not complete\n.*{MARK}"):
        open_checkpoint(folder(run, 4))
    (folder(run, 3) / MARK).unlink()
    assert latest(run.folder / "checkpoints") is None


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    assert latest(tmp_path) is None
    with pytest.raises(UsageError, match="is no checkpoint"):
        open_checkpoint(tmp_path)


def test_what_a_killed_process_left_is_replaced(run: Run, new_run: NewRun) -> None:
    """Of the step's folder without a mark, and of the one under another name."""
    wanted = {name: (folder(run, 4) / name).read_bytes() for name in FILES}
    (folder(run, 4) / MARK).unlink()
    (folder(run, 4) / "draft.safetensors").write_bytes(b"torn")
    aside = run.folder / "checkpoints/.step-00000004.tmp"
    aside.mkdir()
    (aside / "draft.safetensors").write_bytes(b"torn too")
    new_run(dropout=0.5, checkpoint_every=1).train()
    assert {name: (folder(run, 4) / name).read_bytes() for name in FILES} == wanted
    assert open_checkpoint(folder(run, 4)).step == 4
    assert not aside.exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_torn_file_is_named_with_a_remedy(
    run: Run, new_run: NewRun, name: str, kept: float
) -> None:
    file = folder(run, 4) / name
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(DraftcoreError) as caught:
        new_run(dropout=0.5).build()
    assert str(file) in str(caught.value)
    assert "delete its folder to go on from the checkpoint before" in str(caught.value)
    for one in folder(run, 4).iterdir():
        one.unlink()
    folder(run, 4).rmdir()
    assert new_run(dropout=0.5).build().trainers[0].step == 3


@pytest.mark.parametrize("name", FILES[:2])
def test_a_file_that_is_missing_is_named(run: Run, new_run: NewRun, name: str) -> None:
    (folder(run, 4) / name).unlink()
    with pytest.raises(DraftcoreError, match=name):
        new_run(dropout=0.5).build()


@pytest.mark.parametrize("text", ["[]", "7", "null", '"step"'])
def test_a_state_that_is_none_is_named(run: Run, text: str) -> None:
    (folder(run, 4) / "state.json").write_text(text)
    with pytest.raises(DraftcoreError, match=r"state\.json"):
        open_checkpoint(folder(run, 4))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("at", [0.3, 0.7, 0.999])
def test_a_bit_that_flipped_in_a_file_is_noticed(
    run: Run, new_run: NewRun, name: str, at: float
) -> None:
    file = folder(run, 4) / name
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 1
    file.write_bytes(data)
    with pytest.raises(DraftcoreError) as caught:
        new_run(dropout=0.5).build()
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(("mark", "said"), [('{"format": 99}', "99"), ("", "first edition")])
def test_a_checkpoint_of_another_format_is_refused_with_a_remedy(
    run: Run, mark: str, said: str
) -> None:
    (folder(run, 4) / MARK).write_text(mark)
    with pytest.raises(UsageError, match=rf"has the format .*{said}.*\n  go on with the version"):
        latest(run.folder / "checkpoints")


@pytest.mark.parametrize("mark", ["[]", "7", '{"form', "null"])
def test_a_mark_that_is_none_is_named(run: Run, mark: str) -> None:
    (folder(run, 4) / MARK).write_text(mark)
    with pytest.raises(DraftcoreError, match=MARK):
        latest(run.folder / "checkpoints")


def test_a_checkpoint_of_another_draft_names_what_does_not_fit(run: Run, new_run: NewRun) -> None:
    again = new_run(dropout=0.5)
    draft, found = again.draft(), again.found()
    assert found is not None
    draft.module.first = torch.nn.Linear(4, 5)
    before = {name: t.clone() for name, t in draft.module.state_dict().items()}
    with pytest.raises(UsageError, match=r"does not fit the configured draft: first\.") as caught:
        found.load_draft(draft)
    assert "second.weight" not in str(caught.value)
    after = draft.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_is_the_targets_is_not_in_a_checkpoint(run: Run) -> None:
    weights = load_file(folder(run, 4) / "draft.safetensors")
    assert "head" not in weights
    assert torch.equal(weights["first.bias"], weights["second.bias"]), "one weight of two names"


# ---------------------------------------------------------------- to the bit


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_stopped(
    new_run: NewRun, dropout: float
) -> None:
    """Weights, moments and random numbers; and the number of steps of the optimizer."""
    settings: dict[str, Any] = {"dropout": dropout, "epochs": 3, "weight_decay": 0.1}
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


def test_moments_come_back_to_the_bit_and_where_the_optimizer_looks_for_them(
    run: Run, new_run: NewRun
) -> None:
    again = new_run(dropout=0.5).build()
    assert again.moments()
    for ours, theirs in zip(again.moments(), run.moments(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(
        again.trainers[0].random.tensors["rng.cpu"], run.trainers[0].random.tensors["rng.cpu"]
    )
    steps = {float(state["step"]) for state in again.trainers[0].optimizer.state.values()}
    assert steps == {4.0}


def test_a_checkpoint_that_is_saved_again_is_whole(run: Run) -> None:
    trainer = run.trainers[0]
    before = (folder(run, 4) / "draft.safetensors").read_bytes()
    trainer.saved_step = -1
    trainer.save()
    assert (folder(run, 4) / "draft.safetensors").read_bytes() == before
    found = latest(run.folder / "checkpoints")
    assert found is not None
    assert found.step == 4


# ---------------------------------------------------------------- writing


def test_only_the_newest_are_kept_and_torn_ones_do_not_count(run: Run, new_run: NewRun) -> None:
    (folder(run, 3) / MARK).unlink()
    more = new_run(dropout=0.5, checkpoint_every=1, epochs=2)
    more.train()
    kept = {p.name for p in (run.folder / "checkpoints").glob("step-*") if (p / MARK).exists()}
    assert kept == {"step-00000007", "step-00000008"}


@pytest.mark.parametrize("at", [0, 1])
def test_a_full_disk_leaves_the_checkpoints_before_and_no_half_one(
    run: Run, new_run: NewRun, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    written, write = [0], save_file

    def full(*args: Any, **kwargs: Any) -> None:
        written[0] += 1
        if written[0] > at:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args, **kwargs)

    monkeypatch.setattr("draftcore.training.checkpoint.save_file", full)
    more = new_run(dropout=0.5, epochs=2)
    with pytest.raises(DraftcoreError, match="No space left on device\n  earlier checkpoints"):
        more.train()
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]
    found = latest(run.folder / "checkpoints")
    assert found is not None
    assert found.step == 4


def test_a_folder_that_cannot_be_written_is_named(new_run: NewRun) -> None:
    run = new_run().build()
    (run.folder / "checkpoints").write_text("in the way")
    with pytest.raises(DraftcoreError, match="cannot write checkpoint"):
        run.train()
