"""Run a master of our own on loopback, for a store on one machine.

It dies with this process even on kill -9. Linux ties a child's life to the *thread* that started it,
so a thread of its own starts the master and stays. Where the master ends by itself or is killed,
that thread starts another one on the same port: empty, but all clients find it.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from draftcore.contracts.store import StoreError

LOOPBACK = "127.0.0.1"
START_SECONDS = 10
PAUSE_SECONDS = 0.1  # before another master, where one has ended
FLAGS = (
    f"--rpc_address={LOOPBACK}",
    f"--metrics_host={LOOPBACK}",
    "--metrics_port=0",  # any free one
    "--enable_metric_reporting=false",
    "--default_kv_lease_ttl=300000",  # ms; a read must end within its lease
    "--client_ttl=60",  # s; a lender that is silent for longer loses all it holds
    "--put_start_discard_timeout_sec=30",
    "--put_start_release_timeout_sec=120",  # longer than any transfer
    "--logtostderr=true",
    "--minloglevel=1",
)
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
logger = logging.getLogger(__name__)


class Master:
    """A running master, on a free port. Raises StoreError when it does not start."""

    def __init__(self, package: Path) -> None:
        self._binary, self._last_line = package / "mooncake_master", ""
        for _ in range(3):  # another program may take the port that was free
            self.port = free_port()
            if self._start():
                return
        raise StoreError(
            f"the Mooncake master does not start: {self._last_line or 'it says nothing'}\n"
            f"  run {self._binary} by hand, or name a running master: mooncake://HOST:PORT"
        )

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def stop(self) -> None:
        """Stop the master and wait for its end. Stopping twice is harmless."""
        self._ending.set()
        self._thread.join()

    def _start(self) -> bool:
        self._ending, self._serves = threading.Event(), False
        started = threading.Event()
        self._thread = threading.Thread(target=self._keep, args=(started,), daemon=True)
        self._thread.start()
        started.wait()
        limit = time.monotonic() + START_SECONDS
        while time.monotonic() < limit and self._thread.is_alive():
            if answers(self.address, seconds=0.2):
                self._serves = True
                return True
            time.sleep(0.01)
        self.stop()
        return False

    def _keep(self, started: threading.Event) -> None:
        """Run a master; and, once one has served, another one whenever it ends."""
        while True:
            code = self._run(started)
            if self._ending.wait(PAUSE_SECONDS) or not self._serves:
                return
            logger.warning(
                "the Mooncake master on port %d ended with %s: another one is started, and what it "
                "held is captured again",
                self.port,
                code,
            )

    def _run(self, started: threading.Event) -> int | None:
        """Run a master to its end, and return its exit status; None where it did not start."""
        command, code = [str(self._binary), f"--rpc_port={self.port}", *FLAGS], None
        with tempfile.TemporaryFile() as log:
            try:
                with subprocess.Popen(
                    command, stdout=log, stderr=log, preexec_fn=_die_with_parent
                ) as process:
                    self.pid = process.pid
                    started.set()
                    while process.poll() is None and not self._ending.wait(0.05):
                        pass
                    process.terminate()
                    try:
                        code = process.wait(5)
                    except subprocess.TimeoutExpired:
                        process.kill()
            except OSError as error:
                log.write(str(error).encode())
            finally:
                started.set()
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
        self._last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return code


def answers(address: str, *, seconds: float) -> str:
    """Return the local host by which `address` accepts a connection, or '' if it does not."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
            local: str = connection.getsockname()[0]
            return local
    except OSError:
        return ""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
