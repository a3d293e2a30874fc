"""The engine `sglang`: decodes prompts on a server that is started or found, and says their rounds.

sglang says of each answer how often the target verified drafts, and how many of them were right: so
prompts may be under way together, and others may ask the same server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftcore_eval.engines import Answer, Serving
from draftcore_eval.exported import served_as

from draftcore.errors import UsageError
from draftcore_sglang.client import Server, ServerAway, understood
from draftcore_sglang.launched import Launched
from draftcore_sglang.options import EngineOptions

SPARE = 2  # positions of a context that sglang leaves empty


class SglangEngine:
    """Serves a target, with a draft if there is one."""

    def __init__(self, serving: Serving, options: EngineOptions) -> None:
        self.num_drafts = serving.num_drafts if serving.export else 0
        self.options, self.launched = options, None
        if (url := serving.url) is None:
            self.launched = Launched(flags(arguments(serving, options)), options)
            url = self.launched.url
        self.server = Server(url)
        try:
            if self.launched:
                self.launched.wait(self.server)
            self._require_fit(serving)
        except BaseException:
            self.close()
            raise

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Continue a prompt. Raises ServerAway, with the cause where a server that was started ended."""
        greedy = {"temperature": 0, "repetition_penalty": 1.0, "max_new_tokens": max_new_tokens}
        body = {"input_ids": list(map(int, prompt)), "sampling_params": greedy}
        try:
            with understood(self.server):
                return read_answer(self.server.post(body, self.options.timeout), self.num_drafts)
        except ServerAway as error:
            raise self.launched.away(error) if self.launched else error from None

    def close(self) -> None:
        """End what was started; a server that was found goes on."""
        if self.launched:
            self.launched.close()

    def _require_fit(self, serving: Serving) -> None:
        """Raise UsageError for a server that was started otherwise than it is to serve."""
        with understood(self.server):
            (model,) = self.server.get("/v1/models", self.options.timeout)["data"][:1]
            context = int(model["max_model_len"])
            said = self.server.get("/server_info", self.options.timeout)
            drafted = int(said["speculative_num_draft_tokens"] or 1) - 1
            drafts = drafted if said["speculative_algorithm"] else 0
        if context < serving.context + SPARE:
            raise UsageError(
                f"the server at {self.server.url} takes {context} tokens, {SPARE} of which stay empty, and "
                f"prompts with their answers are up to {serving.context}\n  ask shorter ones, or "
                "for fewer tokens (eval.max_new_tokens)"
            )
        if self.num_drafts and drafts != self.num_drafts:
            raise UsageError(
                f"the server at {self.server.url} serves {drafts} drafts a round, and {self.num_drafts} are "
                f"to be served\n  start it with --speculative-num-draft-tokens {self.num_drafts + 1}, "
                "and of EAGLE-3 with as many steps as drafts and --speculative-eagle-topk 1"
            )


def read_answer(answer: Mapping[str, Any], num_drafts: int) -> Answer:
    """Return what sglang's answer says. What it accepted behind the end of an answer counts here."""
    tokens, said = tuple(map(int, answer["output_ids"])), answer["meta_info"]
    if not num_drafts:
        return Answer(tokens, len(tokens) - 1)
    # Where nothing was verified neither is said.
    rounds, counted = said.get("spec_verify_ct", 0), said.get("spec_correct_drafts_histogram", [])
    return Answer(tokens, rounds, tuple(sum(counted[n:]) for n in range(1, num_drafts + 1)))


def arguments(serving: Serving, options: EngineOptions) -> dict[str, Any]:
    """Return what a server is started with, by the names of ServerArgs.

    Raises UsageError for an argument of the user's that would make these untrue.
    """
    ours: dict[str, Any] = {
        "model_path": folder(serving.target, "the target"), "dtype": serving.dtype,
        "max_running_requests": serving.requests,
    }  # fmt: skip
    if serving.export:
        ours |= drafting(serving.export, serving.num_drafts, options.algorithm)
    if both := sorted({*ours, "host", "port"} & set(options.args)):
        raise UsageError(
            f"--option args sets {', '.join(both)}, which draftcore sets by itself\n  leave it out"
        )
    # A prompt whose beginning another one had is computed whole, too.
    usual: dict[str, Any] = {"disable_radix_cache": True}
    if serving.dtype == "float32":
        usual["attention_backend"] = "triton"  # no other of sglang's kernels for GPUs take it
    return {**usual, **options.args, **ours}


def drafting(export: Path, num_drafts: int, algorithm: str | None) -> dict[str, Any]:
    """Return the arguments with which a server drafts by an export."""
    path = folder(export, "the draft")
    name = algorithm or served_as(export, "sglang", "algorithm")
    chain = {"speculative_num_steps": num_drafts, "speculative_eagle_topk": 1}
    return {
        "speculative_algorithm": name, "speculative_draft_model_path": path,
        "speculative_num_draft_tokens": num_drafts + 1, **(chain if "EAGLE" in name else {}),
    }  # fmt: skip


def folder(path: Path, what: str) -> str:
    if not (path / "config.json").is_file():
        raise UsageError(f"{what} is not in {path}: it holds no config.json\n  name its folder")
    return str(path.resolve())


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Write arguments for sglang's launcher; True is a flag alone, False none."""
    words = list[str]()
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        elif value is True:
            words.append(flag)
        elif value is not False:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return words
