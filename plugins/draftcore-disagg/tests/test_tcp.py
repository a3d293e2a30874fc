"""Channel `tcp`: whatever strangers, liars and broken connections do, a producer works on."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
from draftcore_disagg import tcp
from draftcore_disagg.channel import ChannelAway, Json
from draftcore_disagg.tcp import MAX_MESSAGE, TcpChannel, TcpClient, authenticated, shut_down
from queueing import SOON

from draftcore.contracts.run import RunEnded
from draftcore.errors import DraftcoreError, UsageError

SECRET = b"the run's secret"


class Echo:
    """Answers a request with itself."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.changed = threading.Condition()

    def answer(self, request: Json) -> Json:
        return {
            "of": request["producer"],
            "number": request.get("number"),
            "text": request.get("text"),
        }

    def lost(self, producer: str) -> None:
        with self.changed:
            self.gone.append(producer)
            self.changed.notify_all()

    def wait_for(self, *gone: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: sorted(self.gone) == sorted(gone), SOON)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def channel(echo: Echo) -> Iterator[TcpChannel]:
    found = TcpChannel.open("tcp", SECRET, patience=SOON)
    found.address = found.serve(echo)  # type: ignore[attr-defined]
    yield found
    found.close()


@pytest.fixture
def address(channel: TcpChannel) -> tuple[str, int]:
    host, _, port = str(channel.address).rpartition(":")  # type: ignore[attr-defined]
    return host, int(port)


Connect = Callable[..., TcpClient]


@pytest.fixture
def connect(address: tuple[str, int]) -> Iterator[Connect]:
    """Connect a client, by default a good one."""
    with ExitStack() as stack:

        def connect(secret: bytes = SECRET, patience: float = SOON) -> TcpClient:
            client = TcpClient(lambda: f"{address[0]}:{address[1]}", secret, patience)
            stack.callback(client.close)
            return client

        yield connect


@pytest.fixture
def stranger(address: tuple[str, int]) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as stack:

        def open_one() -> socket.socket:
            sock = stack.enter_context(socket.create_connection(address, SOON))
            sock.settimeout(SOON)
            return sock

        yield open_one


@pytest.fixture(autouse=True)
def undisturbed(connect: Connect, echo: Echo) -> Iterator[None]:
    """A producer that works through all of it, on one connection."""
    client, ended = connect(), threading.Event()
    wrong: list[object] = []

    def work() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            reply = client.call(
                {"producer": "good", "number": number, "text": "x" * (number % 5000)}
            )
            if (reply["of"], reply["number"]) != ("good", number):
                wrong.append(reply)

    thread = threading.Thread(target=work)
    client.call({"producer": "good"})
    own = client.connection
    thread.start()
    yield
    ended.set()
    thread.join(SOON)
    assert not wrong
    assert client.connection is own, "its connection was replaced"
    assert "good" not in echo.gone


def closed(sock: socket.socket) -> bool:
    """Read until the other side closes the connection."""
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


REQUEST = b'{"producer":"liar","number":1}'


# ---------------------------------------------------------------- what works


def test_a_message_that_is_too_long_is_refused_where_it_is_sent(connect: Connect) -> None:
    client = connect()
    with pytest.raises(DraftcoreError, match=r"lower train\.batch"):
        client.call({"producer": "p", "text": "x" * MAX_MESSAGE})
    assert client.call({"producer": "p", "number": 2})["number"] == 2
    with pytest.raises(DraftcoreError, match="not plain JSON"):
        client.call({"producer": "p", "number": float("nan")})
    assert client.call({"producer": "p", "number": 3})["number"] == 3


# ---------------------------------------------------------------- strangers


def test_a_wrong_secret_ends_that_connection_and_says_so(connect: Connect) -> None:
    with pytest.raises(ChannelAway) as caught:
        connect(secret=b"another", patience=0).call({"producer": "p"})
    for part in ("did not answer", "the trainer's queue at 127.0.0.1:", "its address and secret"):
        assert part in str(caught.value)


def test_a_trainer_of_another_secret_is_believed_nothing(echo: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            sock, _ = listener.accept()
            with suppress(ConnectionError):
                authenticated(sock, b"another", serves=True)

        thread = threading.Thread(target=pretend)
        thread.start()
        port = listener.getsockname()[1]
        client = TcpClient(lambda: f"127.0.0.1:{port}", SECRET, 0)
        with pytest.raises(ChannelAway, match=r"secret|closed"):
            client.call({"producer": "p"})
        thread.join(SOON)


def test_the_trainers_own_challenge_is_no_proof_of_the_secret(
    stranger: Callable[[], socket.socket],
) -> None:
    """A mirror sends back all that it was sent."""
    sock = stranger()
    with suppress(ConnectionError):
        while data := sock.recv(4096):
            sock.sendall(data)
    assert closed(sock)


def test_a_stranger_that_sends_a_byte_at_a_time_is_not_waited_for(
    stranger: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for the handshake is one for all of it, however many bytes come."""
    monkeypatch.setattr(tcp, "HANDSHAKE", 0.5)
    sock, ended = stranger(), threading.Event()

    def drip() -> None:
        with suppress(OSError):
            for byte in struct.pack("!i", 255) + b"m" * 1000:
                sock.sendall(bytes([byte]))
                if ended.wait(0.05):
                    return

    thread = threading.Thread(target=drip)
    began = time.monotonic()
    thread.start()
    assert closed(sock)
    ended.set()
    thread.join(SOON)
    assert time.monotonic() - began < SOON


# ---------------------------------------------------------------- liars, who know the secret


def liar(sock: socket.socket) -> Connection[Any, Any]:
    connection = authenticated(sock, SECRET, serves=False)
    connection.send_bytes(REQUEST)
    assert b'"number":1' in connection.recv_bytes()
    return connection


def ended(connection: Connection[Any, Any]) -> bool:
    with pytest.raises((EOFError, OSError)):
        connection.recv_bytes()
    return True


def send_raw(connection: Connection[Any, Any], data: bytes) -> None:
    with socket.socket(fileno=connection.fileno()) as sock:
        sock.sendall(data)
        sock.detach()


@pytest.mark.parametrize("length", [MAX_MESSAGE + 1, 0x7FFFFFFF, -1, -7])
def test_a_length_that_is_none_is_not_waited_for(
    stranger: Callable[[], socket.socket], length: int
) -> None:
    """Minus one announces a length of eight bytes."""
    connection = liar(stranger())
    send_raw(connection, struct.pack("!i", length) + b"x" * 100)
    assert ended(connection)


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xff\xfe", b"[]", b"7", b"null", b'"text"', b"[" * 50000],
    ids=["empty", "half", "no text", "list", "number", "null", "string", "deep"],
)
def test_a_request_that_is_none_ends_the_connection(
    stranger: Callable[[], socket.socket],
    payload: bytes,
    echo: Echo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    connection = liar(stranger())
    connection.send_bytes(payload)
    assert ended(connection)
    echo.wait_for("liar")
    assert not died


@pytest.mark.parametrize("sent", [0, 2, 10])
def test_a_peer_that_closes_in_the_middle_is_lost_and_nobody_else(
    stranger: Callable[[], socket.socket], sent: int, echo: Echo
) -> None:
    connection = liar(stranger())
    send_raw(connection, (struct.pack("!i", len(REQUEST)) + REQUEST)[:sent])
    connection.close()
    echo.wait_for("liar")


def test_a_producer_that_has_come_back_is_not_lost_with_its_old_connection(
    stranger: Callable[[], socket.socket], echo: Echo
) -> None:
    old, new = liar(stranger()), liar(stranger())
    old.close()
    other = stranger()
    other.close()  # its end is noticed after that of the old connection was, or about then
    new.send_bytes(REQUEST)
    assert new.recv_bytes()
    new.close()
    echo.wait_for("liar")


@pytest.mark.parametrize("way", ["silent", "closes", "no JSON"])
def test_a_client_asks_again_where_a_reply_is_broken(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "SILENCE", 0.2)
    monkeypatch.setattr(tcp, "RECONNECT", 0.01)
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for attempt in range(2):
                sock, _ = listener.accept()
                connection = authenticated(sock, SECRET, serves=True)
                asked.append(connection.recv_bytes())
                if way == "no JSON" or attempt:
                    connection.send_bytes(b'{"fine":1}' if attempt else b"no")
                if way == "silent" or attempt:
                    ended(connection)
                shut_down(connection)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        client = TcpClient(lambda: f"127.0.0.1:{port}", SECRET, SOON)
        assert client.call({"producer": "p"}) == {"fine": 1}
        client.close()
        thread.join(SOON)
    assert asked == [b'{"producer":"p"}'] * 2


# ---------------------------------------------------------------- coming and going


def test_an_error_of_whoever_looks_for_the_address_ends_the_call() -> None:
    def find() -> str:
        raise RunEnded("asked to stop", "interrupted")

    client = TcpChannel.open("tcp", SECRET).connect(find)
    with pytest.raises(RunEnded):
        client.call({"producer": "p"})


def test_a_port_that_is_taken_and_a_host_that_is_not_here_are_refused(
    address: tuple[str, int], echo: Echo
) -> None:
    places = {
        f"127.0.0.1:{address[1]}": "choose another port",
        "192.0.2.1:0": "cannot listen on 192",
    }
    for place, says in places.items():
        channel = TcpChannel.open(f"tcp://{place}", SECRET)
        with pytest.raises(UsageError, match=says):
            channel.serve(echo)
        channel.close()


@pytest.mark.parametrize(
    "uri", ["tcp:", "tcp://", "tcp://host", "tcp://:80", "tcp://h:x", "tcp://h:65536", "udp://h:1"]
)
def test_an_address_that_is_none_is_refused_with_an_example(uri: str) -> None:
    with pytest.raises(UsageError, match="tcp://HOST:PORT"):
        TcpChannel.open(uri, SECRET)


def test_an_address_in_the_uri_is_where_clients_go(echo: Echo) -> None:
    """Also where its name is an IPv6 one; the file with the address is then not looked at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trainer = TcpChannel.open(f"tcp://127.0.0.1:{port}", SECRET)
    assert trainer.serve(echo) == f"127.0.0.1:{port}"
    client = TcpChannel.open(f"tcp://127.0.0.1:{port}", SECRET).connect(lambda: "nowhere:1")
    assert client.call({"producer": "p"})["of"] == "p"
    client.close()
    trainer.close()
    assert TcpChannel.open("tcp://[::1]:80", SECRET).host == "::1"
