"""What every launcher must do. See `draftcore_sdk` for how to use it.

A launcher is tried with processes that take milliseconds and say in files what they met. A subclass
sets `plugin`, and `options` where the launcher needs some, such as the address of a cluster.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from draftcore_disagg.launcher import MEETING, Job, Launcher

from draftcore.errors import DraftcoreError, ExitStatus, UsageError
from draftcore_sdk import limits
from draftcore_sdk.limits import until
from draftcore_sdk.suite import Suite, slow

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A process of the job: `role`, `rank`, `note(name)` leaves a file, `count(name)` says how many did.
TOOLS = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
role = "producer" if "produce" in sys.argv[2:] else "trainer"
rank = os.environ.get("RANK", "0")
def note(name, text=""):
    (here / f"{name}-{os.getpid()}").write_text(text)
note("pid", str(os.getpid()))
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
        file.write_text((TOOLS + program).replace("SOON", str(limits.SOON)))
        command, run = [sys.executable, str(file), str(self.folder)], self.folder / "run"
        return self.open().run(Job(command, [], run, ranks, producers, restarts))

    def asked(self, program: str, *, producers: int = 0, **when: signal.Signals) -> int:
        """Run it, and send this process a signal once there is a note of a name."""
        over = threading.Event()

        def ask() -> None:
            for name, number in when.items():
                with suppress(AssertionError):  # a run that is not ready is ended, too
                    until(lambda name=name: self.left(name) or over.is_set())  # type: ignore[misc]
                os.kill(os.getpid(), number)

        # What comes when the run is over hits nobody; and nohup ignores SIGHUP.
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            return self.run(program, producers=producers)
        finally:
            over.set()
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def left(self, name: str) -> list[str]:
        return sorted(file.read_text() for file in self.folder.glob(f"{name}-*"))

    def end(self) -> None:
        """End what a wrong launcher left."""
        for pid in self.left("pid"):
            with suppress(OSError):
                if str(self.folder) in Path("/proc", pid, "cmdline").read_text():
                    os.kill(int(pid), signal.SIGKILL)


class LauncherSuite(Suite):
    """Standard tests of a launcher: who is started with what, started again, asked and ended."""

    @pytest.fixture
    def trial(self, tmp_path: Path) -> Iterator[Trial]:
        folder = tmp_path / "a shell's $HOME"  # as users name theirs
        folder.mkdir()
        trial = Trial(lambda: self.open("launcher"), folder)
        yield trial
        trial.end()

    def test_the_exit_status_of_the_ranks_is_returned(self, trial: Trial) -> None:
        found = trial.run(""), trial.run("sys.exit(7)")
        assert found == (0, 7), f"0 and 7 became {found}, of a command with {str(trial.folder)!r}"

    def test_ranks_are_told_their_places(self, trial: Trial) -> None:
        program = """
places = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
note("rank", ", ".join(f"{name} {os.environ.get(name)}" for name in places))
"""
        assert trial.run(program, ranks=2) == 0
        told = trial.left("rank")
        assert [one[:20] for one in told] == ["RANK 0, WORLD_SIZE 2", "RANK 1, WORLD_SIZE 2"]
        assert not any("None" in one for one in told), f"ranks are told {told}"

    def test_two_runs_on_one_machine_meet_at_places_of_their_own(self, trial: Trial) -> None:
        """The first one's ranks hold their port."""
        program = f"""
if os.environ.get("{MEETING}"):
    os.stat(os.environ["{MEETING}"])
else:
    note("met", os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"])
"""
        assert trial.run(program, ranks=2) == 0
        first = trial.left("met")
        assert len(set(first)) < 2, f"the ranks of one run are to meet at {first}"
        address, _, port = (first or [""])[0].rpartition(":")
        if port:
            with socket.create_server((address, int(port))):
                assert trial.run(program, ranks=2) == 0
            met = set(trial.left("met"))
            assert len(met) == 2, f"the ranks of a second run are to meet at {first[0]} as well"

    def test_ranks_and_producers_have_the_environment_of_who_runs_them(
        self, trial: Trial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And a place for what they say, which holds more than a pipe that nobody reads."""
        monkeypatch.setenv("OF_THIS_TRIAL", "set")
        program = """
note(role, os.environ.get("OF_THIS_TRIAL", "not set"))
note("place", os.getcwd())
for stream in (sys.stdout, sys.stderr):
    print(" " * 2**17, file=stream, flush=True)
note("said")
until(lambda: count("said") == 2)
"""
        code = trial.run(program, producers=1)
        assert (trial.left("trainer"), trial.left("producer")) == (["set"], ["set"])
        told = "relative paths of a configuration are of the folder of who runs it"
        assert {*trial.left("place")} == {os.getcwd()}, told
        assert len(trial.left("said")) == 2, "who says more than a pipe holds waits for a reader"
        assert code == 0

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
        """Each as often as `restarts` says, however often another was."""
        program = """
note(role)
if role == "trainer":
    until(lambda: count("producer") == 6)
    sys.exit()
start = (count("producer") + 1) // 2
note("known")
until(lambda: count("known") >= 2 * start)  # by both, before one of them dies
if start == 1:
    die()
if start == 2:
    sys.exit(5)
"""
        try:
            assert trial.run(program, producers=2, restarts=2) == 0
        except DraftcoreError as error:
            pytest.fail(f"each of two died twice, of restarts=2 that are each one's own: {error}")
        assert len(trial.left("trainer")) == 1

    def test_what_dies_again_and_again_ends_the_run(self, trial: Trial) -> None:
        before = [signal.getsignal(number) for number in SIGNALS]
        with pytest.raises(DraftcoreError, match=r"topology\.restarts"):
            trial.run("die()", restarts=1)
        after = [signal.getsignal(number) for number in SIGNALS]
        assert after == before, "signals are handled after the run as in it"

    def test_a_producer_that_ended_well_is_not_started_again(self, trial: Trial) -> None:
        """It heard that the run is over."""
        program = """
note(role)
if role == "trainer":
    until(lambda: count("producer"))
    time.sleep(0.5)  # for the launcher to see that
"""
        assert trial.run(program, producers=1) == 0
        assert len(trial.left("producer")) == 1

    def test_a_producer_that_is_refused_ends_the_run(self, trial: Trial) -> None:
        refused = f"sys.exit({ExitStatus.REFUSED})"
        program = f'note(role)\n{refused} if role == "producer" else time.sleep(SOON)'
        with pytest.raises(UsageError, match="producer 0"):
            trial.run(program, producers=1)
        assert len(trial.left("producer")) == 1

    @slow
    @pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
    def test_a_signal_reaches_the_ranks_which_end_as_they_like(
        self, trial: Trial, number: signal.Signals
    ) -> None:
        program = f"""
def save(*_):
    time.sleep(0.5)
    note("saved")
    sys.exit({ExitStatus.INTERRUPTED})
if role == "trainer":
    signal.signal({number:d}, save)
    note("ready")
time.sleep(SOON if role == "trainer" else 999)
"""
        assert trial.asked(program, producers=1, ready=number) == ExitStatus.INTERRUPTED
        assert len(trial.left("saved")) == 1

    def test_a_second_signal_ends_ranks_that_go_on(self, trial: Trial) -> None:
        program = """
signal.signal(signal.SIGINT, lambda *_: note("heard"))
note("ready")
time.sleep(SOON)
note("outlived")
"""
        asked = {"ready": signal.SIGINT, "heard": signal.SIGINT}
        assert trial.asked(program, **asked) == ExitStatus.INTERRUPTED
        assert not trial.left("outlived"), "after a second signal a rank went on to its own end"

    def test_a_signal_that_finds_the_work_done_interrupts_nothing(self, trial: Trial) -> None:
        program = """
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
note("ready")
time.sleep(SOON)
"""
        assert trial.asked(program, ready=signal.SIGINT) == ExitStatus.DONE

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
        until(lambda: not Path("/proc", pid).exists(), "the producer lives on")
