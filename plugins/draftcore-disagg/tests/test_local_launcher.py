"""The launcher with children that take milliseconds: who is started again, asked, and waited for."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from draftcore_disagg.local import Child, Processes, devices
from draftcore_sdk.launchers import TOOLS, LauncherSuite

from draftcore.errors import DraftcoreError, ExitStatus

Make = Callable[..., Child]


@pytest.fixture
def child(tmp_path: Path) -> Make:
    def make(name: str, program: str, kind: type[Child] = Child) -> Child:
        tools = TOOLS.replace("SOON", "300")
        return kind(name, [sys.executable, "-c", tools + program, str(tmp_path)])

    return make


def test_a_producer_that_ended_well_is_not_started_again_though_the_ranks_are(
    child: Make, tmp_path: Path
) -> None:
    """It heard that the run is over: of a run that failed it waits for the next trainer."""
    rank = child(
        "rank 0",
        """
note("rank")
until(lambda: count("producer"))
if count("rank") == 1:
    time.sleep(0.5)  # for the launcher to see that
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    producer = child("producer 0", 'note("producer")')
    assert Processes([rank], [producer], restarts=1).run() == 0
    assert len(list(tmp_path.glob("producer-*"))) == 1
    assert (rank.restarts, producer.restarts) == (1, 0)


class Hasty(Child):
    """Ctrl-C comes just before it is started."""

    def start(self) -> None:
        signal.raise_signal(signal.SIGINT)
        super().start()


def test_a_signal_that_comes_while_ranks_start_reaches_them(child: Make) -> None:
    rank = child("rank 0", "time.sleep(5)", Hasty)
    assert Processes([rank], [], restarts=0).run() == ExitStatus.INTERRUPTED
    assert rank.code == -signal.SIGTERM


def test_a_trainer_whose_run_ends_gets_the_time_to_write_its_checkpoint(
    child: Make, tmp_path: Path
) -> None:
    rank = child(
        "rank 0",
        """
def save(*_):
    time.sleep(1.5)  # longer than others are given
    note("saved")
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
note("ready")
until(lambda: False)
""",
    )
    producer = child("producer 0", 'until(lambda: count("ready")); sys.exit(1)')
    with pytest.raises(DraftcoreError, match="producer 0 ended with 1, 1 times by now"):
        Processes([rank], [producer], restarts=0).run()
    assert list(tmp_path.glob("saved-*"))


def test_a_child_whose_launcher_died_before_it_could_be_told_ends(
    child: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel signals a parent's death only to who asked for that while the parent lived."""
    for parent, code in ((os.getpid(), 0), (os.getppid(), 1)):
        orphan = child("child", "")
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda parent=parent: parent)
            orphan.start()
        assert orphan.process is not None
        assert orphan.process.wait() == code


@pytest.mark.parametrize(
    ("gpus", "counts", "on"),
    [
        ("0,1", (1, 1), {"rank 0": "0", "producer 0": "1"}),
        ("4,5,6", (2, 2), {"rank 0": "4,5", "rank 1": "4,5", "producer 0": "6", "producer 1": "6"}),
        ("3", (1, 1), {"rank 0": "3", "producer 0": "3"}),
        ("", (1, 1), {}),
        ("0,1,2,3,4,5", (1, 2, 2), {"rank 0": "0", "producer 0": "1,2", "producer 1": "3,4"}),
        ("0,1", (1, 1, 2), {"rank 0": "0", "producer 0": "0,1"}),  # a rank's, too
        ("0", (1, 1, 2), {"rank 0": "0", "producer 0": "0"}),  # which it will refuse
    ],
)
def test_ranks_get_gpus_first_and_producers_what_is_left(
    monkeypatch: pytest.MonkeyPatch, gpus: str, counts: tuple[int, ...], on: dict[str, str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    found = devices(*counts)
    assert {name: env["CUDA_VISIBLE_DEVICES"] for name, env in found.items()} == on


class TestLocalLauncher(LauncherSuite):
    plugin = "draftcore_disagg.plugin"
