"""Channel `tcp`: the queue behind a port, for producers on this machine or others.

A connection carries one request and one reply at a time. A frame is

    length (4 bytes) | MAC (32 bytes) | JSON

and the MAC, HMAC-SHA256, covers the direction, the frame's number in the connection and the JSON.
Its key comes from the run's secret and from 16 random bytes of each side, so a frame of another
connection, run or time passes nowhere. What a stranger sends ends the stranger's connection and
nothing else. Nothing is encrypted: token ids of the training data pass as they are.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from draftcore.contracts.channel import PATIENCE, ChannelAway, Client, Json, Service, to_bytes
from draftcore.errors import DraftcoreError, UsageError

logger = logging.getLogger(__name__)
MAGIC = b"draftcore-queue1"
FRAME = 64 << 20  # bytes of JSON
HANDSHAKE = 10.0  # seconds in which a stranger must show that it knows the secret
SILENCE = 60.0  # seconds without a byte, in a frame or, at a producer, before a reply
STRANGERS = 256  # connections that have not said whose they are
AWAY = 0.5  # seconds between two attempts to connect


class Broken(OSError):  # noqa: N818  a state of a connection
    """The other side closed, sent something that is no frame of this connection, or was silent."""


class Link:
    """One authenticated connection. Raises Broken where it is none any more."""

    def __init__(self, sock: socket.socket, secret: bytes, *, serves: bool) -> None:
        self.sock, self.sent, self.read = sock, 0, 0
        self.longest, self.deadline = 64, time.monotonic() + HANDSHAKE  # of a stranger's frame
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = os.urandom(16)
        sock.sendall(MAGIC + ours)
        hello = self._exactly(len(MAGIC) + 16)
        if not hello.startswith(MAGIC):
            raise Broken("the other side does not speak draftcore's protocol")
        nonces = hello[16:] + ours if serves else ours + hello[16:]  # the producer's first
        self.key = hmac.digest(secret, nonces, "sha256")
        self.names = (b"reply", b"request") if serves else (b"request", b"reply")
        self.send(b"hello")
        if self.receive() != b"hello":
            raise Broken("the other side has another secret")
        self.longest, self.deadline = FRAME, float("inf")
        sock.settimeout(SILENCE)

    def send(self, payload: bytes) -> None:
        if len(payload) > FRAME:
            raise DraftcoreError(
                f"a message of {len(payload)} bytes is longer than {FRAME}\n  lower train.batch"
            )
        mac = self._mac(self.names[0], self.sent, payload)
        self.sock.sendall(struct.pack("!I", len(payload)) + mac + payload)
        self.sent += 1

    def receive(self) -> bytes:
        (length,) = struct.unpack("!I", self._exactly(4))
        if length > self.longest:
            raise Broken(f"a frame of {length} bytes")
        mac, payload = self._exactly(32), self._exactly(length)
        if not hmac.compare_digest(mac, self._mac(self.names[1], self.read, payload)):
            raise Broken("a frame that this run did not write: the other side has another secret")
        self.read += 1
        return payload

    def _mac(self, name: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(self.key, name + struct.pack("!Q", number) + payload, "sha256")

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            if self.deadline < float("inf"):
                self.sock.settimeout(max(self.deadline - time.monotonic(), 0.001))
            piece = self.sock.recv(min(count - len(found), 1 << 20))
            if not piece:
                raise Broken("the other side closed the connection")
            found += piece
        return bytes(found)


class TcpChannel:
    """Serves on, or connects to, `host` and `port`; port 0 is a free one."""

    def __init__(self, host: str, port: int, secret: bytes, patience: float) -> None:
        self.host, self.port, self.secret, self.patience = host, port, secret, patience
        self.listener: socket.socket | None = None
        self.links: dict[socket.socket, str] = {}  # with the producer, once it named itself
        self.mutex = threading.Condition()  # of `links`; told of each that ends

    @classmethod
    def open(cls, uri: str, secret: bytes, patience: float = PATIENCE) -> TcpChannel:
        """Open `tcp`, or `tcp://HOST:PORT` for other machines."""
        if uri == "tcp":
            return cls("127.0.0.1", 0, secret, patience)
        host, _, port = uri.removeprefix("tcp://").rpartition(":")
        known = uri.startswith("tcp://") and host and port.isdecimal() and len(port) < 6
        if not known or int(port) >= 1 << 16:
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
        threading.Thread(target=self._accept, args=[service], name="queue", daemon=True).start()
        return f"{self.host}:{self.listener.getsockname()[1]}"

    def connect(self, find: Callable[[], str]) -> Client:
        def address() -> str:
            found = find()  # raises where this process is asked to stop
            return f"{self.host}:{self.port}" if self.port else found

        return TcpClient(address, self.secret, self.patience)

    def close(self) -> None:
        if self.listener is not None:
            with suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self.listener.close()
        with self.mutex:
            for how, wait in ((socket.SHUT_RD, 1.0), (socket.SHUT_RDWR, 0.0)):
                for sock in self.links:  # replies that are on their way still go out
                    with suppress(OSError):
                        sock.shutdown(how)
                self.mutex.wait_for(lambda: not self.links, wait)

    def _accept(self, service: Service) -> None:
        assert self.listener is not None
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError as error:
                if self.listener.fileno() < 0 or error.errno == 22:
                    return
                time.sleep(AWAY)  # too many open files: others may close theirs
                continue
            with self.mutex:
                self.links[sock] = ""
                strangers = [one for one, who in self.links.items() if not who]
                if len(strangers) > STRANGERS:  # the one that came first goes
                    self.links[strangers[0]] = "?"
                    with suppress(OSError):
                        strangers[0].shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._serve_one, args=[sock, service], daemon=True).start()
            except RuntimeError:  # no more threads
                with self.mutex:
                    del self.links[sock]
                sock.close()

    def _serve_one(self, sock: socket.socket, service: Service) -> None:
        producer = ""
        try:
            link = Link(sock, self.secret, serves=True)
            while True:
                request = json.loads(link.receive())
                producer = self.links[sock] = str(request.get("producer", ""))
                link.send(to_bytes(service.answer(request)))
        except (OSError, ValueError, AttributeError, RecursionError, DraftcoreError) as error:
            logger.debug("a connection ended: %s", error)
        finally:
            with self.mutex:
                self.links.pop(sock, None)
                gone = bool(producer) and producer not in self.links.values()
                self.mutex.notify_all()
            sock.close()
            if gone:
                service.lost(producer)


class TcpClient:
    """A producer's connection, made anew where it breaks, for `patience` seconds."""

    def __init__(self, find: Callable[[], str], secret: bytes, patience: float) -> None:
        self.find, self.secret, self.patience = find, secret, patience
        self.link: Link | None = None
        self.mutex = threading.Lock()
        self.closed = False

    def call(self, request: Json) -> Json:
        payload, began = to_bytes(request), time.monotonic()
        with self.mutex:
            while not self.closed:
                try:
                    self.link = self.link or self._connect()
                    self.link.send(payload)
                    reply: Json = json.loads(self.link.receive())
                    return reply
                except (OSError, ValueError) as error:
                    self._drop()
                    if time.monotonic() - began > self.patience:
                        raise ChannelAway(
                            f"the trainer's queue at {self.find() or 'no known address'} did not "
                            f"answer for {self.patience:g} s: {error}\n"
                            "  start the trainer, or give the producer its address and secret"
                        ) from None
                time.sleep(AWAY)
        raise ChannelAway("this end of the channel is closed")

    def close(self) -> None:
        self.closed = True
        self._drop()

    def _connect(self) -> Link:
        host, _, port = self.find().rpartition(":")
        if not port.isdecimal() or len(port) > 5:
            raise Broken("it has no address yet")
        sock = socket.create_connection((host, int(port)), HANDSHAKE)
        try:
            return Link(sock, self.secret, serves=False)
        except OSError:
            sock.close()
            raise

    def _drop(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
            link.sock.close()
