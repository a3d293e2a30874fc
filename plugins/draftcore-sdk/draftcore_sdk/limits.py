"""How long a test may take, on any machine and under whatever runs pytest.

A test that takes longer fails where it waits. Where no exception gets through, in C, the process ends.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from itertools import takewhile
from types import FrameType

import pytest

LIMIT = 60.0  # seconds of a test, of which none takes 5 on a quiet machine
HARD = 5  # times as long for what waits in C
SOON = 20.0  # seconds within which it comes
QUIET = 0.1  # seconds that `slowness` measures on a quiet machine
SHOWN = 6  # lines of a stack
NOT_OURS = "/pluggy/", "/unittest/mock.py"
DEBUGGERS = "/pdb.py", "/bdb.py"
# Who calls hooks explains what they raise, but for this.
Failed = type("Failed", (pytest.fail.Exception, GeneratorExit), {"__module__": "builtins"})


def slowness() -> float:
    """Return how many times slower than a quiet machine this one is, or was for the last minute."""
    began = time.perf_counter()
    sum(number * number for number in range(2_000_000))
    now, load = time.perf_counter() - began, os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(1.0, now / QUIET, load)


def until(holds: Callable[[], object], lacking: str = "waited in vain") -> None:
    """Wait for what comes soon, or fail with what is lacking."""
    __tracebackhide__ = True
    began, seconds = time.monotonic(), SOON
    while not holds():
        waited = time.monotonic() - began
        if waited > seconds:
            seconds = SOON * slowness()
            if waited > seconds:
                raise AssertionError(f"{lacking} ({waited:.0f} s)")
        time.sleep(0.005)


class Limit:
    """Ends what takes longer than so many seconds, times what this machine is slower than a quiet one.

    The process as well, unless there is no `config`, as in a fork: there faulthandler would wait for ever.
    """

    def __init__(self, config: pytest.Config | None = None) -> None:
        self.ended, self.log = "", -1  # the test that was; where stacks go
        if config is not None:
            captured = config.pluginmanager.getplugin("capturemanager")
            with captured.global_and_fixture_disabled() if captured else nullcontext():
                self.log = os.dup(2)

    def start(self, seconds: float) -> None:
        """Begin, or begin anew."""
        self.seconds, self.began = seconds, time.monotonic()
        signal.signal(signal.SIGALRM, self._look)
        self._look_in(seconds)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        os.close(self.log)

    def _look_in(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        if self.log > 0:
            faulthandler.dump_traceback_later(HARD * self.seconds, exit=True, file=self.log)

    def _look(self, _: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        waited, stack = time.monotonic() - self.began, traceback.extract_stack(frame)
        debugged = any(one.filename.endswith(DEBUGGERS) for one in stack)
        if debugged or waited < self.seconds * slowness():
            return self._look_in(self.seconds / 4)
        test = os.environ.get("PYTEST_CURRENT_TEST", "it").rpartition("::")[2]
        self.ended = self.ended or test.partition(" ")[0]
        inner = takewhile(lambda one: "/_pytest/" not in one.filename, reversed(stack))
        own = [one for one in inner if not any(part in one.filename for part in NOT_OURS)]
        lines = [f"{one.filename}:{one.lineno} in {one.name}: {one.line}" for one in own[:SHOWN]]
        lines = [f"no end after {waited:.0f} s, here:", *lines]
        self.start(self.seconds)  # for what follows, such as a fixture's end
        raise Failed("\n".join([*lines, "what comes after it in this suite is not tested"]))
