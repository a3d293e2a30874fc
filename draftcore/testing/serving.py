"""A server that a test or a benchmark starts, asks over HTTP and ends: a process on loopback.

    with Serving([*command, f"--port={port}"], port, log) as server: ...

Odd: it is a session of its own, and what ends it is a signal to that session, which is what it
started and nobody else's. A server's workers are children that a signal to the first alone leaves.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from draftcore.testing import child_environment

TAIL = 4000  # characters of the log that an error shows


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Serving:
    """A running server that listens on `port`; what it prints is in `log`.

    Raises AssertionError with the end of the log where it ends, or does not answer `ready`, within
    so many seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        *,
        ready: str = "/health",
        seconds: float = 300,
        **environment: str,
    ) -> None:
        self.port, self.url, self.log = port, f"http://127.0.0.1:{port}", log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                env={**child_environment(), **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await(self.url + ready, seconds)
        except BaseException:
            self.kill()
            raise

    def _await(self, ready: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(ready, timeout=5).close()
                return
            except OSError:
                time.sleep(0.3)
        how = "is silent" if self.alive else f"ended with status {self.process.returncode}"
        raise AssertionError(f"the server {how}:\n{self.tail}")

    @property
    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL:]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal all of the server's processes; one that is to end has ended afterwards."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
