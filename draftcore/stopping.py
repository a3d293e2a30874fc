"""How signals ask a process of a run to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

SIGNAL_WINDOW = 0.5  # seconds in which signals that ask to stop are one
asked_to_stop: list[float] = []  # when, by these signals, for whoever waits for something else


@contextmanager
def stop_on_signal() -> Iterator[list[float]]:
    """Collect when signals ask to stop, so that a step ends whole; a later one acts at once.

    A terminal that hangs up asks as well, and what is printed then goes nowhere. The kernel tells of
    the death of a parent once for each of its threads.
    """
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
        numbers.remove(signal.SIGHUP)
    with ExitStack() as handlers:

        def note(number: int, _: object) -> None:
            asked_to_stop.append(time.monotonic())
            if asked_to_stop[-1] - asked_to_stop[0] > SIGNAL_WINDOW:
                handlers.close()
                signal.raise_signal(number)
            for fd in terminals if number == signal.SIGHUP else ():
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)

        for number in numbers:
            handlers.callback(signal.signal, number, signal.signal(number, note))
        try:
            yield asked_to_stop
        finally:
            asked_to_stop.clear()
