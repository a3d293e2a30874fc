"""Conversations, and a server with OpenAI's API whose answers and failures a test writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from click.testing import Result
from draftcore_data.conversations import Conversation
from draftcore_data.rendering import Renderer
from draftcore_hf.target import TransformersTarget
from transformers import PreTrainedTokenizerFast

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
Json = dict[str, Any]
Cli = Callable[..., Result]
Serve = Callable[..., "Server"]
Jsonl = Callable[..., str]
MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
# Returns a message, a whole body with its status, or None to break the connection.
Behaviour = Callable[[Json], Json | tuple[int, Json] | None]


class Server(ThreadingHTTPServer):
    """Answers by `behave`; `asked` has the bodies of all questions, `headers` those of the last."""

    daemon_threads = True

    def __init__(self, behave: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave, self.asked, self.headers = behave, list[Json](), dict[str, str]()
        self.changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def wait_for(self, questions: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= questions, 60)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.changed:
            self.server.asked.append(asked)
            self.server.headers = dict(self.headers)
            self.server.changed.notify_all()
        answer = self.server.behave(asked)
        if answer is None:
            self.close_connection = True
        elif isinstance(answer, tuple):
            self.reply(*answer)
        else:
            finish = answer.pop("finish", "stop")
            usage = {"prompt_tokens": len(asked["messages"]), "completion_tokens": 3}
            choice = {"message": {"role": "assistant", **answer}, "finish_reason": finish}
            self.reply(200, {"choices": [choice], "usage": usage})

    def reply(self, status: int, body: Json) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def echo(asked: Json) -> Json:
    """Answer so that it shows which turn of which conversation was asked."""
    said = [message["content"] for message in asked["messages"]]
    return {"content": f"answer {len(said)} to {said[-1]}"}


def rows_of(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_rows(file: Path, *rows: Any) -> Path:
    """Write rows as JSON lines; a string stands for a raw line."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(line + "\n" for line in lines))
    return file


def chat(*turns: str, **more: Any) -> Json:
    """A conversation of user and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)], **more}


def write_run(folder: Path, target: object, options: Json | None = None, **data: Any) -> Path:
    """Write the YAML of a run."""
    settings = {
        "run": str(folder / "run"), "target": {"path": str(target), "device": "cpu"}, "data": data,
        "algorithm": {"name": "eagle3", "options": options or {}},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(settings))
    return folder / "run.yaml"


def require_generated(answers: Path, target_folder: Path, tokens: int) -> int:
    """Require of every answer in a file what the target generates; return how many rows there are."""
    target = TransformersTarget(str(target_folder), device="cpu")
    model, tokenizer, rows = target.load_model(), target.load_tokenizer(), rows_of(answers)
    renderer = Renderer(tokenizer)
    for messages in [row["messages"] for row in rows]:
        for at in range(1, len(messages), 2):
            prompt = renderer.prompt_ids(Conversation("x", tuple(messages[: at + 1])))
            (generated,) = model.generate([prompt], tokens)
            assert messages[at]["content"] == tokenizer.decode(generated, skip_special_tokens=True)
    return len(rows)
