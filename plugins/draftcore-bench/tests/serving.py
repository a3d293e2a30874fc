"""A server with OpenAI's API that makes 13 tokens an answer: the first, and with a draft 4 rounds of 3.

A round drafts three tokens and accepts the first two, and takes as long as a token without the draft.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
Serve = Callable[..., "Server"]
TOKENS, ROUNDS, DRAFTED, ACCEPTED = 13, 4, 12, 8
STEP = 0.004  # seconds of a forward
COUNTERS = """# TYPE {name}:spec_decode_num_drafts_total counter
{name}:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {rounds}.0
{name}:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}.0
{name}:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
{name}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {rounds}.0
{name}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {rounds}.0
{name}:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="2"}} 0.0
{name}:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e9
"""
VERIFIED = 'sglang:spec_verify_calls_total{{tp="0"}} {rounds}.0\n'
# What an engine tells in an answer's last event, and where it has counters.
TELLS: dict[str, Json] = {
    "llamacpp": {"timings": {"draft_n": DRAFTED, "draft_n_accepted": ACCEPTED}},
    "vllm by a flag": {"metrics": {"speculative_decoding": {
        "num_spec_steps": ROUNDS, "num_draft_tokens": DRAFTED,
        "num_accepted_draft_tokens": ACCEPTED, "acceptance_histogram": [0, 0, ROUNDS, 0]}}},
    "sglang": {"sglext": {"spec_tokens_details": {
        "spec_verify_ct": ROUNDS, "spec_num_proposed_drafts": DRAFTED,
        "spec_num_correct_drafts": ACCEPTED, "spec_correct_drafts_histogram": [0, 0, ROUNDS, 0]}}},
}  # fmt: skip
COUNTS = {"vllm": COUNTERS, "sglang of before": VERIFIED}


class Server(ThreadingHTTPServer):
    """`asked` are the bodies of all requests, with the server's name; `failing` says how some fail.

    From request number `hold` on it answers once `held` is set, and `holding` says that it was asked.
    """

    daemon_threads = True
    key, hold = "", 0

    def __init__(self, engine: str, draft: bool, failing: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine, self.draft, self.failing = engine, draft, failing
        self.asked, self.answered, self.mutex = list[Json](), 0, threading.Lock()
        self.held, self.holding = threading.Event(), threading.Event()

    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that are gone."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.reply(401, {"error": "who are you?"})
        elif self.path == "/v1/models":
            model = {"id": "m", "owned_by": self.server.engine.partition(" ")[0]}
            self.reply(200, {"data": [model]})
        elif self.path == "/metrics" and self.server.draft and self.server.engine in COUNTS:
            n = self.server.answered
            counts = {"rounds": n * ROUNDS, "drafted": n * DRAFTED, "accepted": n * ACCEPTED}
            self.reply(200, COUNTS[self.server.engine].format(name="vllm", **counts))
        else:
            self.reply(404, {"error": "no such path"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, text = self.server, body["messages"][-1]["content"]
        with server.mutex:
            server.asked.append({**body, "server": server.url, "text": text})
            if server.hold and len(server.asked) >= server.hold:
                server.holding.set()
        if server.holding.is_set():
            server.held.wait()
        failing = server.failing if text == "question 1?" else ""
        if failing == "refuse":
            self.reply(500, {"error": f"no memory, said to {self.headers['Authorization']}"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for step in range(1 + (ROUNDS if server.draft else TOKENS - 1)):
            time.sleep(STEP)
            self.event({"choices": [{"delta": {"content": f"some {step}"}}]})
            if failing == "cut":
                self.close_connection = True
                return
        if failing == "fail":
            self.event({"error": {"message": "out of memory"}})
        usage = {"completion_tokens": TOKENS, "prompt_tokens": 5}
        told = TELLS.get(server.engine, {}) if server.draft else {}
        with server.mutex:
            server.answered += 1
        self.event({"choices": [], "usage": usage, **told})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, data: Json) -> None:
        self.chunk(f"data: {json.dumps(data)}\n\n".encode())

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def reply(self, status: int, body: Json | str) -> None:
        text = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass
