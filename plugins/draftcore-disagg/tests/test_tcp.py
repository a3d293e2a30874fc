"""Channel `tcp`: the suite; whatever strangers, liars and broken connections do, a producer works on."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
from draftcore_disagg import tcp
from draftcore_disagg.channel import ChannelAway, Json
from draftcore_disagg.tcp import TcpChannel, TcpClient, authenticated, shut_down
from draftcore_sdk.channels import ChannelSuite
from queueing import SOON

from draftcore.errors import DraftcoreError, UsageError

SECRET = b"the run's secret"
REQUEST = b'{"producer":"liar","number":1}'
Stranger = Callable[[], socket.socket]


class TestTcp(ChannelSuite):
    plugin, name = "draftcore_disagg.plugin", "tcp"


class Echo:
    """Answers a request with itself."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.changed = threading.Condition()

    def answer(self, request: Json) -> Json:
        return {"of": request["producer"], **request}

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
def address(echo: Echo) -> Iterator[str]:
    """Where the channel serves, with a producer that works all the while, on one connection."""
    channel = TcpChannel.open("tcp", SECRET)
    place = channel.serve(echo)
    client, ending, wrong = TcpClient(lambda: place, SECRET, SOON), threading.Event(), list[Json]()

    def work() -> None:
        number = 0
        while not ending.wait(0.001):
            number += 1
            request = {"producer": "good", "number": number, "text": "x" * (number % 5000)}
            if (reply := client.call(request)) != {"of": "good", **request}:
                wrong.append(reply)

    client.call({"producer": "good"})
    own, thread = client.connection, threading.Thread(target=work)
    thread.start()
    yield place
    ending.set()
    thread.join(SOON)
    assert not wrong
    assert client.connection is own, "its connection was replaced"
    assert "good" not in echo.gone
    client.close()
    channel.close()


@pytest.fixture
def stranger(address: str) -> Iterator[Stranger]:
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection((host, int(port)), SOON))


def answering(answer: Callable[[socket.socket], object], calls: int = 1) -> tuple[TcpClient, Any]:
    """Return a client of somebody who answers so many connections, and the thread that does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            for _ in range(calls):
                answer(listener.accept()[0])

    (thread := threading.Thread(target=serve)).start()
    place = f"127.0.0.1:{listener.getsockname()[1]}"
    return TcpClient(lambda: place, SECRET, SOON if calls > 1 else 0), thread


def ended(connection: Connection[Any, Any]) -> bool:
    """Wait until the other side closes the connection."""
    with pytest.raises((EOFError, OSError)):
        connection.recv_bytes()
    return True


# ---------------------------------------------------------------- strangers


def test_a_trainer_of_another_secret_is_believed_nothing() -> None:
    def pretend(sock: socket.socket) -> None:
        with suppress(ConnectionError):
            authenticated(sock, b"another", serves=True)

    client, thread = answering(pretend)
    says = r"(?s)the trainer's queue at 127.0.0.1:\d+ did not answer.*its address and secret"
    with pytest.raises(ChannelAway, match=says):
        client.call({"producer": "p"})
    thread.join(SOON)


def mirror(sock: socket.socket) -> None:
    """Send back all that comes: the trainer's own challenge is no proof of the secret."""
    while data := sock.recv(4096):
        sock.sendall(data)


def drip(sock: socket.socket) -> None:
    """Send a byte at a time: the time for the handshake is one for all of it."""
    sock.settimeout(0.05)
    for byte in struct.pack("!i", 255) + b"m" * 1000:
        sock.sendall(bytes([byte]))
        with suppress(TimeoutError):
            if not sock.recv(4096):
                return
    pytest.fail("it was waited for")


@pytest.mark.parametrize("do", [mirror, drip])
def test_a_stranger_that_knows_no_secret_is_shown_out_in_time(
    stranger: Stranger, do: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE", 0.5)
    with suppress(ConnectionError):
        do(stranger())


# ---------------------------------------------------------------- liars, who know the secret


def liar(sock: socket.socket) -> Connection[Any, Any]:
    connection = authenticated(sock, SECRET, serves=False)
    connection.send_bytes(REQUEST)
    assert b'"number":1' in connection.recv_bytes()
    return connection


def framed(payload: bytes) -> bytes:
    return struct.pack("!i", len(payload)) + payload


# Lengths that are none, of which minus one announces one of eight bytes; requests that are none.
LIES = [struct.pack("!i", n) + b"x" * 100 for n in (tcp.MAX_MESSAGE + 1, 0x7FFFFFFF, -1, -7)]
LIES += map(framed, [b"", b"{", b"\xff\xfe", b"[]", b"7", b"null", b'"text"', b"[" * 50000])
ENDS = [framed(REQUEST)[:sent] for sent in (0, 2, 10)]


def test_a_liars_connection_ends_and_nobody_elses(
    stranger: Stranger, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a producer that has come back lost with its old connection."""
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    for number, lie in enumerate([*LIES, *ENDS], 1):
        connection = liar(stranger())
        with socket.socket(fileno=connection.fileno()) as sock:
            sock.sendall(lie)
            sock.detach()
        assert lie in ENDS or ended(connection), lie[:20]
        connection.close()
        echo.wait_for(*["liar"] * number)
    echo.gone.clear()
    old, new = liar(stranger()), liar(stranger())
    old.close()
    stranger().close()  # its end is noticed after that of the old connection was, or about then
    new.send_bytes(REQUEST)
    assert new.recv_bytes()
    new.close()
    echo.wait_for("liar")
    assert not died


@pytest.mark.parametrize("way", ["silent", "closes", "no JSON"])
def test_a_client_asks_again_where_a_reply_is_broken(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "SILENCE", 0.2)
    monkeypatch.setattr(tcp, "RECONNECT", 0.01)
    asked: list[bytes] = []

    def answer(sock: socket.socket) -> None:
        connection = authenticated(sock, SECRET, serves=True)
        asked.append(connection.recv_bytes())
        again = len(asked) == 2
        if way == "no JSON" or again:
            connection.send_bytes(b'{"fine":1}' if again else b"no")
        if way == "silent" or again:
            ended(connection)
        shut_down(connection)
        connection.close()

    client, thread = answering(answer, calls=2)
    assert client.call({"producer": "p"}) == {"fine": 1}
    client.close()
    thread.join(SOON)
    assert asked == [b'{"producer":"p"}'] * 2


# ---------------------------------------------------------------- addresses, and what is too long


def test_what_cannot_be_listened_to_or_sent_is_refused_where_it_is_and_the_connection_stays(
    address: str, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, says in ((address, "choose another port"), ("192.0.2.1:0", "cannot listen on 192")):
        with pytest.raises(UsageError, match=says):
            TcpChannel.open(f"tcp://{place}", SECRET).serve(echo)
    monkeypatch.setattr(tcp, "MAX_MESSAGE", 10_000)
    client = TcpClient(lambda: address, SECRET, SOON)
    for text, says in (("x" * 10_000, r"lower train\.batch"), (float("nan"), "not plain JSON")):
        with pytest.raises(DraftcoreError, match=says):
            client.call({"producer": "p", "text": text})
        assert client.call({"producer": "p", "number": 1})["number"] == 1
    client.close()


@pytest.mark.parametrize(
    "uri", ["tcp:", "tcp://", "tcp://host", "tcp://:80", "tcp://h:x", "tcp://h:65536", "udp://h:1"]
)
def test_an_address_that_is_none_is_refused_with_an_example(uri: str) -> None:
    with pytest.raises(UsageError, match="tcp://HOST:PORT"):
        TcpChannel.open(uri, SECRET)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_address_in_the_uri_is_where_trainer_and_producers_meet(echo: Echo, host: str) -> None:
    """The file with the address is then not looked at."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host.strip("[]"), 0), family=family) as probe:
            uri = f"tcp://{host}:{probe.getsockname()[1]}"
    except OSError:
        pytest.skip("this machine has no IPv6")
    trainer = TcpChannel.open(uri, SECRET)
    trainer.serve(echo)
    client = TcpChannel.open(uri, SECRET).connect(lambda: "nowhere:1")
    assert client.call({"producer": "p"})["of"] == "p"
    client.close()
    trainer.close()
