"""The engine `llamacpp`: a server in a process of its own, or one that is found, asked by HTTP.

Settings are those under which drafts, and so rounds, are the ones of `draftcore eval`: caches of 32 bits,
no flash attention, one thread. llama.cpp's defaults accept a little less.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from draftcore_eval.engines import Answer, Serving

from draftcore.errors import DraftcoreError, UsageError, one_line, plural, raised
from draftcore_llamacpp.options import LlamaCppOptions

if TYPE_CHECKING:
    from draftcore_llamacpp.convert import Converted

PATIENCE = 600.0  # seconds for the next part of an answer
INSTALL = "pip install 'draftcore-llamacpp[serve]'"
TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
GREEDY = {
    "temperature": 0.0, "top_k": 1, "samplers": ["top_k"], "seed": 0,
    "cache_prompt": False, "return_tokens": True,
}  # fmt: skip


class LlamaCpp:
    """A server of llama.cpp, with a draft or without."""

    def __init__(self, serving: Serving, options: LlamaCppOptions) -> None:
        self.serving, self.options = serving, options
        self.closing = ExitStack()
        self.process: subprocess.Popen[str] | None = None
        self.converted: Converted | None = None
        if serving.url:
            self.url = serving.url.rstrip("/")
            return
        if find_spec("xllamacpp") is None:
            raise UsageError(f"the engine 'llamacpp' needs xllamacpp\n  {INSTALL}")
        if serving.dtype not in TYPES:
            known = ", ".join(TYPES)
            raise UsageError(f"llama.cpp serves no {serving.dtype!r}\n  ask for one of {known}")
        self.kind = TYPES[serving.dtype]
        with ExitStack() as undone:
            undone.callback(self.close)
            self.folder = Path(self.closing.enter_context(tempfile.TemporaryDirectory()))
            self.said: IO[bytes] = self.closing.enter_context(tempfile.TemporaryFile())
            self.target = options.target or self.folder / "target.gguf"
            if options.target is None:
                from draftcore_llamacpp.convert import write_target  # imports torch

                write_target(serving.target, self.target, self.kind)
            self._start(serving.export)
            undone.pop_all()

    def load_draft(self, export: Path) -> None:
        """Serve another draft of the target, whose file is kept."""
        if self.process is None:
            raise UsageError(f"{self.url} was found, and keeps its draft\n  start it with another")
        self._start(export)

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        asked = {**GREEDY, "prompt": list(prompt), "n_predict": max_new_tokens}
        tokens, rounds, total = list[int](), dict[float, tuple[int, int]](), 0
        try:
            for part in self._parts({**asked, "stream": True, "timings_per_token": True}):
                tokens += part["tokens"]
                total, times = part["tokens_predicted"], part["timings"]
                if not part["stop"]:  # tokens of a round have one time
                    rounds[times["predicted_ms"]] = len(tokens), times.get("draft_n_accepted", 0)
            if len(tokens) == total:
                return Answer(tuple(tokens), len(rounds) - 1, self._by_position([*rounds.values()]))
            # Of a character that takes several tokens only the last was sent. Where so many are asked
            # for, the last is the target's own, also where it is an end token: else that may be a draft.
            (part,) = self._parts({**asked, "n_predict": total})
            tokens, accepted = part["tokens"], part["timings"].get("draft_n_accepted", 0)
            return Answer(tuple(tokens), len(tokens) - 1 - accepted)
        except (KeyError, TypeError, AttributeError) as error:
            raise DraftcoreError(
                f"{self.url} answers in another form than llama.cpp's server: {raised(error)}\n"
                "  ask the URL of llama-server, of a version as new as xllamacpp 2026.10"
            ) from error

    def _by_position(self, rounds: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Count rounds by what they accepted, given the tokens and the accepted drafts after each.

        What was accepted beyond an end token does not count.
        """
        counts = [
            min(after[1] - before[1], after[0] - before[0])
            for before, after in itertools.pairwise(rounds)
        ]
        return tuple(sum(n > k for n in counts) for k in range(self.serving.num_drafts))

    def command(self) -> str:
        """Return what makes the files and serves them by hand."""
        if self.converted is None:
            return "draftcore gguf run.yaml --target --out target.gguf\nllama-server -m target.gguf"
        made = "draftcore gguf run.yaml --export <draft> --out draft.gguf"
        served = self.converted.command("target.gguf", "draft.gguf", self.serving.num_drafts)
        return f"{made}  # and the target: --target --out target.gguf\n{served}"

    def close(self) -> None:
        self._stop()
        self.closing.close()

    def _start(self, export: Path | None) -> None:
        """Start the server anew, with the draft of an export or without."""
        serving, settings = self.serving, dict[str, Any]()
        if export is not None:
            from draftcore_llamacpp.convert import write_draft  # imports torch

            file, tokenizer = self.folder / "draft.gguf", self.options.target
            self.converted = converted = write_draft(
                export, serving.target, file, self.kind, tokenizer
            )
            if converted.num_drafts not in (None, serving.num_drafts):
                raise UsageError(
                    f"{plural(serving.num_drafts, 'draft')} a round were asked for, and llama.cpp "
                    f"computes those of {export} as they were trained with {converted.num_drafts} "
                    f"alone\n  ask for {converted.num_drafts}, all of a block"
                )
            settings["method"] = converted.method.served_as or converted.method.name
        settings |= {
            "target": str(self.target),
            "draft": str(self.folder / "draft.gguf") if export else "",
            "num_drafts": serving.num_drafts,
            "context": serving.context + serving.num_drafts + 1,
            "requests": serving.requests,
            "threads": self.options.threads,
        }
        self._stop()
        self.said.truncate(0)
        command = [sys.executable, "-m", "draftcore_llamacpp.child"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.said}
        self.process = subprocess.Popen(command, text=True, **pipes)
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps(settings) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended("it started") from None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise self._ended("it read its files")

    def _stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.communicate()

    def _parts(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post a prompt; yield the parts of the answer. Raises DraftcoreError where there is none."""
        headers = {"Content-Type": "application/json"}
        request = Request(f"{self.url}/completion", json.dumps(body).encode(), headers)
        part: dict[str, Any] = {}
        what = f"a prompt of {plural(len(body['prompt']), 'token')}"
        try:
            with urlopen(request, timeout=PATIENCE) as response:
                for line in response:
                    if text := line.decode().removeprefix("data:").strip():
                        yield (part := json.loads(text))
            if not part.get("stop"):
                raise ConnectionError("its answer breaks off")
        except HTTPError as error:
            said = one_line(error.read().decode(errors="replace"))
            raise DraftcoreError(
                f"llama.cpp refuses {what} (status {error.code}): {said}\n"
                f"  its context may be too short for it and {body['n_predict']} more"
            ) from error
        except (URLError, HTTPException, OSError, ValueError) as error:
            if self.process is not None:
                raise self._ended(f"it decoded {what}") from error
            raise DraftcoreError(
                f"{self.url} does not answer: {raised(error)}\n  start the server again"
            ) from error

    def _ended(self, when: str) -> DraftcoreError:
        """Say how the server's process ended, and what it said last."""
        assert self.process is not None
        self.process.kill()  # if it has not ended, it answers no more
        status = self.process.wait()
        how = f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()[-4:]
        return DraftcoreError(
            "\n  ".join(
                [
                    f"llama.cpp ended {how} while {when}",
                    *map(one_line, lines),
                    "a file that it does not take ends it: convert target and draft again, or "
                    "report what it says",
                ]
            )
        )
