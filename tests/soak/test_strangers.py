"""Strangers at every port of a run, and a server that lies: a run's result stays, or one error says why."""

import json
import random
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from draftcore_disagg.channel import Task
from draftcore_disagg.queue import Queue, QueueService, RemoteQueue
from draftcore_disagg.tcp import TcpChannel
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import batch
from draftcore_sglang.client import Server
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture
from draftcore_sglang.wire import FIELD, VERSION

from draftcore.config import TrainConfig
from draftcore.contracts.capture import CaptureBatch, FeatureRequest
from draftcore.contracts.store import SampleRef
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError, ExitStatus
from draftcore.plugins.registry import load_plugins
from draftcore.training.ranks import join
from tests.drills import Case, Drill, altered
from tests.ranks import listening, start_rank

REQUEST = FeatureRequest((0,), True, "float32")
SOON = 60.0  # seconds in which what must happen does, however slow the machine


def pester(dice: random.Random, host: str, port: int, held: ExitStack) -> None:
    """Connect once, or fifty times, and do there what neither a producer nor a rank does."""
    for _ in range(dice.choice((1, 1, 1, 50))):
        try:
            sock = held.enter_context(socket.create_connection((host, port), 5.0))
        except OSError:  # a rank has ended, or has no room for more of them
            return
        challenge = b"#CHALLENGE#" + dice.randbytes(20)
        framed = struct.pack("!i", len(challenge)) + challenge
        begin = dice.choice((b"", framed, bytes([dice.randrange(8)] + [0] * 7)))
        length = struct.pack("!i", dice.choice((-1, 0, 5, 256, 257, 1 << 26, 0x7FFFFFFF)))
        more = dice.choice((b"", b"[" * 4096, b"GET / HTTP/1.1\r\n\r\n", dice.randbytes(300)))
        with suppress(OSError):
            sock.settimeout(0.01)
            sock.sendall(begin + dice.choice((b"", length)) + more)
            sock.sendall(sock.recv(64) if dice.random() < 0.2 else b"")  # a mirror
        if dice.random() < 0.3:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        if dice.random() < 0.6:
            sock.close()


def test_strangers_at_the_queues_port_keep_no_producer_out_and_change_no_batch(
    drill: Drill,
) -> None:
    tasks = list[Task]()
    for at in range(len(drill.numbers)):
        batch = CaptureBatch(at, (2 * at, 2 * at + 1), (f"s{at}", f"t{at}"), ([at] * 3,) * 2)
        tasks.append(Task(at, batch, ([True, False, True],) * 2, 10))
    queue = Queue(
        {"store": "file:x"}, ahead=len(tasks), limit=None, skipped=Skipped({}, rows=9, share=1.0),
        free=lambda refs: None, ref_error=lambda task, refs: None,
    )  # fmt: skip
    queue.offer(iter(tasks), 0)
    with closing(TcpChannel.open("tcp", b"a secret")) as channel, ExitStack() as held:
        address = channel.serve(QueueService(queue))
        host, _, port = address.rpartition(":")
        for case, one in zip(drill.cases("strangers at the queue's port"), tasks, strict=False):
            with case:
                pester(case.dice, host, int(port), held)
                with closing(channel.connect(lambda: address)) as client:
                    producer = RemoteQueue(client)
                    (claimed,), _ = producer.claim(1, SOON)
                    assert claimed.batch == one.batch
                    refs = tuple(SampleRef(row, "g", "", (), 3, 5) for row in one.batch.ids)
                    assert producer.publish(claimed.claim, refs)
                assert queue.receive(one.position, SOON) == refs


def add_up(folder: Path) -> None:
    """Be a rank that adds up with the other one until there is `enough`."""
    try:
        with join(TrainConfig(device="cpu", rank_timeout=5), load_plugins()) as ranks:
            step = 0
            while not ranks.on_rank0(lambda: (folder / "enough").exists()):
                sum_N, step = torch.full((1000,), ranks.rank + step), step + 1
                torch.distributed.all_reduce(sum_N, group=ranks.device_group)
                assert sum_N.tolist() == [2 * step - 1] * 1000
                (folder / "adding").touch()
    except DraftcoreError as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(error.exit_status) from None


def test_strangers_at_the_ranks_ports_change_no_sum(tmp_path: Path, drill: Drill) -> None:
    """Ten at a time. Who comes before a rank may take its place: then all end, with an error."""
    cases = drill.draw("strangers at the ranks' ports", 5 * SOON)
    groups = [cases[at : at + 10] for at in range(0, len(cases), 10)]
    for case in drill.judge(group[0] for group in groups):
        (group,) = (group for group in groups if group[0] is case)
        (folder := tmp_path / str(case.number)).mkdir()
        ranks, case.times = [start_rank(folder, 0, 2, add_up, folder)], len(group)
        with case, ExitStack() as held:
            first = case.dice.choice((0, 2))  # strangers come before the other rank
            for at, stranger in enumerate(group):
                if at == min(first, len(group) - 1):
                    ranks.append(start_rank(folder, 1, 2, add_up, folder))
                places: list[tuple[str, int]] = []
                while not places and all(one.is_alive() for one in ranks):
                    time.sleep(0.02)
                    if len(ranks) == 1 or (folder / "adding").exists():
                        places = [place for one in ranks for place in listening(one.pid or 0)]
                assert {host for host, _ in places} <= {"127.0.0.1"}
                with suppress(OSError, IndexError):  # a rank has ended
                    pester(stranger.dice, *stranger.dice.choice(places), held)
            (folder / "enough").touch()
            held.close()
            for one in ranks:
                one.join(SOON)
            codes = [one.exitcode for one in ranks]
            case.shown = said = [(folder / f"output.{rank}").read_text() for rank in range(2)]
            if codes != [0, 0]:
                case.outcome = "refused in words"
                assert {*codes} <= {ExitStatus.FAILED, ExitStatus.RANK_LOST}
                assert all("error: " in text for text in said)


# ---------------------------------------------------------------- a server


@contextmanager
def server(lie: Callable[[socket.socket], object]) -> Iterator[str]:
    """Serve at a URL; `lie` writes what it likes to whoever has asked."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.request.recv(1 << 16)
                lie(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as serving:
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, args=[0.01]).start()
        try:
            yield f"http://127.0.0.1:{serving.server_address[1]}"
        finally:
            serving.shutdown()


def reply(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def endless(begin: bytes, piece: bytes, pause: float) -> Callable[[socket.socket], None]:
    def lie(sock: socket.socket) -> None:
        sock.sendall(begin)
        while True:
            sock.sendall(piece)
            time.sleep(pause)

    return lie


def a_lie(dice: random.Random, elsewhere: str) -> Callable[[socket.socket], None]:
    """Return one way to answer: an end too early or none at all, noise, another place, bad JSON."""
    true, odd = b'{"ok": 1}', dice.randbytes(3) * dice.randrange(1, 999)
    begin, status = b"HTTP/1.1 200 OK\r\n", dice.choice(("200 \x1b[2J", "500 no", "abc"))
    json = dice.choice((b"[" * 99999, b'{"a":' * 99999, b"9" * 9999, b"null", b"\x1b]0;x\x07", b""))
    texts = (
        odd,
        reply(true)[: dice.randrange(len(reply(true)))],
        reply(b"", "302 Found", f"Location: {elsewhere}\r\n"),
        reply(odd, status),
        reply(json),
    )
    return dice.choice(
        [
            endless(begin + b"\r\n", true, 0.0),
            endless(begin + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 0.01),
            endless(begin + b"Content-Length: 9999\r\n\r\n", b" ", 0.05),
            endless(begin, b"X: y\r\n", dice.choice((0.0, 0.05))),
            endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01),
            *(lambda sock, text=text: sock.sendall(text) for text in texts),
        ]
    )


def require_clear(case: Case, asked: Callable[[], object]) -> None:
    """Fail for what is answered without an error, or by one that is long or steers a terminal."""
    said = ""
    try:
        asked()
    except DraftcoreError as error:
        case.outcome, case.shown, said = "refused in words", error, str(error)
    assert 0 < len(said) < 2200  # 500 of the server's characters, each escaped by four
    assert said.replace("\n", "").isprintable()


def test_a_server_that_does_not_speak_http_gives_one_error_in_time(drill: Drill) -> None:
    """Nobody is asked in its place, whatever a redirect says."""
    asked = list[object]()
    with server(asked.append) as elsewhere:
        for case in drill.cases("answers endless, slow, cut, redirected or no HTTP"):
            lie = a_lie(case.dice, elsewhere)
            with case, server(lie) as url:
                require_clear(case, partial(Server(url).post, {"x": 1}, 0.3))
                assert not asked


def test_a_server_that_lies_about_itself_and_its_captures_gives_one_error(
    tmp_path: Path, target_folder: Path, drill: Drill
) -> None:
    target, dice = TransformersTarget(str(target_folder), device="cpu"), random.Random()
    about: dict[str, Any] = {"version": VERSION, "problem": "", "model": "as asked"}
    about |= {"sink": "file:x", "layers": target.num_layers, "vocabulary": target.vocab_size}
    about |= {"width": int(target.text_config.hidden_size), "names": list(REQUEST.names)}
    ref = SampleRef("0" * 32, "g", f"file:{tmp_path}", (), 2, 8).to_json()

    def lie(sock: socket.socket) -> None:
        receipt = {"about": about} if dice.random() < 0.7 else {"ref": ref, "about": about}
        found = {"meta_info": {FIELD: [receipt]}}
        said = found if dice.random() < 0.3 else altered(dice, found)
        sock.sendall(reply(json.dumps(said).encode()))

    def capture() -> None:
        with closing(ServerCapture(target, REQUEST, options)) as opened:
            list(opened.features([batch(members=[[1, 2]])]))

    with server(lie) as url:
        options = ServerOptions(servers=(url,), patience=0.1, timeout=5, self_test=False)
        for case in drill.cases("answers in JSON that are lies"):
            dice = case.dice
            with case:
                require_clear(case, capture)
