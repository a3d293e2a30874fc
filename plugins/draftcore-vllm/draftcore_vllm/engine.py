"""The engine `vllm`: decodes prompts on a vLLM server, and counts its rounds.

A round is a forward of the target that reads drafts. vLLM's counters are of all requests, so prompts go
one by one, and the differences before and after one are that prompt's: `served` by another client, they
do not fit its tokens, and that is an error.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftcore_eval.engines import Answer, Serving
from draftcore_eval.exported import served_as

from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import regular
from draftcore_vllm.internals import counted, deviates, drafting, require_ascending
from draftcore_vllm.options import EngineOptions
from draftcore_vllm.server import Server, StartedServer


class VllmEngine:
    """Serves a target, with a draft if there is one, at a server that is started or found."""

    def __init__(self, serving: Serving, options: EngineOptions) -> None:
        self._lock = threading.Lock()
        if serving.url:
            self.server = Server(serving.url, options.timeout)
            self.server.look()
        else:
            self.server = started = StartedServer(arguments(serving, options), options, "--option ")
            if serving.export and (said := deviates(config_of(serving.export), started.build)):
                warnings.warn(said, stacklevel=2)
        try:
            self._require_fit(serving)
        except BaseException:
            self.close()
            raise

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Continue a prompt. Raises DraftcoreError where the server ended, or serves others as well."""
        with self._lock:
            before = self._counted()
            answer = self.server.complete(list(map(int, prompt)), max_new_tokens)
            after = self._counted()
        tokens = tuple(answer["choices"][0]["token_ids"])
        follow = len(tokens) - 1  # the first is of the prompt's own forward
        if after is None or before is None:
            return Answer(tokens, follow)
        rounds, *accepted = (new - old for new, old in zip(after, before, strict=True))
        if not rounds <= follow <= rounds + sum(accepted):
            raise DraftcoreError(
                f"the server at {self.server.url} counted {rounds} rounds and {sum(accepted)} accepted "
                f"drafts for {len(tokens)} tokens\n  others ask it, too: let it serve this alone"
            )
        return Answer(tokens, rounds, tuple(accepted))

    def close(self) -> None:
        self.server.close()

    def _counted(self) -> tuple[int, ...] | None:
        return counted(self.server.get("/metrics"))

    def _require_fit(self, serving: Serving) -> None:
        """Raise UsageError for a server that was started otherwise than it is to serve."""
        if self.server.context < (room := room_of(serving)):
            raise UsageError(
                f"the server at {self.server.url} takes {self.server.context} tokens, and prompts with "
                f"their answers are up to {serving.context}, of which it would not draft the last\n"
                f"  start it with --max-model-len {room}"
            )
        drafts = len(self._counted() or [0]) - 1
        if serving.export and drafts != serving.num_drafts:
            raise UsageError(
                f"the server at {self.server.url} counts {drafts} drafts a round, and {serving.num_drafts} "
                "are to be served\n  start it with that in --speculative-config, and without "
                "--disable-log-stats"
            )


def arguments(serving: Serving, options: EngineOptions) -> dict[str, Any]:
    """Return what a server is started with. Raises UsageError for what vLLM would serve wrongly."""
    room = room_of(serving)
    ours = {
        "model": str(folder(serving.target, "the target")), "dtype": serving.dtype,
        "max_model_len": room, "max_num_seqs": serving.requests,
        # A forward may read a whole prompt, and of each request what it drafts.
        "max_num_batched_tokens": max(2048, room, serving.requests * (serving.num_drafts + 1)),
    }  # fmt: skip
    if serving.export is None:
        return ours
    folder(serving.export, "the draft")
    require_ascending(config := config_of(serving.export), serving.export)
    method = options.method or served_as(serving.export, "vllm", "method")
    parallel = bool(config.get("parallel_drafting"))
    return ours | drafting(serving.export, method, serving.num_drafts, parallel)


def room_of(serving: Serving) -> int:
    """Return what a prompt with its answer takes, in tokens, so that vLLM drafts up to its end.

    It leaves drafting out where those that it reads and those that it would draft then do not fit.
    """
    return serving.context + (2 * serving.num_drafts if serving.export else 0) + 1


def folder(path: Path, what: str) -> Path:
    if not (path / "config.json").is_file():
        raise UsageError(f"{what} is not in {path}: it holds no config.json\n  name its folder")
    return path.resolve()


def config_of(export: Path) -> Any:
    return json.loads(regular(export / "config.json").read_text(encoding="utf-8"))
