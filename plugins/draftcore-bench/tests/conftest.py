"""Servers on loopback that stream answers and tell of drafts as the three engines do, each in its way."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import Serve, Server


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(engine: str = "", draft: bool = True, failing: str = "") -> Server:
        servers.append(server := Server(engine, draft, failing))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.held.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Four prompts of two categories, as a file."""
    rows = [
        {"category": f"c{n % 2}", "messages": [{"role": "user", "content": f"question {n}?"}]}
        for n in range(4)
    ]
    (file := tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
