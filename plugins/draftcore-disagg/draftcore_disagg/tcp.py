"""Channel `tcp`: the queue behind a port, for producers on this machine or others.

A connection carries one request and one reply at a time: JSON, in the frames of Python's
`multiprocessing.connection`. That unpickles only in `recv`, which is never called here. First each end
proves to the other by that module's challenges that it knows the run's secret, so a stranger's
connection is ended and nothing else. Nothing is encrypted: who can read the network reads token ids of
the training data, and who can alter what passes there can alter a request.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from draftcore.errors import DraftcoreError, UsageError
from draftcore_disagg.channel import PATIENCE, ChannelAway, Client, Json, Service, to_bytes

logger = logging.getLogger(__name__)
MAX_MESSAGE = 64 << 20  # bytes of JSON
HANDSHAKE = 10.0  # seconds in which both ends must show that they know the secret
SILENCE = 60.0  # seconds without a byte, in a frame or, at a producer, before a reply
RECONNECT = 0.5  # seconds between two attempts to connect


def authenticated(sock: socket.socket, secret: bytes, *, serves: bool) -> Connection[Any, Any]:
    """Make a socket a connection, once each end has proved to the other that it knows the secret.

    Takes over the socket. Raises ConnectionError.
    """
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    timeout = struct.pack("ll", int(SILENCE), int(SILENCE % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, timeout)
    connection = Connection(sock.detach())
    deadline = threading.Timer(HANDSHAKE, shut_down, [connection])
    deadline.daemon = True
    deadline.start()
    try:
        for prove in (deliver_challenge, answer_challenge)[:: 1 if serves else -1]:
            prove(connection, secret)
    except (OSError, EOFError, AuthenticationError, AssertionError) as error:
        connection.close()
        raise ConnectionError(
            f"the other end has another secret, or is no end of this channel: {error!r}"
        ) from None
    finally:
        deadline.cancel()
    return connection


def shut_down(connection: Connection[Any, Any], how: int = socket.SHUT_RDWR) -> None:
    """End a connection from any thread: wakes the one that reads, which then closes it."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.shutdown(how)


class TcpChannel:
    """Serves on, or connects to, `host` and `port`; port 0 is a free one."""

    def __init__(self, host: str, port: int, secret: bytes, patience: float) -> None:
        self.host, self.port, self.secret, self.patience = host, port, secret, patience
        self.listener: socket.socket | None = None
        self.closed = False
        self.producers: dict[Connection[Any, Any], str] = {}  # '' until it has named itself
        self.mutex = threading.Condition()  # of `producers`; notified of each that ends

    @classmethod
    def open(cls, uri: str, secret: bytes, patience: float = PATIENCE) -> TcpChannel:
        """Open `tcp`, or `tcp://HOST:PORT` for other machines."""
        if uri == "tcp":
            return cls("127.0.0.1", 0, secret, patience)
        host, _, port = uri.removeprefix("tcp://").rpartition(":")
        valid = uri.startswith("tcp://") and host and port.isdecimal() and len(port) < 6
        if not valid or int(port) >= 1 << 16:
            raise UsageError(
                f"{uri!r} is no address of a queue\n"
                "  write tcp for producers on this machine, tcp://HOST:PORT for others"
            )
        return cls(host.strip("[]"), int(port), secret, patience)

    def serve(self, service: Service) -> str:
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            self.listener = socket.create_server((self.host, self.port), family=family, backlog=128)
        except OSError as error:
            raise UsageError(
                f"the queue cannot listen on {self.host}:{self.port}: {error}\n"
                "  choose another port in channel=tcp://HOST:PORT, or channel=tcp for a free one"
            ) from None
        arguments = [self.listener, service]
        threading.Thread(target=self._accept, args=arguments, name="queue", daemon=True).start()
        return f"{self.host}:{self.listener.getsockname()[1]}"

    def connect(self, find: Callable[[], str]) -> Client:
        def address() -> str:
            current = find()  # raises where this process is asked to stop
            return f"{self.host}:{self.port}" if self.port else current

        return TcpClient(address, self.secret, self.patience)

    def close(self) -> None:
        self.closed = True
        if self.listener is not None:
            with suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self.listener.close()
        with self.mutex:
            for how, wait in ((socket.SHUT_RD, 1.0), (socket.SHUT_RDWR, 0.0)):
                for connection in self.producers:  # replies that are on their way still go out
                    shut_down(connection, how)
                self.mutex.wait_for(lambda: not self.producers, wait)

    def _accept(self, listener: socket.socket, service: Service) -> None:
        while not self.closed:
            try:
                sock, _ = listener.accept()
                threading.Thread(target=self._serve_one, args=[sock, service], daemon=True).start()
            except (OSError, RuntimeError):  # too many files or threads: others may end theirs
                time.sleep(0.0 if self.closed else RECONNECT)

    def _serve_one(self, sock: socket.socket, service: Service) -> None:
        try:
            connection = authenticated(sock, self.secret, serves=True)
        except OSError as error:
            logger.debug("a stranger's connection ended: %s", error)
            return
        producer = ""
        with self.mutex:
            self.producers[connection] = producer
        try:
            while not self.closed:
                request = json.loads(connection.recv_bytes(MAX_MESSAGE))
                producer = self.producers[connection] = str(request.get("producer", ""))
                connection.send_bytes(to_bytes(service.answer(request)))
        except (EOFError, OSError, ValueError, AttributeError, RecursionError, DraftcoreError) as e:
            logger.debug("a connection ended: %r", e)
        finally:
            with self.mutex:
                del self.producers[connection]
                gone = bool(producer) and producer not in self.producers.values()
                self.mutex.notify_all()
                connection.close()
            if gone:
                service.lost(producer)


class TcpClient:
    """A producer's connection, made anew where it breaks, for `patience` seconds."""

    def __init__(self, find: Callable[[], str], secret: bytes, patience: float) -> None:
        self.find, self.secret, self.patience = find, secret, patience
        self.connection: Connection[Any, Any] | None = None
        self.mutex = threading.Lock()
        self.closed = threading.Event()

    def call(self, request: Json) -> Json:
        payload, began = to_bytes(request), time.monotonic()
        if len(payload) > MAX_MESSAGE:
            raise DraftcoreError(
                f"a message of {len(payload)} bytes is longer than {MAX_MESSAGE}\n"
                "  lower train.batch"
            )
        with self.mutex:
            while not self.closed.is_set():
                try:
                    self.connection = self.connection or self._connect()
                    self.connection.send_bytes(payload)
                    reply: Json = json.loads(self.connection.recv_bytes(MAX_MESSAGE))
                    return reply
                except (EOFError, OSError, ValueError) as error:
                    self._drop()
                    if time.monotonic() - began > self.patience:
                        raise ChannelAway(
                            f"the trainer's queue at {self.find() or 'no known address'} did not "
                            f"answer for {self.patience:g} s: {str(error) or 'it closed'}\n"
                            "  start the trainer, or give the producer its address and secret"
                        ) from None
                self.closed.wait(RECONNECT)
        raise ChannelAway("this end of the channel is closed")

    def close(self) -> None:
        self.closed.set()
        if (connection := self.connection) is not None:
            shut_down(connection)  # ends a call that waits in another thread
        with self.mutex:
            self._drop()

    def _connect(self) -> Connection[Any, Any]:
        host, _, port = self.find().rpartition(":")
        if not port.isdecimal() or len(port) > 5:
            raise ConnectionError("it has no address yet")
        sock = socket.create_connection((host, int(port)), HANDSHAKE)
        return authenticated(sock, self.secret, serves=False)

    def _drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
