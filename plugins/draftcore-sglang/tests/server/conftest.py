"""Real servers on loopback: unmodified sglang on the CPU, one for each file of tests.

A server takes some 20 seconds to come up. Tests that break one start their own.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftcore.stores.shm import ShmStore
from draftcore.target import TargetSpec
from draftcore.testing import child_environment
from draftcore.testing.captures import capture_target

START = 240  # seconds; this is a machine of two cores
ARGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--dtype=float32",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--skip-server-warmup",
    "--max-total-tokens=4096",
    "--max-running-requests=32",
    "--context-length=512",
    "--mem-fraction-static=0.1",
    "--disable-cuda-graph",
    "--host=127.0.0.1",
    "--random-seed=0",
)


class Serving:
    """A running server. `kill` is SIGKILL, for all of its processes."""

    def __init__(
        self, folder: Path, target: Path, *args: str, port: int = 0, **environment: str
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = port or probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{uuid.uuid4().hex[:8]}.log"
        command = [sys.executable, "-m", "sglang.launch_server", f"--model-path={target}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *ARGS, f"--port={self.port}", *args],
                env={**child_environment(), "SGLANG_PLATFORM": "draftcore_cpu", **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await()
        except BaseException:
            self.kill()
            raise

    def _await(self) -> None:
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/model_info", timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the whole session that was started here, which is nobody else's."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(30)


StartServer = Callable[..., Serving]


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of the suite of captures, which has it in the same place."""
    folder = tmp_path_factory.getbasetemp() / "capture-suite"
    return folder if folder.exists() else capture_target(folder)


@pytest.fixture
def target(served_folder: Path) -> TargetSpec:
    return TargetSpec(str(served_folder), device="cpu")


@pytest.fixture(scope="module")
def start_server(
    tmp_path_factory: pytest.TempPathFactory, served_folder: Path
) -> Iterator[StartServer]:
    """Start servers of the suite's target; all end with the file's tests."""
    started: list[Serving] = []

    def start(*args: str, **settings: Any) -> Serving:
        folder = tmp_path_factory.mktemp("server")
        started.append(Serving(folder, served_folder, *args, **settings))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def sink() -> Iterator[str]:
    """A store in shared memory, open for as long as the file's tests run."""
    uri = f"shm:test-{uuid.uuid4().hex}?max_bytes={8 << 20}"
    store = ShmStore.open(uri)
    yield uri
    store.close()
    Path(f"/dev/shm/draftcore-{os.geteuid()}-{uri[4:].partition('?')[0]}").unlink(missing_ok=True)
