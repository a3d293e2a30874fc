"""Who may take part in a run, and runs that must not end well: done means done."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftcore_sdk.targets import tiny_target

MakeRun = Callable[..., Any]


def test_two_runs_of_one_folder_do_not_harm_each_other(
    make_run: MakeRun, undisturbed: dict[int, float]
) -> None:
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
    make_run: MakeRun,
    tmp_path: Path,
    undisturbed: dict[int, float],
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One with another target is turned away."""
    monkeypatch.setenv("DRAFTCORE_SECRET", "known to both machines")
    other = tiny_target(tmp_path / "other", seed=1)
    run = make_run(channel=f"tcp://127.0.0.1:{port}")
    trainer = run.start("--trainer")
    stranger = run.start(f"target.path={other}", verb="produce")
    assert run.wait(stranger) == 2
    assert "features captured here are not what the trainer trains on" in run.output()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = [f"run={elsewhere}/run", f"data.train={elsewhere}/no.jsonl"]
    producer = run.start(*place, verb="produce")
    assert run.wait(trainer) == 0
    assert run.wait(producer) == 0
    assert not list(elsewhere.rglob("*"))
    run.require_done(undisturbed)


@pytest.mark.parametrize("producers", [0, 1])
def test_a_target_that_the_captures_own_check_refuses_ends_the_run_with_that_error(
    make_run: MakeRun, tmp_path: Path, producers: int
) -> None:
    run = make_run(producers=producers)
    said = run.finish(f"target.path={tiny_target(tmp_path / 'streams', 'gemma3n_text')}", code=2)
    assert "gives states of shape" in said
    run.require_nothing_trained()


def test_a_capture_without_its_server_ends_the_run_with_that_error(
    make_run: MakeRun, port: int
) -> None:
    options = {"servers": [f"http://127.0.0.1:{port}"], "patience": 1, "self_test": False}
    run = make_run(producers=1, capture={"name": "sglang-server", "options": options})
    assert f"sglang server http://127.0.0.1:{port} does not answer" in run.finish(code=2)
    run.require_nothing_trained()


def test_weights_that_are_not_finite_are_no_draft(make_run: MakeRun) -> None:
    run = make_run()
    diverges = ("train.lr=100", "train.weight_decay=100", "train.checkpoint_every=500")
    assert "the weights have diverged" in run.finish(*diverges, code=1)
    run.require_nothing_trained()
