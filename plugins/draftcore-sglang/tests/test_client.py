"""Which server is asked when some are away, slow or wrong: real little HTTP servers on loopback."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from draftcore_sdk.targets import tiny_target
from draftcore_sglang.client import KEY, Server, ServerAway, Servers
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture
from draftcore_sglang.wire import FIELD, VERSION

from draftcore.contracts.capture import BadRows, CaptureBatch, FeatureRequest
from draftcore.errors import DraftcoreError, UsageError
from draftcore.target import TransformersTarget


class LittleServer(ThreadingHTTPServer):
    """Answers as `answer` says: an object, a status, or a function of the body."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], answer: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.answer = answer
        self.asked: list[tuple[Any, str | None]] = []  # bodies, with their authorization
        self.url = f"http://127.0.0.1:{self.server_port}"


Serve = Callable[[Any], LittleServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with its answer."""
    running: list[LittleServer] = []

    def start(answer: Any) -> LittleServer:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((body, self.headers.get("Authorization")))
                found = server.answer(body) if callable(server.answer) else server.answer
                status = found if isinstance(found, int) else 200
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                pass

        server = LittleServer(Handler, answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def servers(
    *urls: str,
    patience: float = 5.0,
    in_flight: int = 4,
    look: Callable[[Server], Any] = lambda server: "fits",
) -> Servers:
    return Servers(urls, in_flight, patience, look)


def post(server: Server) -> Any:
    return server.post({"x": 1}, 2.0)


def test_a_server_that_fails_is_replaced_by_another(serve: Serve) -> None:
    bad, good = serve(500), serve({"ok": 1})
    pool = servers(bad.url, good.url)
    assert [pool.ask(post) for _ in range(6)] == [{"ok": 1}] * 6
    assert len(bad.asked) == 1  # it rests


def test_a_server_that_comes_back_is_asked_again_and_looked_at_anew(serve: Serve) -> None:
    server, looked = serve(503), list[Server]()

    def look(one: Server) -> str:
        looked.append(one)
        return "fits"

    pool = servers(server.url, look=look)
    threading.Timer(0.5, lambda: setattr(server, "answer", {"ok": 1})).start()
    assert pool.ask(post) == {"ok": 1}
    assert 2 < len(server.asked) < 6  # not in a tight loop
    assert len(looked) == len(server.asked)
    pool.ask(post)
    assert len(looked) == len(server.asked) - 1


def test_patience_ends_with_the_servers_and_the_remedy(serve: Serve) -> None:
    server = serve(503)
    began = time.monotonic()
    with pytest.raises(ServerAway, match=server.url):
        servers(server.url, patience=1.0).ask(post)
    assert 0.5 < time.monotonic() - began < 4


def test_no_server_has_more_than_in_flight_requests(serve: Serve) -> None:
    most, now, lock = [0], [0], threading.Lock()

    def answer(body: Any) -> dict[str, int]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return {"ok": 1}

    pool = servers(serve(answer).url, in_flight=3)
    threads = [threading.Thread(target=pool.ask, args=(post,)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 3


def test_work_is_spread_over_the_servers(serve: Serve) -> None:
    def answer(body: Any) -> dict[str, int]:
        time.sleep(0.05)
        return {"ok": 1}

    slow = [serve(answer) for _ in range(3)]
    pool = servers(*(server.url for server in slow))
    threads = [threading.Thread(target=pool.ask, args=(post,)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(server.asked) for server in slow] == [4, 4, 4]


def test_a_request_that_is_refused_is_not_repeated(serve: Serve) -> None:
    server = serve(400)
    with pytest.raises(DraftcoreError, match=r"status 400(.|\n)*context-length"):
        servers(server.url).ask(post)
    assert len(server.asked) == 1


def test_the_key_comes_from_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve({"ok": 1})
    monkeypatch.setenv(KEY, "s3cret")
    Server(server.url).post({}, 2.0)
    assert server.asked[0][1] == "Bearer s3cret"
    server.answer = 401
    with pytest.raises(UsageError, match=KEY) as caught:
        Server(server.url).post({}, 2.0)
    assert "s3cret" not in str(caught.value)


def test_an_answer_beyond_the_limit_is_refused(serve: Serve) -> None:
    server = serve({"text": "x" * 1000})
    with pytest.raises(UsageError, match="max_json=100"):
        Server(server.url).post({}, 2.0, 100)


def test_a_server_that_no_longer_fits_rests_while_others_serve(serve: Serve) -> None:
    one, other = serve({"one": 1}), serve({"other": 1})

    def look(server: Server) -> str:
        if server.url == one.url:
            raise UsageError("another model")
        return "fits"

    pool = servers(one.url, other.url, look=look)
    assert pool.ask(post) == {"other": 1}


def test_closing_ends_a_wait(serve: Serve) -> None:
    pool = servers(serve(503).url, patience=60)
    threading.Timer(0.5, pool.close).start()
    began = time.monotonic()
    with pytest.raises(ServerAway):
        pool.ask(post)
    assert time.monotonic() - began < 10


# ---------------------------------------------------------------- what a capture makes of answers

REQUEST = FeatureRequest((0,), True, "float32")


def test_a_capture_is_not_opened_where_no_server_answers(tmp_path: Path) -> None:
    target = TransformersTarget(str(tiny_target(tmp_path)), device="cpu")
    options = ServerOptions(servers=("http://127.0.0.1:9",), patience=600)
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:9(.|\n)*capture\.options\.servers"):
        ServerCapture(target, REQUEST, options)


def test_all_rows_of_a_batch_that_cannot_be_captured_are_named_at_once(
    serve: Serve, tmp_path: Path
) -> None:
    """Where no row failed in a way that may be over when it is tried again."""
    target = TransformersTarget(str(tiny_target(tmp_path)), device="cpu")
    text = target.text_config
    about = {
        "version": VERSION,
        "problem": "",
        "model": "as asked",
        "layers": target.num_layers,
        "width": text.hidden_size,
        "vocabulary": target.vocab_size,
        "names": REQUEST.names,
        "sink": "shm:elsewhere",
    }

    def answer(body: Any) -> dict[str, Any]:
        if "about" in body["sampling_params"]["custom_params"][FIELD]:
            return {"meta_info": {FIELD: [{"about": about}]}}
        kinds = {1: "failed", 2: "not-finite", 3: "failed", 4: "short"}
        receipt = {"error": kinds[len(body["input_ids"])], "reason": "as it is"}
        return {"meta_info": {FIELD: [receipt]}}

    options = ServerOptions(servers=(serve(answer).url,), self_test=False)
    capture = ServerCapture(target, REQUEST, options)
    rows: tuple[list[int], ...] = ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4])
    with pytest.raises(DraftcoreError, match=r"row 20 .* failed"):
        list(capture.features([batch_of(rows)]))
    with pytest.raises(BadRows, match=r"capture\.dtype=float32") as caught:
        list(capture.features([batch_of((rows[1], rows[3]))]))
    assert list(caught.value.reasons) == [0, 1]
    capture.close()


def batch_of(token_ids: tuple[list[int], ...]) -> CaptureBatch:
    rows = tuple(range(20, 20 + len(token_ids)))
    return CaptureBatch(0, rows, tuple(f"{row:024x}" for row in rows), token_ids)
