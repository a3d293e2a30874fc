"""A server that a test or a benchmark starts, asks over HTTP and ends: a process on loopback.

    with Serving([*command, f"--port={port}"], port, log) as server: ...

It is a session of its own and is ended by a signal to that session: a signal to the first process
alone would leave the workers that a server starts.
"""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from draftcore_disagg.local import Child

from draftcore_sdk.suite import child_environment

LINES = 40  # of the log that an error shows


class Serving:
    """A running server that listens on `port`; what it prints is in `log`.

    Raises AssertionError with the end of the log where it ends, or does not answer `ready`, within
    so many seconds. It ends with this process, whatever ends that.
    """

    def __init__(
        self, command: Sequence[str], port: int, log: Path,
        *, ready: str = "/health", seconds: float = 300, **environment: str,
    ) -> None:  # fmt: skip
        self.port, self.url, self.log = port, f"http://127.0.0.1:{port}", log
        self._child = Child("server", command, log, {**child_environment(), **environment})
        self._child.start()
        assert self._child.process is not None
        self.process = self._child.process
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
        """The end of its log."""
        return self._child.tail(LINES)

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
