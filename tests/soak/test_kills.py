"""Processes that are killed, frozen or asked to end at random moments: the bits are the same."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.drills import Drill
from tests.faults.conftest import Run

ROUNDS = 4  # of faults in a run
RANKS: dict[str, Any] = {"topology": {"ranks": 2}, "train": {"accumulate": 2}}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process, store file": {"store": "file:{}/features"},
    "producers, memory and tcp": {"producers": 2},
    "producers, volatile and dir": {
        "producers": 2, "channel": "dir:{}/channel", "store": "file:{}/features?volatile=yes",
    },
    "a producer, store file": {"producers": 1, "store": "file:{}/features"},
    "producers, Mooncake": {"producers": 2, "store": "mooncake://?max_bytes=32MiB"},
    "two ranks": RANKS,
    "two ranks, a producer": {"producers": 1, **RANKS},
}  # fmt: skip


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Any:
    """Return the losses of such a run with nothing in its way; ranks add up in another order."""

    @cache
    def losses(ranks: bool) -> dict[int, float]:
        run = Run(tmp_path_factory.mktemp("undisturbed"), target_folder, **(RANKS if ranks else {}))
        run.finish()
        return run.losses()

    return losses


def disturb(run: Run, dice: random.Random) -> Iterator[str]:
    """Do something to a run's processes, a master of its store among them; say what, each time."""
    launcher = run.start()
    for _ in range(ROUNDS):
        time.sleep(dice.uniform(0.2, 5))
        if launcher.poll() == 0:
            break
        if launcher.returncode is not None:  # the same command again
            run.until(lambda: not run.processes())
            launcher = run.start()
            time.sleep(dice.uniform(0.2, 5))
        masters = [pid for pid in run.descendants() if "mooncake_master" in run.command(pid)]
        victim = dice.choice([*run.processes(), *masters] or [launcher.pid])
        how = dice.choice(["kill", "kill", "freeze", "ask"])
        yield f"{how} {run.command(victim)[-60:]!r} at step {run.steps()}"
        if how == "freeze":
            run.freeze(victim, seconds=3)
        elif how == "ask":
            run.kill(victim, number=dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
        else:
            run.kill(victim)
            time.sleep(0.5)
    if run.wait(launcher) != 0:
        run.until(lambda: not run.processes())
        run.finish()


@pytest.mark.long
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_whatever_befalls_processes_the_same_command_goes_on_to_the_same_bits(
    make_run: Callable[..., Run], undisturbed: Any, drill: Drill, topology: str
) -> None:
    changes = TOPOLOGIES[topology]
    if "Mooncake" in topology and not find_spec("mooncake"):
        pytest.skip("needs Mooncake")
    losses = undisturbed("ranks" in topology)
    cases = drill.draw(f"kills, freezes, signals: {topology}", seconds=900)
    for case in drill.judge(cases, good=("recovered",)):
        run, case.times = make_run(**changes), 0
        run.faults = f"ttl:2 pace:{1 if 'ranks' in topology else 0.4}"
        with case:
            for said in disturb(run, case.dice):
                case.shown, case.times = f"{case.shown}\n{said}", case.times + 1
            run.require_done(losses)
            if "Traceback" in run.output():
                case.outcome, case.shown = "traceback", f"{case.shown}\n{run.output()}"
