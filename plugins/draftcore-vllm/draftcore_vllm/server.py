"""A vLLM server, asked over HTTP: one that runs somewhere, or one that is started and ends with us.

vLLM's build for CPUs wants another transformers than draftcore does, so it runs by another Python, in
whose environment nothing of ours is. A started server listens on loopback alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from draftcore_disagg.local import Child, free_port

from draftcore.contracts.run import RunEnded
from draftcore.errors import DraftcoreError, UsageError, one_line, raised
from draftcore.stopping import asked_to_stop
from draftcore.uris import parse_size
from draftcore_vllm.internals import ENVIRONMENT, LAUNCHER, TESTED, VERSION, flags
from draftcore_vllm.options import Started

KEY = "DRAFTCORE_VLLM_KEY"
LARGEST = 64 << 20  # bytes of an answer; states are not in it
STOP = 20.0  # seconds in which a server may end by itself


class ServerAway(DraftcoreError):  # noqa: N818  a state
    """A server does not answer, or has ended."""


class RequestRefused(DraftcoreError):  # noqa: N818
    """A server says that a request cannot be answered."""


class Server:
    """A server at a URL. It says what model it has; raises UsageError where it is none of vLLM's."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self.model, self.context = "", 0

    def look(self) -> None:
        """Ask which model it serves, and for how many tokens."""
        said = self.get("/v1/models")
        try:
            (model,) = json.loads(said)["data"][:1]
            owner, self.model = model["owned_by"], str(model["id"])
            self.context = int(model["max_model_len"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"the server at {self.url} is none of vLLM's: {one_line(said, 200)}"
            ) from error
        if owner != "vllm":
            raise UsageError(f"the server at {self.url} is {one_line(owner)}, and not vLLM")

    def get(self, path: str) -> str:
        return self._exchange("GET", path)

    def complete(self, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """Continue a prompt greedily; return what the server answers."""
        greedy = {"temperature": 0, "repetition_penalty": 1.0, "return_token_ids": True}
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, **greedy, **more}
        said = self._exchange("POST", "/v1/completions", json.dumps(body))
        try:
            answer: dict[str, Any] = json.loads(said)
            answer["choices"][0]["token_ids"][0]
        except (ValueError, LookupError, TypeError) as error:
            raise DraftcoreError(
                f"the server at {self.url} gives an answer of another form: {one_line(said, 200)}"
            ) from error
        return answer

    def close(self) -> None:
        """Leave it; one that was started here ends."""

    def _exchange(self, verb: str, path: str, body: str | None = None) -> str:
        scheme, _, address = self.url.partition("://")
        kind = HTTPSConnection if scheme == "https" else HTTPConnection
        connection = kind(address, timeout=self.timeout)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        timer = threading.Timer(self.timeout, cut, [connection])  # of the whole exchange
        timer.start()
        try:
            connection.request(verb, path, body, headers)
            answer = connection.getresponse()
            said = answer.read(LARGEST).decode(errors="replace")
        except (OSError, ValueError, HTTPException) as error:
            raise self._away(raised(error)) from error
        finally:
            timer.cancel()
            connection.close()
        if answer.status == 200:
            return said
        if answer.status in (401, 403):
            raise UsageError(
                f"the server at {self.url} refuses the API key\n  set {KEY} in the environment"
            )
        why = f"status {answer.status}: {one_line(said)}"
        if 400 <= answer.status < 500:
            raise RequestRefused(f"the server at {self.url} refuses a request: {why}")
        raise self._away(why)

    def _away(self, why: str) -> ServerAway:
        return ServerAway(
            f"the server at {self.url} does not answer: {why}\n  start it, or correct its URL"
        )


class StartedServer(Server):
    """A server that is started here, by the Python of another environment.

    `key` stands before an option's name. Raises UsageError for a Python without the vLLM that this was
    tested with, and DraftcoreError with the cause where it does not start.
    """

    def __init__(self, arguments: Mapping[str, Any], options: Started, key: str) -> None:
        python = os.path.expanduser(options.python or sys.executable)
        self.build = require_vllm(python, f"{key}python")
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}", options.timeout)
        ours = {
            **arguments, "kv_cache_memory_bytes": parse_size(options.kv_cache), "host": "127.0.0.1",
            "port": port, "served_model_name": "target", "uvicorn_log_level": "warning",
        }  # fmt: skip
        command = [python, "-m", LAUNCHER, *flags(ours, options.args, f"{key}args")]
        self.beside = tempfile.TemporaryDirectory(prefix="draftcore-vllm-")
        self.child = Child("vLLM", command, Path(self.beside.name, "log"), dict(ENVIRONMENT))
        self.child.start()
        try:
            self._await(port, time.monotonic() + options.patience)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it with all that it started; harmless twice."""
        self.child.end(STOP)
        self.beside.cleanup()

    def _await(self, port: int, deadline: float) -> None:
        while not listens(port):
            if self.child.code is not None or time.monotonic() > deadline:
                raise self._away("it has not started in time")
            if asked_to_stop:
                raise RunEnded("asked to stop", "interrupted")
            time.sleep(0.2)
        self.look()

    def _away(self, why: str) -> ServerAway:
        if (process := self.child.process) is None:
            return ServerAway("vLLM was ended")
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)  # what broke the connection may be its end
        code = self.child.code
        state = f"does not answer: {why}" if code is None else f"has ended, with status {code}"
        silent = code is not None and code < 0  # a signal ended it, of which the log says nothing
        causes = self.child.errors(6) or ([] if silent else self.child.tail(6).splitlines())
        return ServerAway("\n  ".join([f"vLLM {state}", *map(one_line, causes)]))


def require_vllm(python: str, key: str) -> str:
    """Return the dist of vLLM that an interpreter has; raises UsageError for one that was not tested."""
    remedy = (
        f"set {key} to the Python of an environment with vLLM {TESTED}x, which its README tells"
    )
    try:
        asked = [python, "-I", "-c", VERSION]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"{python} is no Python: {raised(error)}\n  {remedy}") from error
    build, _, version = said.partition(" ")
    if not version.startswith(TESTED):
        raise UsageError(f"{python} has {said or 'no vLLM'}\n  {remedy}")
    return build


def cut(connection: HTTPConnection) -> None:
    """End an exchange that another thread waits for."""
    with suppress(OSError, AttributeError):  # it has a socket once it is connected
        connection.sock.shutdown(socket.SHUT_RDWR)


def listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False
