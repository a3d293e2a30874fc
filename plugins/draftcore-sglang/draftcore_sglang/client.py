"""Send requests to one or several sglang servers, the least busy one first.

A server that does not answer is not asked for a while, longer with each failure in a row; meanwhile
the others are asked. It comes back with a single request, and is looked at anew, as it may have been
started with another model. Answers are small, so a plain connection for each request does.

A server is not trusted. An exchange has one deadline and one size, whatever comes in between, no
redirect is followed, an answer of another form is none, and what is shown of one steers no terminal.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar

from draftcore.errors import DraftcoreError, UsageError, one_line, raised
from draftcore_sglang.wire import REFUSED, Refusal

logger = logging.getLogger(__name__)
FIRST_REST, LONGEST_REST = 0.2, 30.0  # seconds
CONNECT = 10.0
SMALL = 1 << 20  # bytes of an answer that holds no states
KEY = "DRAFTCORE_SGLANG_KEY"

T = TypeVar("T")


class ServerAway(DraftcoreError):  # noqa: N818  a state that is waited out
    """A server did not answer, or its answer says nothing about the request."""


class Server:
    """One server, with its requests and failures. `Servers` guards the numbers with its lock."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.about: Any = None  # what `look` found; None: not looked at since it was away
        self.looking = threading.Lock()
        self.busy = self.failures = 0
        self.rests_until = 0.0
        self.links: set[socket.socket] = set()  # of exchanges under way
        self.closed = False

    def close(self) -> None:
        """Cut off all exchanges; there are no more."""
        self.closed = True
        for link in tuple(self.links):
            cut(link)

    def get(self, path: str, timeout: float) -> dict[str, Any]:
        return self._exchange("GET", path, None, timeout)

    def post(self, body: dict[str, Any], timeout: float, max_json: int = 0) -> dict[str, Any]:
        """Ask `/generate`. Raises ServerAway, or Refusal where the server refuses the request.

        Raises UsageError for an answer with more than `max_json` bytes, where states are asked for.
        """
        return self._exchange("POST", "/generate", json.dumps(body).encode(), timeout, max_json)

    def _exchange(
        self, verb: str, path: str, body: bytes | None, timeout: float, max_json: int = 0
    ) -> dict[str, Any]:
        scheme, _, address = self.url.partition("://")
        connection = (HTTPSConnection if scheme == "https" else HTTPConnection)(address)
        headers, deadline = {"Content-Type": "application/json"}, time.monotonic() + timeout
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        try:
            with self._link(connection.host, connection.port, timeout) as sock:
                connection.sock = sock
                if scheme == "https":
                    tls = ssl.create_default_context()
                    connection.sock = tls.wrap_socket(sock, server_hostname=connection.host)
                connection.request(verb, path, body, headers)
                response = connection.getresponse()
                text = response.read((max_json or SMALL) + 1)
                connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no whole answer in {timeout:g} s")
        except (OSError, ValueError, HTTPException) as error:
            raise ServerAway(
                f"sglang server {self.url} does not answer: {raised(error)}"
            ) from error
        if len(text) > (max_json or SMALL):
            said = f"the answer of sglang server {self.url} has more than"
            if not max_json:
                raise ServerAway(f"{said} {SMALL} bytes")
            raise UsageError(
                f"{said} max_json={max_json} bytes\n"
                "  install draftcore-sglang beside the server, lower data.max_length, or raise "
                "capture.options.max_json"
            )
        return self._parsed(response.status, text)

    @contextmanager
    def _link(self, host: str, port: int, timeout: float) -> Iterator[socket.socket]:
        """Connect, for so many seconds in all; then what is under way is cut off."""
        with (
            socket.create_connection((host, port), min(CONNECT, timeout)) as sock,
            sock.dup() as link,  # the same connection, also once TLS has taken the socket over
        ):
            sock.settimeout(timeout)
            timer = threading.Timer(timeout, cut, [link])
            self.links.add(link)
            timer.start()
            try:
                if self.closed:
                    raise TimeoutError("the capture was closed")
                yield sock
            finally:
                timer.cancel()
                self.links.remove(link)

    def _parsed(self, status: int, text: bytes) -> dict[str, Any]:
        said = one_line(text.decode(errors="replace"))
        if status in (401, 403):
            raise UsageError(
                f"sglang server {self.url} refuses the API key\n  set {KEY} in the environment"
            )
        if 400 <= status < 500:
            raise Refusal(
                REFUSED,
                f"sglang server {self.url} refuses a request (status {status}): {said}\n"
                "  lower data.max_length, or raise the server's --context-length and "
                "--max-total-tokens",
            )
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            raise ServerAway(f"sglang server {self.url} answers with status {status}: {said}")
        return answer


def cut(link: socket.socket) -> None:
    """End a connection that another thread waits on."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


@contextmanager
def understood(server: Server) -> Iterator[None]:
    """Take what an answer of another form leads to for a server that does not answer."""
    try:
        yield
    except DraftcoreError:
        raise
    except Exception as error:
        raise ServerAway(
            f"sglang server {server.url} gives an answer of another form: {raised(error)}"
        ) from error


class Servers:
    """The servers of a capture. `look(server)` says what one is, and raises where it does not fit."""

    def __init__(
        self, urls: Sequence[str], in_flight: int, patience: float, look: Callable[[Server], Any]
    ) -> None:
        self.all = tuple(Server(url) for url in dict.fromkeys(urls))
        self.in_flight, self.patience, self._look = in_flight, patience, look
        self._changed = threading.Condition()
        self._closed = False

    def close(self) -> None:
        """End all waiting, and what is under way: who asks gets ServerAway."""
        self._closed = True
        for server in self.all:
            server.close()

    def ask(self, question: Callable[[Server], T]) -> T:
        """Put a question to one server, and to others where it raises ServerAway.

        Raises ServerAway when `patience` is over, and whatever else the question raises.
        """
        deadline = time.monotonic() + self.patience
        while True:
            with self._chosen(deadline) as server:
                try:
                    try:
                        self.look(server)
                    except UsageError as error:  # it fits no longer; others may
                        raise ServerAway(str(error)) from error
                    with understood(server):
                        answer = question(server)
                except ServerAway as error:
                    self._failed(server, error)
                    if self._closed or time.monotonic() > deadline:
                        raise
                    continue
                with self._changed:
                    server.failures = 0
                return answer

    def look(self, server: Server) -> Any:
        """Return what a server is; it is looked at once, and again after each time it was away."""
        with server.looking:
            if server.about is None:
                with understood(server):
                    server.about = self._look(server)
            return server.about

    def look_at_all(self) -> None:
        """Look at every server. Raises UsageError where one does not fit, or none answers."""
        away = []
        for server in self.all:
            try:
                self.look(server)
            except ServerAway as error:
                self._failed(server, error)
                away.append(error)
        if len(away) == len(self.all):
            raise UsageError(
                "\n".join(map(str, away)) + "\n  start a server, or correct capture.options.servers"
            )

    @contextmanager
    def _chosen(self, deadline: float) -> Iterator[Server]:
        """Take the least busy server that does not rest; waits for one until the deadline."""
        with self._changed:
            while (server := self._free()) is None:
                now = time.monotonic()
                if self._closed:
                    raise ServerAway("the capture was closed while it waited for a server")
                if now > deadline and all(server.rests_until > now for server in self.all):
                    raise ServerAway(
                        f"no sglang server answered within patience={self.patience:g} seconds: "
                        f"{', '.join(server.url for server in self.all)}\n"
                        "  start one again, or raise capture.options.patience"
                    )
                self._changed.wait(0.1)
            server.busy += 1
        try:
            yield server
        finally:
            with self._changed:
                server.busy -= 1
                self._changed.notify_all()

    def _free(self) -> Server | None:
        now = time.monotonic()
        able = [
            server
            for server in self.all
            if server.rests_until <= now
            and server.busy < (1 if server.failures else self.in_flight)
        ]
        return min(able, key=lambda server: server.busy, default=None)

    def _failed(self, server: Server, error: ServerAway) -> None:
        with self._changed:
            server.about = None
            if server.rests_until > time.monotonic():
                return  # many requests were under way: this failure is counted already
            rest = min(LONGEST_REST, FIRST_REST * 2**server.failures)
            server.rests_until = time.monotonic() + rest
            server.failures += 1
            if server.failures == 1:
                logger.warning("%s; others are asked meanwhile, and it again later", error)
