"""What every launcher must do. See `draftcore_sdk` for how to use it.

A launcher is tried with processes that take milliseconds and say in files what they met. A subclass
sets `plugin`, and `options` where the launcher needs some, such as the address of a cluster.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from draftcore_disagg.launcher import Job, Launcher

from draftcore.errors import DraftcoreError, ExitStatus, UsageError
from draftcore_sdk.suite import Suite, slow

SOON = 300.0  # seconds within which it comes on a busy machine
# A process of the job: `role`, `rank`, `note(name)` leaves a file, `count(name)` says how many did.
TOOLS = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
role = "producer" if "produce" in sys.argv[2:] else "trainer"
rank = os.environ.get("RANK", "0")
def note(name, text=""):
    (here / f"{name}-{os.getpid()}").write_text(text)
def count(name):
    return len(list(here.glob(f"{name}-*")))
def until(holds):
    deadline = time.monotonic() + SOON
    while not holds():
        if time.monotonic() > deadline:
            sys.exit(9)
        time.sleep(0.02)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Trial:
    """Runs a program as every process of a job; `left` is what the notes of a name say."""

    def __init__(self, open_launcher: Callable[[], Launcher], folder: Path) -> None:
        self.open, self.folder = open_launcher, folder

    def run(self, program: str, *, ranks: int = 1, producers: int = 0, restarts: int = 2) -> int:
        file = self.folder / "process.py"
        file.write_text(TOOLS.replace("SOON", str(SOON)) + program)
        command, run = [sys.executable, str(file), str(self.folder)], self.folder / "run"
        return self.open().run(Job(command, [], run, ranks, producers, restarts))

    def left(self, name: str) -> list[str]:
        return sorted(file.read_text() for file in self.folder.glob(f"{name}-*"))

    def wait(self, holds: Callable[[], bool], lacking: str = "waited in vain") -> None:
        deadline = time.monotonic() + SOON
        while not holds():
            assert time.monotonic() < deadline, lacking
            time.sleep(0.02)


class LauncherSuite(Suite):
    """Standard tests of a launcher: who is started with what, started again, asked and ended."""

    @pytest.fixture
    def trial(self, tmp_path: Path) -> Trial:
        return Trial(lambda: self.open("launcher"), tmp_path)

    def test_the_exit_status_of_the_ranks_is_returned(self, trial: Trial) -> None:
        assert (trial.run(""), trial.run("sys.exit(7)")) == (0, 7)

    def test_ranks_are_told_their_places(self, trial: Trial) -> None:
        told = 'note("rank", " ".join(os.environ[n] for n in ("RANK", "WORLD_SIZE")))'
        assert trial.run(told, ranks=2) == 0
        assert trial.left("rank") == ["0 2", "1 2"]

    def test_ranks_of_which_one_is_killed_or_lost_another_start_again_all_together(
        self, trial: Trial
    ) -> None:
        program = f"""
note("rank" + rank)
start = count("rank" + rank)
if start < 3:
    until(lambda: count("rank0") == count("rank1") == start)
    if rank == "1":
        die() if start == 1 else sys.exit({ExitStatus.RANK_LOST})
    until(lambda: False)
"""
        assert trial.run(program, ranks=2) == 0
        assert len(trial.left("rank0")) == len(trial.left("rank1")) == 3

    def test_a_rank_that_says_why_it_ended_is_not_started_again(self, trial: Trial) -> None:
        assert trial.run('note("rank")\nsys.exit(3)') == 3
        assert len(trial.left("rank")) == 1

    def test_a_producer_that_dies_is_started_again_alone(self, trial: Trial) -> None:
        program = """
note(role)
if role == "trainer":
    until(lambda: count("producer") == 3)
elif count("producer") == 1:
    die()
elif count("producer") == 2:
    sys.exit(5)
"""
        assert trial.run(program, producers=1) == 0
        assert len(trial.left("trainer")) == 1

    def test_what_dies_again_and_again_ends_the_run(self, trial: Trial) -> None:
        with pytest.raises(DraftcoreError, match=r"topology\.restarts"):
            trial.run("die()", restarts=1)

    def test_a_producer_that_is_refused_ends_the_run(self, trial: Trial) -> None:
        refused = f"sys.exit({ExitStatus.REFUSED})"
        program = f'note(role)\n{refused} if role == "producer" else time.sleep(999)'
        with pytest.raises(UsageError, match="producer 0"):
            trial.run(program, producers=1)
        assert len(trial.left("producer")) == 1

    @slow
    def test_a_signal_reaches_the_ranks_which_end_as_they_like(self, trial: Trial) -> None:
        program = f"""
def save(*_):
    time.sleep(0.5)
    note("saved")
    sys.exit({ExitStatus.INTERRUPTED})
if role == "producer":
    time.sleep(999)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
note("ready")
time.sleep(999)
"""

        def ask(number: int, before: int) -> None:
            with suppress(AssertionError):  # then a run without ranks is ended, too
                trial.wait(lambda: len(trial.left("ready")) > before)
            os.kill(os.getpid(), number)

        before_all = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        try:
            for before, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
                thread = threading.Thread(target=ask, args=[number, before])
                thread.start()
                assert trial.run(program, producers=1) == ExitStatus.INTERRUPTED
                thread.join()
                assert len(trial.left("saved")) == before + 1
        finally:
            signal.signal(signal.SIGHUP, before_all)

    @slow
    def test_producers_come_and_go_while_the_run_goes_on(self, trial: Trial) -> None:
        program = f"""
def leave(*_):
    note("left")
    sys.exit({ExitStatus.INTERRUPTED})
if role == "producer":
    signal.signal(signal.SIGTERM, leave)
    note("producer")
    time.sleep(999)
scale = here / "run" / "scale.json"
scale.parent.mkdir(exist_ok=True)
until(lambda: count("producer") == 1)
scale.write_text('{{"producers": 3}}')
until(lambda: count("producer") == 3)
scale.write_text('{{"producers": 1}}')
until(lambda: count("left") == 2)
time.sleep(0.5)
sys.exit(count("left") - 2)
"""
        assert trial.run(program, producers=1) == 0

    @slow
    def test_nothing_is_left_of_a_run_that_ended(self, trial: Trial) -> None:
        program = """
if role == "producer":
    note("producer", str(os.getpid()))
    time.sleep(999)
until(lambda: count("producer"))
"""
        assert trial.run(program, producers=1) == 0
        (pid,) = trial.left("producer")
        trial.wait(lambda: not Path("/proc", pid).exists(), "the producer lives on")
