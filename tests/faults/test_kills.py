"""kill -9, freezing, Ctrl-C, and long runs: nothing is lost, nothing done twice, nothing left behind."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., Any]
PRODUCER = ["claimed@2", "captured@2", "put@2", "published@2", "reported@2"]
QUEUE = ["handed@4", "taken@3"]
TRAINER = ["leased@3", "midstep@5", "stepped@3", "written", "unmarked", "freeing@2", "freed@2"]
POINTS = [*PRODUCER, *QUEUE, *TRAINER]
SLACK = 8 << 20  # bytes; 150 steps that kept their features would hold 15 MB more


def test_a_process_may_be_killed_at_any_named_point(make_run: Make, undisturbed: Any) -> None:
    run = make_run(producers=2, faults=" ".join(f"kill:{point}" for point in POINTS))
    run.finish()
    assert {mark.name for mark in run.marks.iterdir()} == {f"kill-{point}" for point in POINTS}
    run.require_done(undisturbed)


@pytest.mark.long
def test_who_captures_with_a_shared_target_starts_again_as_a_whole(make_run: Make) -> None:
    """One of those that hold a part of the target is killed; whoever waits for it goes, too."""
    pytest.importorskip("accelerate")
    shared = {"target": {"tensor_parallel": 2}}
    (alone := make_run(**shared)).finish()
    run = make_run(producers=1, **shared, faults="pace:0.05")
    launcher = run.start()
    run.until(lambda: run.steps() >= 1, launcher)
    (*_, part) = (pid for pid in run.descendants() if "spawn_main" in run.command(pid))
    (producer,) = run.producers()
    run.kill(part)
    run.until(lambda: set(run.producers()) - {producer}, launcher)
    assert not set(run.processes()) & {producer}
    assert run.wait(launcher) == 0, run.output()
    assert "which 2 devices share, has ended" in run.output()
    run.require_done(alone.losses())


@pytest.mark.long
def test_sharded_ranks_may_be_killed_while_a_checkpoint_is_written(make_run: Make) -> None:
    """Training is a step ahead then; the ranks go on from the checkpoint before, to the same bits."""
    changes: dict[str, Any] = {"topology": {"ranks": 2}, "train": {"accumulate": 2, "shard": True}}
    (alone := make_run(**changes)).finish()
    run = make_run(**changes, faults="kill:written@2 kill:unmarked@2")
    run.finish()
    assert {mark.name for mark in run.marks.iterdir()} == {"kill-written@2", "kill-unmarked@2"}
    run.require_done(alone.losses())


def test_the_same_command_goes_on_whatever_ended_it(make_run: Make, undisturbed: Any) -> None:
    run = make_run(producers=1, faults="pace:0.2")
    launcher = run.start()
    run.until(lambda: run.steps() >= 3, launcher)
    launcher.kill()
    launcher.wait()
    run.until(lambda: not run.processes())  # its children went with it

    launcher = run.start()
    run.until(lambda: run.steps() >= 8, launcher)
    run.kill(*run.processes())
    launcher.wait()

    launcher = run.start()
    run.until(lambda: run.steps() >= 13, launcher)
    launcher.send_signal(signal.SIGINT)
    assert run.wait(launcher) == 130
    assert "interrupted: step" in run.output()
    run.until(lambda: not run.processes())
    assert run.state()["step"] >= 13

    run.faults = ""
    assert "resuming from step" in run.finish("topology.producers=2")
    run.require_done(undisturbed)


def test_processes_may_freeze_for_longer_than_others_wait(make_run: Make, undisturbed: Any) -> None:
    run = make_run(producers=2)
    points = ["captured@2", "published@3", "midstep@4"]
    run.faults = "ttl:2 pace:0.3 " + " ".join(f"freeze:{point}" for point in points)
    launcher = run.start()
    waiting = {point.partition("@")[0] for point in points}
    while waiting:
        frozen = run.until(lambda: [p for p in waiting if (run.marks / f"frozen-{p}").exists()])
        time.sleep(3)
        for point in frozen:
            os.kill(int((run.marks / f"frozen-{point}").read_text()), signal.SIGCONT)
            waiting.remove(point)
    assert run.wait(launcher) == 0, run.output()
    run.require_done(undisturbed)


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def test_the_memory_of_no_process_grows_with_the_steps(make_run: Make) -> None:
    run = make_run(producers=1, train={"epochs": 20})
    launcher = run.start()
    run.until(lambda: run.steps() >= 80, launcher)
    before = {pid: resident(pid) for pid in run.processes()}
    run.until(lambda: run.steps() >= 230, launcher)
    grown = {pid: resident(pid) - size for pid, size in before.items()}
    assert len(grown) == 3
    assert run.wait(launcher) == 0
    assert max(grown.values()) < SLACK, grown
    assert set(run.uses().values()) == {20}
    run.require_clean()
