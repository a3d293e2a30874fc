"""The actor that runs one process of a run on a machine of the cluster."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import ray
from draftcore_disagg.local import die_with_parent


@ray.remote
class Host:
    """Starts a process here, passes on what it prints, and takes it along when it goes itself.

    Who does not look after it for half of `patience` may have lost this machine: the process is asked
    to stop, and ended before `patience` is over, as another takes its place then.
    """

    def __init__(self, patience: float) -> None:
        self.patience, self.looked = patience, time.monotonic()
        self.process: subprocess.Popen[bytes] | None = None
        self.lines = queue.SimpleQueue[str]()
        self.reader: threading.Thread | None = None

    def address(self, ports: int) -> tuple[str, list[int]]:
        """Return this machine's address in the cluster, and so many ports that are free there."""
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        with contextlib.ExitStack() as stack:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            found = [
                stack.enter_context(socket.create_server((address, 0), family=family))
                for _ in range(ports)
            ]
            return address, [one.getsockname()[1] for one in found]

    def lacks(self, file: str) -> str:
        """Return this machine's name if the file is not here, else ''."""
        return "" if Path(file).exists() else socket.gethostname()

    def start(
        self, command: Sequence[str], given: dict[str, str], env: dict[str, str], folder: str
    ) -> None:
        """Start the process with this machine's own Python, in a folder if it is here.

        Of the environment that is `given`, what this machine sets itself stays; `env` goes before both.
        """
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, *command[1:]],
            stdout=write,
            stderr=write,
            stdin=subprocess.DEVNULL,
            env={**given, **os.environ, **env},
            cwd=folder if Path(folder).is_dir() else None,
            start_new_session=True,
            pass_fds=[read],  # it may print when nobody reads any more, and has to save then
            preexec_fn=functools.partial(_hear_signals, os.getpid()),
        )
        os.close(write)
        self.reader = threading.Thread(target=self._read, args=[read], daemon=True)
        self.reader.start()
        self.looked = time.monotonic()
        threading.Thread(target=self._guard, args=[self.process], daemon=True).start()

    def poll(self) -> tuple[list[str], int | None]:
        """Return the lines that were printed since the last poll, and the exit status if it ended."""
        self.looked = time.monotonic()
        code = self.process.poll() if self.process is not None else None
        if code is not None and self.reader is not None:
            self.reader.join(5.0)  # its last lines
        lines = list[str]()
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self.lines.get_nowait())
        return lines, code

    def send(self, number: int) -> None:
        """Send the process a signal."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def _guard(self, process: subprocess.Popen[bytes]) -> None:
        asked = False
        while process.poll() is None:
            silent = (time.monotonic() - self.looked) / self.patience
            if silent > 0.75:
                process.kill()
            elif silent > 0.5 and not asked:
                process.terminate()
                asked = True
            time.sleep(min(0.5, self.patience / 20))

    def _read(self, descriptor: int) -> None:
        with open(descriptor, errors="replace") as stream:
            for line in stream:
                self.lines.put(line.rstrip("\n"))


def _hear_signals(parent: int) -> None:
    """Ask the process to stop, and save, when its host goes; Ray blocks signals, and it may not."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    die_with_parent(parent)
