"""Stores, disks and channels that are full, torn or altered, and processes that send nonsense."""

from collections.abc import Callable
from typing import Any

MakeRun = Callable[..., Any]
FAULTS = "twice:publish@2 cut:publish@3 deaf:publish@4 flip:published@3 torn:publish@5"


def test_what_is_torn_doubled_altered_cut_or_does_not_fit_is_done_again(
    make_run: MakeRun, undisturbed: dict[int, float]
) -> None:
    """Also where the store is too small for the data, and used again and again."""
    run = make_run(producers=2, store="shm:{}/ring?max_bytes=400KiB")
    run.faults = f"{FAULTS} full:checkpoint"
    said = run.finish(code=1)
    assert "cannot write checkpoint" in said
    assert "free space and run the same command to go on" in said
    assert "resuming from" not in run.finish()
    assert len(list(run.marks.iterdir())) == len(run.faults.split())
    assert not (run.folder / "ring").exists()
    run.require_done(undisturbed)


def test_a_store_that_cannot_hold_one_batch_is_refused_in_words(make_run: MakeRun) -> None:
    run = make_run(store="shm:{}/ring?max_bytes=60KiB", producers=1)
    assert "raise max_bytes in its URI" in run.finish(code=2)


def test_rows_that_cannot_be_captured_are_skipped_and_all_others_are_not(make_run: MakeRun) -> None:
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
    for words, rows in (
        ("no capture of q7?", 4),
        ("holds inf or nan", 1),
        ("yielded 'hidden.1' of (", 1),
        ("yielded 'last_hidden' of None", 1),
    ):
        assert sum(words in reason for reason in reasons.values()) == rows
    run.require_done(without=unused)


def test_more_rows_that_cannot_be_captured_than_may_be_skipped_end_the_run(
    make_run: MakeRun,
) -> None:
    run = make_run(producers=1)
    run.faults = "nan:q1"
    said = run.finish(code=1)
    assert "rows cannot be trained on, and 1 may be skipped" in said
    assert "raise data.max_skipped" in said
