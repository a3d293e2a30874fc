"""Machines of a Ray cluster are switched off, frozen and hidden from it, and the command is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LONG = 500.0  # seconds on a busy machine
ROUNDS = 3  # of faults in a run
PATIENCE = 15.0  # seconds; a machine that is silent for longer counts as lost
Calm = dict[int, float]  # the losses of a run that nothing befell


@pytest.fixture
def make(make_run: Callable[..., Any]) -> Callable[..., Any]:
    """Make a run of two ranks on machines with `train` and a producer on one with `capture`."""

    def start(address: str, patience: float = PATIENCE) -> Any:
        places = {"rank": {"resources": {"train": 1}}, "producer": {"resources": {"capture": 1}}}
        options = {"address": address, "patience": patience, **places}
        return make_run(launcher="ray", ranks=2, producers=1, restarts=40, options=options)

    return start


@pytest.fixture
def run(make: Callable[..., Any], machines: Any) -> Any:
    return make(machines.address)


def test_the_weights_are_the_same_to_the_bit_whichever_machines_are_lost(
    machines: Any, run: Any, calm: Calm
) -> None:
    """First one of the producer is switched off, for another; then one of two with a rank.

    The producer yields its room to the rank, and goes on once a machine comes.
    """
    capture, train = machines.add(capture=1), machines.add(train=1)
    machines.add(train=1)
    process = run.start("topology.options.rank.cpus=4")  # of a machine's four
    run.until(lambda: run.steps() >= 3, process)
    machines.add(capture=1, train=1)
    machines.lose(capture)
    run.until(lambda: run.steps() >= 8, process)
    machines.lose(train)
    run.until(lambda: "producer 0 waits for a machine with room" in run.output(), process)
    machines.add(capture=1)
    run.require_calm(process, calm)
    assert "room for 1 of 2 ranks" not in run.output()


@pytest.mark.long
def test_fewer_ranks_go_on_where_a_lost_machine_leaves_no_room_for_all(
    machines: Any, run: Any, calm: Calm
) -> None:
    machines.add(train=1, capture=1)
    lost = machines.add(train=1)
    process = run.start()
    run.until(lambda: run.steps() >= 9, process)
    machines.lose(lost)
    run.require_calm(process, pytest.approx(calm, rel=1e-5))  # sums of two ranks and of one
    assert "room for 1 of 2 ranks" in run.output()
    assert "resuming from step" in run.output()


@pytest.mark.long
def test_a_frozen_machine_that_thaws_when_others_took_its_place_changes_no_bit(
    machines: Any, run: Any, calm: Calm
) -> None:
    """Both ranks are on it, and hold the run's folder until it thaws and they are ended."""
    frozen = machines.add(train=2, capture=1)
    process = run.start()
    run.until(lambda: run.steps() >= 5, process)
    machines.add(train=2, capture=1)
    machines.freeze(frozen)
    run.until(lambda: "still trains in the run's folder" in run.output(), process)
    machines.thaw(frozen)
    run.require_calm(process, calm)


@pytest.mark.long
def test_a_machine_that_the_cluster_lost_sight_of_trains_no_further(
    machines: Any, run: Any, calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own daemon is frozen, so Ray declares the machine dead while the ranks there go on."""
    monkeypatch.setenv("FAULTS", "pace:1")  # for long enough
    hidden = machines.add(train=2, capture=1)
    monkeypatch.setenv("FAULTS", "pace:0.25")
    process = run.start()
    run.until(lambda: run.steps() >= 3, process)
    before = {*run.processes()} - {process.pid}
    machines.add(train=2, capture=1)
    machines.hide(hidden)
    run.until(lambda: not before & {*run.processes()}, process)
    assert run.steps() < len(calm)
    run.require_calm(process, calm)


@pytest.mark.long
def test_the_same_command_goes_on_whatever_ended_it_and_leaves_nothing_behind(
    machines: Any, run: Any, calm: Calm
) -> None:
    machines.add(train=2, capture=1)
    for number, status in ((9, -9), (signal.SIGHUP, 130), (signal.SIGTERM, 130)):
        reached = run.steps()
        process = run.start()
        run.until(lambda reached=reached: run.steps() >= reached + 3, process)
        process.send_signal(number)
        assert process.wait(LONG) == status, run.output()
        run.until(lambda: not run.processes())
        assert run.checkpoint() > reached, "the ranks did not save what they had trained"
    run.require_calm(run.start(), calm)


@pytest.mark.long
@pytest.mark.parametrize("size", ["two", "three"])
def test_the_weights_are_the_same_whatever_befalls_machines_at_random_moments(
    machines: Any, make: Callable[..., Any], calm: Calm, drill: Any, size: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each gets a successor when it is switched off, frozen for a while, or hidden from Ray."""
    monkeypatch.setenv("FAULTS", "pace:0.6")
    kinds: list[dict[str, float]] = [{"train": 2 if size == "two" else 1}, {"capture": 1}]
    kinds += [{"train": 1}] if size == "three" else []
    cases = drill.draw(f"machines of Ray lost, frozen, hidden: {size}", seconds=5 * LONG)
    for case in drill.judge(cases, good=("recovered",)):
        run = make(machines.address)
        nodes, told, case.times = [(machines.add(**kind), kind) for kind in kinds], list[str](), 0
        with case:
            process = run.start()
            run.until(lambda run=run: run.steps() >= 1, process)
            while case.times < ROUNDS:
                time.sleep(case.dice.uniform(0, 8))
                if process.poll() is not None:
                    break
                node, kind = nodes.pop(case.dice.randrange(len(nodes)))
                how = case.dice.choice([machines.lose, machines.freeze, machines.hide])
                told.append(f"{how.__name__} a machine with {kind} at step {run.steps()}")
                case.shown, case.times = "\n".join(told), len(told)
                nodes.append((machines.add(**kind), kind))
                how(node)
                time.sleep(case.dice.uniform(0, 2 * PATIENCE))
                if how == machines.freeze:
                    machines.thaw(node)
            run.require_calm(process, calm, 2 * LONG)
            if "Traceback" in run.output():
                case.outcome, case.shown = "traceback", [*told, run.output()]


@pytest.mark.long
def test_a_machine_whose_network_is_cut_trains_no_further(
    make: Callable[..., Any], calm: Calm
) -> None:
    """It saves, stops, and another goes on from there. Networks are the kernel's own."""
    spaces = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*spaces, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user cannot have networks of its own")
    run, script = make("10.77.0.1:6399", 40.0), Path(__file__).with_name("cut_off.sh")
    command = [*spaces, "bash", script, sys.executable, run.folder, *run.line()]
    process = subprocess.Popen(command, env={**os.environ, "FAULTS": "pace:0.25"})
    run.until(lambda: run.steps() >= 3, process)
    before = {*run.processes()}
    (run.folder / "cut").touch()
    run.require_calm(process, calm, 2 * LONG)
    assert "resuming from step" in run.output()
    assert not before & {*run.processes()}
