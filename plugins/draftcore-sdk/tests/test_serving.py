"""A server that tests start is up when it is there, says why it is not, and ends with its children."""

import os
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from draftcore_sdk.serving import Serving

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.SimpleHTTPRequestHandler): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def serving(code: str, log: Path, seconds: float = 60) -> Serving:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", code, str(port)]
    return Serving(command, port, log, ready="/", seconds=seconds)


def running(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_server_answers_once_it_is_there_and_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(SERVER, tmp_path / "log") as server:
        assert server.alive
        assert urllib.request.urlopen(server.url).status == 200
        child = int((tmp_path / "log").read_text().split()[1])
        assert running(child)
        assert os.getsid(child) == server.process.pid != os.getsid(0)
    assert not server.alive
    deadline = time.monotonic() + 10
    while running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ended with status 3:\n  no such model"):
        serving("print('no such model'); raise SystemExit(3)", tmp_path / "log")


def test_a_server_that_never_answers_is_killed_and_an_error(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(AssertionError, match=r"is silent:\n  \d+"):
        serving(code, tmp_path / "log", seconds=2)
    assert not running(int((tmp_path / "log").read_text()))
