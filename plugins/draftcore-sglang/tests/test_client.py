"""Which server is asked when some are away, slow or wrong: real little HTTP servers on loopback."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import PIL.Image
import pytest
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import batch
from draftcore_sdk.images import picture
from draftcore_sdk.targets import tiny_target
from draftcore_sglang.client import KEY, Server, ServerAway, Servers
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture
from draftcore_sglang.wire import FIELD, VERSION, Refusal, digest

from draftcore.contracts.capture import BadRows, CaptureBatch, FeatureRequest, Image
from draftcore.contracts.run import RunEnded
from draftcore.contracts.store import SampleRef
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, UsageError
from draftcore.stopping import stop_on_signal


class LittleServer:
    """Answers as `answer` says: an object, a status, or a function of the body."""

    def __init__(self, answer: Any) -> None:
        little = self
        self.answer, self.asked = answer, list[str | None]()  # the authorization of each request

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                little.asked.append(self.headers.get("Authorization"))
                found = little.answer(body) if callable(little.answer) else little.answer
                text = json.dumps(found).encode()
                self.send_response(found if isinstance(found, int) else 200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with suppress(OSError):  # who asked waits no longer
                    self.wfile.write(text)

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=[0.02], daemon=True).start()


Serve = Callable[[Any], LittleServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with its answer."""
    running: list[LittleServer] = []

    def start(answer: Any) -> LittleServer:
        running.append(LittleServer(answer))
        return running[-1]

    yield start
    for server in running:
        server.http.shutdown()
        server.http.server_close()


def servers(*asked: LittleServer, **given: Any) -> Servers:
    usual: dict[str, Any] = {"in_flight": 4, "patience": 5.0, "look": lambda server: "fits"}
    return Servers([server.url for server in asked], **usual | given)


def post(server: Server) -> Any:
    return server.post({"x": 1}, 30)


def test_a_server_that_fails_or_no_longer_fits_rests_while_others_serve(serve: Serve) -> None:
    bad, good, other = serve(500), serve({"ok": 1}), serve({"other": 1})
    pool = servers(bad, good)
    assert [pool.ask(post) for _ in range(6)] == [{"ok": 1}] * 6
    assert len(bad.asked) == 1

    def look(server: Server) -> str:
        if server.url == good.url:
            raise UsageError("another model")
        return "fits"

    assert servers(good, other, look=look).ask(post) == {"other": 1}


def test_a_server_that_comes_back_is_asked_again_and_looked_at_anew(serve: Serve) -> None:
    server, looked = serve(503), list[Server]()
    pool = servers(server, look=lambda one: looked.append(one) or "fits")  # type: ignore[func-returns-value]
    threading.Timer(0.5, lambda: setattr(server, "answer", {"ok": 1})).start()
    assert pool.ask(post) == {"ok": 1}
    assert 2 < len(server.asked) < 6  # not in a tight loop
    assert len(looked) == len(server.asked)
    pool.ask(post)
    assert len(looked) == len(server.asked) - 1


@pytest.mark.parametrize("ends", ["patience", "close", "patience with one that hangs"])
def test_patience_or_closing_ends_a_wait(serve: Serve, ends: str) -> None:
    over, began = threading.Event(), time.monotonic()
    server = serve(lambda body: 503 if "hangs" not in ends or over.wait() else 0)
    pool = servers(server, patience=600 if ends == "close" else 0.5)
    if ends == "close":
        threading.Timer(0.5, pool.close).start()
    with pytest.raises(ServerAway, match=None if ends == "close" else server.url):
        pool.ask(lambda server: server.post({"x": 1}, 0.3))
    assert 0.4 < time.monotonic() - began < 60
    over.set()


def test_work_is_spread_over_the_servers_within_what_each_may_have_in_flight(serve: Serve) -> None:
    most, now, lock = [0], [0], threading.Lock()
    all_busy = threading.Barrier(6, timeout=30)

    def answer(body: Any) -> dict[str, int]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        all_busy.wait()
        with lock:
            now[0] -= 1
        return {"ok": 1}

    three = [serve(answer) for _ in range(3)]
    pool = servers(*three, in_flight=2)
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda _: pool.ask(post), range(12)))
    assert ([len(server.asked) for server in three], most) == ([4, 4, 4], [6])


def test_what_a_server_refuses_or_answers_beyond_a_limit_is_an_error_that_is_not_repeated(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the key comes from the environment; no error shows it."""
    monkeypatch.setenv(KEY, "s3cret")
    server = serve(400)
    for answer, limit, kind, says in (
        (400, 0, Refusal, r"status 400(.|\n)*context-length"), (401, 0, UsageError, KEY),
        ({"text": "x" * 1000}, 100, UsageError, "max_json=100"),
    ):  # fmt: skip
        server.answer = answer
        server.asked.clear()
        with pytest.raises(kind, match=says) as caught:
            servers(server).ask(lambda server, limit=limit: server.post({}, 30, limit))  # type: ignore[misc]
        assert "s3cret" not in str(caught.value)
        assert server.asked == ["Bearer s3cret"]


# ---------------------------------------------------------------- what a capture makes of answers

REQUEST = FeatureRequest((0,), True, "float32")
AWAY = "http://127.0.0.1:9"


@pytest.fixture
def target(tmp_path: Path) -> TargetSpec:
    return TransformersTarget(str(tiny_target(tmp_path)), device="cpu")


def open_capture(target: TargetSpec, *urls: str, **options: Any) -> closing[ServerCapture]:
    given = ServerOptions(**{"servers": urls, "self_test": False, **options})
    return closing(ServerCapture(target, REQUEST, given))


def test_a_capture_is_not_opened_where_no_server_answers(target: TargetSpec) -> None:
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:9(.|\n)*capture\.options\.servers"):
        open_capture(target, AWAY, patience=600, self_test=True)


def asked_in(body: Any) -> Any:
    return body["sampling_params"]["custom_params"][FIELD]


def capturing(target: TargetSpec, receipt: Callable[[Any, Any], Any], **says: Any) -> Any:
    """A server that captures for this target; `receipt` is of a request's body and its ask."""
    of_itself = {
        "version": VERSION, "problem": "", "model": "as asked", "layers": target.num_layers,
        "width": target.text_config.hidden_size, "vocabulary": target.vocab_size,
        "names": REQUEST.names, "sink": "file:/elsewhere", "image_token": 9, **says,
    }  # fmt: skip

    def answer(body: Any) -> dict[str, Any]:
        ask = asked_in(body)
        found = {"about": of_itself} if "about" in ask else receipt(body, ask)
        return {"meta_info": {FIELD: [found]}}

    return answer


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ({"version": 1}, "speaks version 1 of the capture, this side 2"),
        ({"problem": "no memory"}, "cannot capture: no memory"),
        ({"width": 9}, "serves another target"),
        ({"names": ["last_hidden"]}, r"capture hidden\.0, only last_hidden\n.*DRAFTCORE_LAYERS=0"),
        ({"sink": "file:/other"}, "stores into file:/other, another one into file:/elsewhere"),
    ],
)
def test_a_server_that_does_not_fit_the_run_or_the_others_is_refused(
    serve: Serve, target: TargetSpec, says: dict[str, Any], reason: str
) -> None:
    two = [serve(capturing(target, lambda body, ask: {}, **more)).url for more in ({}, says)]
    with pytest.raises(UsageError, match=reason):
        open_capture(target, *two)


@pytest.mark.parametrize("opens", [True, False])
def test_the_first_signal_ends_the_wait_for_a_server_that_never_answers(
    serve: Serve, target: TargetSpec, opens: bool
) -> None:
    """Be it while the capture is opened or later; nothing is left under way."""
    ended, usual = threading.Event(), capturing(target, lambda body, ask: {})

    def answer(body: Any) -> dict[str, Any]:
        if opens or "about" not in asked_in(body):
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
            ended.wait()
        found: dict[str, Any] = usual(body)
        return found

    def capture() -> None:
        with open_capture(target, serve(answer).url, timeout=6000, patience=6000) as opened:
            list(opened.features([batch(members=[[1, 2]])]))

    with stop_on_signal(), pytest.raises(RunEnded, match="asked to stop"):
        capture()
    ended.set()


def test_all_rows_of_a_batch_that_cannot_be_captured_are_named_at_once(
    serve: Serve, target: TargetSpec
) -> None:
    """Where no row failed in a way that may be over when it is tried again. One server is away."""
    kinds = {1: "failed", 2: "not-finite", 4: "short"}
    receipt = lambda body, ask: {"error": kinds[len(body["input_ids"])], "reason": "as it is"}  # noqa: E731
    with open_capture(target, AWAY, serve(capturing(target, receipt)).url) as capture:
        with pytest.raises(DraftcoreError, match=r"row 0 .* failed"):
            list(capture.features([batch(members=[[1], [1, 2], [1], [1, 2, 3, 4]])]))
        with pytest.raises(BadRows, match=r"capture\.dtype=float32") as caught:
            list(capture.features([batch(members=[[1, 2], [1, 2, 3, 4]])]))
        assert list(caught.value.reasons) == [0, 1]


# ---------------------------------------------------------------- images

SEEN = [5, 9, 9, 9, 5, 2]  # three tokens of an image


@pytest.fixture
def pictured(target: TransformersTarget, tmp_path: Path) -> CaptureBatch:
    """A row of these tokens, with an image that lies in a file."""
    image = Image(str(picture(tmp_path / "a.png", 0)), "")
    target.images = SimpleNamespace(inputs=lambda token_ids, images: {"input_ids": token_ids})
    return replace(batch(members=[SEEN]), ids=("ab" * 12,), images=((image,),))


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (None, "serves text alone"),
        (5, "1 images as 2 runs of token 5"),
        (9, r"row 0 has images(.|\n)*as ever"),
    ],
)
def test_images_that_a_server_reads_otherwise_or_not_at_all_are_refused(
    serve: Serve, target: TargetSpec, pictured: CaptureBatch, token: int | None, reason: str
) -> None:
    """They are sent as data, without their tokens but for one each, as sglang writes the others."""
    bodies = list[Any]()

    def receipt(body: Any, ask: Any) -> dict[str, Any]:
        bodies.append(body)
        return {"error": "misread", "reason": "as ever"}

    url = serve(capturing(target, receipt, image_token=token)).url
    with open_capture(target, url) as capture, pytest.raises(UsageError, match=reason):
        list(capture.features([pictured]))
    assert len(bodies) == (token == 9)
    for body in bodies:
        assert body["input_ids"] == [5, 9, 5, 2]
        assert asked_in(body)["read"] == digest(SEEN)
        (data,) = body["image_data"]
        shown = PIL.Image.open(BytesIO(urlopen(data).read()))
        assert shown.tobytes() == PIL.Image.open(pictured.images[0][0].uri).tobytes()


def test_once_images_were_captured_a_row_that_is_read_otherwise_is_left_out(
    serve: Serve, target: TargetSpec, pictured: CaptureBatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And features pass through this process where the run has another store than the server."""

    def receipt(body: Any, ask: Any) -> dict[str, Any]:
        if not ask["origin"]:
            return {"error": "misread", "reason": "its text names an image"}
        ref = SampleRef(ask["sample"], "0", "file:/elsewhere", (), len(SEEN), 0, ask["origin"])
        return {"ref": ref.to_json()}

    with open_capture(target, serve(capturing(target, receipt)).url) as capture:
        stored: Any = SimpleNamespace(provenance="made so")
        store: Any = SimpleNamespace(lookup=lambda ids: dict.fromkeys(ids, stored))
        for store.uri, reached in (("file:/elsewhere?max_bytes=9", True), ("file:/here", False)):
            assert capture.reaches(store) is reached
        assert "features pass through this process" in caplog.text
        capture.deliver(pictured, [{}], "made so", store)
        with pytest.raises(BadRows, match="its text names an image"):
            list(capture.features([pictured]))
