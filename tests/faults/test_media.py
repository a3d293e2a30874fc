"""Stores and channels that are full, torn or altered, and producers that send nonsense."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftcore_sdk.targets import tiny_target

MakeRun = Callable[..., Any]
CHANNELS = {"sqlite": "sqlite:{}/channel.db?ttl=2", "dir": "dir:{}/channel?ttl=2"}
ONE = {"producers": 1, "restarts": 40}


@pytest.mark.parametrize("channel", [pytest.param("sqlite", marks=pytest.mark.long), "dir"])
def test_what_is_torn_doubled_altered_or_does_not_fit_is_done_again(
    make_run: MakeRun, undisturbed: dict[int, float], channel: str
) -> None:
    run = make_run(channel=CHANNELS[channel])
    faults = ["twice:publish@2", "flip:published@3", "full:publish@4", "full:advance@3"]
    faults += ["torn:publish@5"] if channel == "dir" else []
    run.faults = " ".join(faults)
    said = run.finish(code=1)
    assert "cannot be written" in said
    assert "free space on its disk" in said
    run.finish()
    assert len(list(run.marks.iterdir())) == len(faults)
    run.require_done()
    assert run.losses() == undisturbed


def test_a_store_that_is_too_small_for_the_data_is_used_again_and_again(
    make_run: MakeRun, undisturbed: dict[int, float]
) -> None:
    run = make_run(store="shm:{}/ring?max_bytes=400KiB", topology={"producers": 2})
    run.finish()
    assert not (run.folder / "ring").exists()
    run.require_done()
    assert run.losses() == undisturbed


def test_a_store_that_cannot_hold_one_step_is_refused_in_words(make_run: MakeRun) -> None:
    run = make_run(store="shm:{}/ring?max_bytes=60KiB", capture={"batch": 1}, topology=ONE)
    assert "raise max_bytes in the store's URI" in run.finish(code=1)


def test_samples_that_cannot_be_captured_are_given_up_and_all_others_are_not(
    make_run: MakeRun,
) -> None:
    """A capture that raises says nothing of the other samples of its group, nor does one that is not
    finite; all else names one.
    """
    run = make_run(channel="sqlite:{}/channel.db?ttl=20&attempts=2", topology=ONE)
    run.faults = "raise:q7? nan:q13? narrow:q9? lacking:q11?"
    said = run.finish()
    reasons = list(run.state()["given_up"].values())
    unused = frozenset(row for row, uses in run.uses().items() if not uses)
    assert unused > {7, 9, 11, 13}
    assert said.count("is given up") == len(reasons) == len(unused) == 10
    for words, samples in (
        ("no capture of q7?", 4),
        ("holds inf or nan", 4),
        ("has hidden.1 of shape", 1),
        ("lacks last_hidden", 1),
    ):
        assert sum(words in reason for reason in reasons) == samples
    run.require_done(without=unused)


def test_a_gradient_that_is_not_finite_ends_the_run_naming_the_row(make_run: MakeRun) -> None:
    """Before it changes the weights; the features were finite, and too large for the draft."""
    run = make_run(channel=CHANNELS["sqlite"], train={"max_steps": 12}, topology=ONE)
    run.faults = "huge:q13?"
    said = run.finish(code=1)
    assert "is not finite; the weights were not changed" in said
    assert "from: row 13 (sample " in said


def test_a_producer_with_another_target_is_turned_away(
    make_run: MakeRun, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    other = tiny_target(tmp_path / "other", seed=1)
    run = make_run(channel=CHANNELS["sqlite"], topology={"producers": 0})
    trainer = run.start("--role", "trainer")
    stranger = run.start("--role", "producer", f"target.path={other}")
    assert run.wait(stranger) == 1
    assert "features captured here are not what the trainer trains on" in run.output()
    producer = run.start("--role", "producer")
    assert run.wait(trainer) == 0
    assert run.wait(producer) == 0
    run.require_done()
    assert run.losses() == undisturbed
