"""Servers that answer as a test wants, the command line, and a tiny target."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from draftcore_sdk.targets import tiny_target

from draftcore.cli import main

sys.path.insert(0, str(Path(__file__).parent))

from talking import Behaviour, Server, echo


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(behave: Behaviour = echo) -> Server:
        servers.append(server := Server(behave))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def cli() -> Callable[..., Result]:
    """Run the command line in this process, and expect an exit status."""

    def run(*arguments: object, status: int = 0) -> Result:
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == status, result.output
        return result

    return run


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose next token is a clear choice."""
    return tiny_target(tmp_path_factory.mktemp("target"), std=0.5)
