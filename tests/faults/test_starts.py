"""Who takes part in a run, what it does with what is full, torn or altered, and what must not end well."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftcore_sdk.targets import tiny_target

Make = Callable[..., Any]
FAULTS = "twice:publish@2 cut:publish@3 deaf:publish@4 flip:published@3 torn:publish@5"


def test_two_runs_of_one_folder_do_no_harm(make_run: Make, undisturbed: Any) -> None:
    """The second one is refused; the first one's producers find its queue as before."""
    run = make_run(producers=2)
    first = run.start()
    run.until(lambda: run.steps() >= 2, first)
    (trainer,), producers = run.trainers(), run.producers()
    run.kill(trainer, number=signal.SIGSTOP)
    said = run.finish(code=1)
    assert f"process {trainer} on" in said
    assert "wait for it to end, or set another run folder" in said
    run.kill(*producers)
    run.kill(trainer, number=signal.SIGCONT)
    assert run.wait(first) == 0, run.output()
    run.require_done(undisturbed)


def test_a_producer_needs_the_target_and_neither_data_nor_the_runs_folder(
    make_run: Make, tmp_path: Path, undisturbed: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with another target is turned away."""
    monkeypatch.setenv("DRAFTCORE_SECRET", "known to both machines")
    other = tiny_target(tmp_path / "other", seed=1)
    run = make_run(channel=f"tcp://127.0.0.1:{port}")
    trainer = run.start("--trainer")
    stranger = run.start(f"target.path={other}", verb="produce")
    assert run.wait(stranger) == 2
    assert "features captured here are not what the trainer trains on" in run.output()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    place = [f"run={elsewhere}/run", f"data.train={elsewhere}/no.jsonl"]
    producer = run.start(*place, verb="produce")
    assert run.wait(trainer) == 0
    assert run.wait(producer) == 0
    assert not list(elsewhere.rglob("*"))
    run.require_done(undisturbed)


@pytest.mark.parametrize("producers", [0, 1])
def test_a_target_that_the_capture_refuses_ends_the_run(
    make_run: Make, tmp_path: Path, producers: int
) -> None:
    run = make_run(producers=producers)
    said = run.finish(f"target.path={tiny_target(tmp_path / 'streams', 'gemma3n_text')}", code=2)
    assert "gives states of shape" in said
    run.require_nothing_trained()


def test_a_capture_without_its_server_ends_the_run_with_that(make_run: Make, port: int) -> None:
    options = {"servers": [f"http://127.0.0.1:{port}"], "patience": 1, "self_test": False}
    run = make_run(producers=1, capture={"name": "sglang-server", "options": options})
    assert f"sglang server http://127.0.0.1:{port} does not answer" in run.finish(code=2)
    run.require_nothing_trained()


def test_weights_that_are_not_finite_are_no_draft(make_run: Make) -> None:
    run = make_run()
    diverges = ("train.lr=100", "train.weight_decay=100", "train.checkpoint_every=500")
    assert "the weights have diverged" in run.finish(*diverges, code=1)
    run.require_nothing_trained()


def test_what_is_torn_doubled_altered_or_cut_is_done_again(
    make_run: Make, undisturbed: Any
) -> None:
    """Also where the store is too small for the data, and used again and again."""
    run = make_run(producers=2, store="file:{}/memory?volatile=yes&max_bytes=400KiB")
    run.faults = f"{FAULTS} full:checkpoint"
    said = run.finish(code=1)
    assert "cannot write checkpoint" in said
    assert "free space and run the same command to go on" in said
    assert "resuming from" not in run.finish()
    assert len(list(run.marks.iterdir())) == len(run.faults.split())
    assert not (run.folder / "memory").exists()
    run.require_done(undisturbed)


def test_a_store_that_cannot_hold_one_batch_is_refused_in_words(make_run: Make) -> None:
    run = make_run(store="file:{}/memory?volatile=yes&max_bytes=60KiB", producers=1)
    assert "raise max_bytes in its URI" in run.finish(code=2)


def test_rows_that_cannot_be_captured_are_skipped_and_all_others_are_not(make_run: Make) -> None:
    """A capture that raises says nothing of the other rows of its batch; what it returns names its row.

    And a batch that the disk below the store does not take is put again.
    """
    run = make_run(producers=1, data={"max_skipped": 1.0}, store="file:{}/features")
    run.faults = "raise:q7? nan:q13? narrow:q9? lacking:q11? full:put@3"
    said = run.finish()
    assert "was not captured: cannot write to the store" in said
    reasons = dict(run.state()["skipped"])
    unused = frozenset(row for row, uses in run.uses().items() if not uses)
    assert unused > {7, 9, 11, 13}
    assert said.count(" is skipped: ") == len(reasons) == len(unused)
    assert f"{len(unused)} rows were skipped: " in said
    other = "yielded 'hidden.1' of (", "yielded 'last_hidden' of None", "holds inf or nan"
    for words, rows in (("no capture of q7?", 4), *((words, 1) for words in other)):
        assert sum(words in reason for reason in reasons.values()) == rows
    run.require_done(without=unused)
