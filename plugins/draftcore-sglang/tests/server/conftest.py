"""Real servers on loopback: unmodified sglang on the CPU, one for each file of tests.

A server takes some 20 seconds to come up. Tests that break one start their own.
"""

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import ALL, capture_target
from draftcore_sdk.serving import Serving
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.ranks import free_port
from draftcore_sglang.remote import ServerCapture
from draftcore_shm.store import ShmStore

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetSpec

StartServer = Callable[..., Serving]
OpenCapture = Callable[..., ServerCapture]


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of the suite of captures, which has it in the same place."""
    folder = tmp_path_factory.getbasetemp() / "capture-suite"
    return folder if folder.exists() else capture_target(folder)


@pytest.fixture
def target(served_folder: Path) -> TargetSpec:
    return TransformersTarget(str(served_folder), device="cpu")


@pytest.fixture(scope="module")
def start_server(
    tmp_path_factory: pytest.TempPathFactory, served_folder: Path
) -> Iterator[StartServer]:
    """Start servers of the suite's target; all end with the file's tests."""
    from sglang_on_cpu import ARGUMENTS, flags

    started: list[Serving] = []

    def start(*args: str, port: int = 0, **environment: str) -> Serving:
        port = port or free_port()
        where = {"model_path": served_folder, "host": "127.0.0.1", "port": port}
        command = [sys.executable, "-m", "sglang.launch_server", *flags({**where, **ARGUMENTS})]
        settings = {"SGLANG_PLATFORM": "draftcore_cpu", **environment}
        log = tmp_path_factory.mktemp("server") / "log"
        started.append(Serving([*command, *args], port, log, **settings))
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
    store.path.unlink(missing_ok=True)


@pytest.fixture
def store(sink: str) -> Iterator[ShmStore]:
    """That store, as the run's; each test frees what it captures."""
    store = ShmStore.open(sink)
    yield store
    assert store.stats().samples == 0
    store.close()


@pytest.fixture
def open_capture(target: TargetSpec) -> Iterator[OpenCapture]:
    """Open captures at a server, with its URL and the suite's target unless others are given."""
    opened: list[ServerCapture] = []

    def opener(
        server: Serving, request: FeatureRequest = ALL, target: TargetSpec = target, **options: Any
    ) -> ServerCapture:
        options = {"servers": [server.url], "patience": 30, "self_test": False} | options
        opened.append(ServerCapture(target, request, ServerOptions(**options)))
        return opened[-1]

    yield opener
    for capture in opened:
        capture.close()
