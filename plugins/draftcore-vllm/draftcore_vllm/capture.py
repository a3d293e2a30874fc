"""The captures `vllm` and `vllm-server`: an unpatched vLLM computes, and writes what it captured into files.

A row is a request for one token, whose prompt is the row. Its answer names a file, which appears a step
later, whole. vLLM gives layers' outputs; the final norm is applied here.

Shape letters: T tokens, L layers, H width.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import torch
from draftcore_eval import selftest
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.capture import BadRows, CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, UsageError, one_line
from draftcore.files import regular
from draftcore_vllm.internals import capturing, layers_of
from draftcore_vllm.norm import final_norm
from draftcore_vllm.options import ServerOptions, VllmOptions
from draftcore_vllm.server import RequestRefused, Server, ServerAway, StartedServer

MEMORY = "/dev/shm"  # where a started server's files lie


class VllmCapture:
    """Captures at a server, several rows at a time.

    Raises UsageError where it does not capture what was asked for, or computes otherwise than transformers.
    """

    def __init__(
        self, target: TargetSpec, request: FeatureRequest, options: VllmOptions | ServerOptions
    ) -> None:
        target.require_layers(request)
        self.target, self.request, self.options = target, request, options
        self.layers, self.closed = layers_of(request, target.num_layers), False
        self.norm = final_norm(target) if request.last_hidden else None
        self.source = source_of(target, frozenset(self.layers.values()), options)
        self.threads = ThreadPoolExecutor(options.in_flight, "draftcore-vllm")
        try:
            if options.self_test and not self.source.tested:
                self._test(selftest.prompt_of(target))
            self.source.start()
        except BaseException:
            self.close()
            raise

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        """Yield features of the request's dtype on the CPU. Raises BadRows for rows that are too long."""
        for batch in batches:
            jobs = [self.threads.submit(self._row, tokens) for tokens in batch.token_ids]
            wait(jobs)
            yield CapturedBatch(batch, tuple(results(batch, jobs)))

    def close(self) -> None:
        """Let go of the server; one that was started ends with the last capture that does so."""
        if not self.closed:
            self.closed = True
            self.threads.shutdown(cancel_futures=True)
            self.source.leave()

    def _row(self, tokens: Sequence[int]) -> dict[str, Tensor]:
        dtype: torch.dtype = getattr(torch, self.request.dtype)
        return self._captured(list(map(int, tokens)), dtype)[0]

    def _captured(
        self, tokens: list[int], dtype: torch.dtype, **more: Any
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Capture a row; return its features and the answer."""
        server = self.source.server
        try:
            answer = server.complete(tokens, 1, **more)
        except ServerAway as error:
            if isinstance(server, StartedServer):
                # No row is at fault, and a process begun anew starts another server.
                raise RuntimeError(str(error)) from error
            raise
        told = answer.get("kv_transfer_params") or {}
        if not {"hidden_states_path", "layers"} <= told.keys():
            raise UsageError(
                f"the server at {server.url} captures nothing\n"
                "  start it as the README of draftcore-vllm says"
            )
        if lacking := sorted(set(self.layers.values()) - set(told["layers"])):
            raise UsageError(
                f"the server at {server.url} captures vLLM's layers {one_line(told['layers'])}, and "
                f"{lacking} are asked for\n  start it with all of {sorted(self.layers.values())}"
            )
        tensors = self._read(self.source.folder / Path(told["hidden_states_path"]).name)
        states_TLH, found = tensors["hidden_states"], tensors["token_ids"].tolist()
        if found != tokens or len(states_TLH) != len(tokens):
            raise DraftcoreError(
                f"the server at {server.url} captured {len(states_TLH)} states of {len(found)} tokens, "
                f"for a row of {len(tokens)}"
            )
        return self._features(states_TLH, told["layers"], dtype), answer

    def _features(
        self, states_TLH: Tensor, layers: Sequence[int], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        features = dict[str, Tensor]()
        for name, layer in self.layers.items():
            state_TH = states_TLH[:, layers.index(layer)]
            if name == "last_hidden":
                assert self.norm is not None
                state_TH = self.norm(state_TH)
            features[name] = state_TH.to(dtype).contiguous()
        return features

    def _read(self, file: Path) -> dict[str, Tensor]:
        """Wait for a file, and take it away."""
        deadline = time.monotonic() + self.options.timeout
        while not file.exists():
            if time.monotonic() > deadline:
                raise DraftcoreError(
                    f"{file} has not come in {self.options.timeout:g} seconds\n"
                    "  set `folder` to where the server writes, as this machine reaches it"
                )
            time.sleep(0.002)
        tensors: dict[str, Tensor] = load_file(regular(file))
        file.unlink()
        return tensors

    def _test(self, prompt: list[int]) -> None:
        """Compare a prompt's features with transformers', and its prediction with the head's.

        transformers computes them before a server takes the device's memory.
        """
        expected = selftest.reference(self.target, self.request, prompt, "vLLM")
        self.source.start()
        try:
            found, answer = self._captured(prompt, self.target.dtype, logprobs=0)
        except RequestRefused as error:
            raise UsageError(f"a short prompt was not captured: {error}") from error
        if self.norm is not None:
            choice = answer["choices"][0]
            theirs = torch.tensor(choice["logprobs"]["token_logprobs"][:1])
            state_H, tokens = found["last_hidden"][-1], choice["token_ids"][:1]
            selftest.require_own_head(self.target, state_H, theirs, "vLLM", tokens)
        selftest.require_same(self.target, found, expected or {}, "vLLM")
        self.source.tested = True


def results(
    batch: CaptureBatch, jobs: Sequence[Future[dict[str, Tensor]]]
) -> list[dict[str, Tensor]]:
    """Return what all rows gave. Raises BadRows for those that the server refuses, any other error first."""
    errors = {at: error for at, job in enumerate(jobs) if (error := job.exception())}
    bad = {
        at: f"dataset row {batch.rows[at]} (sample {batch.ids[at]}): {error}\n"
        "  lower data.max_length, or raise what the server takes"
        for at, error in errors.items()
        if isinstance(error, RequestRefused)
    }
    for at, error in errors.items():
        if at not in bad:
            raise error
    if bad:
        raise BadRows(bad)
    return [job.result() for job in jobs]


# ---------------------------------------------------------------- servers


class Source:
    """A server that captures, and the folder that it writes into: one that runs, or one to be started.

    A run opens a second capture for its held-out rows, and the target is in memory once.
    """

    def __init__(
        self, target: TargetSpec, layers: frozenset[int], options: VllmOptions | ServerOptions
    ) -> None:
        self.target, self.layers, self.options = target, layers, options
        self.users, self.tested, self.folder = 0, False, Path()
        self.server = cast(Server, None)
        self.memory: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Start the server, or look at the one that runs; once."""
        if self.server is not None:
            return
        if isinstance(self.options, ServerOptions):
            self.folder = Path(self.options.folder)
            self.server = Server(self.options.server, self.options.timeout)
            self.server.look()
            return
        place = MEMORY if os.path.isdir(MEMORY) else None
        self.memory = tempfile.TemporaryDirectory(prefix="draftcore-vllm-", dir=place)
        self.folder = Path(self.memory.name)
        ours = arguments(self.target, self.options) | capturing(self.layers, self.folder)
        self.server = StartedServer(ours, self.options, "capture.options.")

    def leave(self) -> None:
        """End one use; with the last one ends what was started."""
        self.users -= 1
        if not self.users:
            _open.remove(self)
            if self.server is not None:
                self.server.close()
            if self.memory is not None:
                self.memory.cleanup()


def source_of(
    target: TargetSpec, layers: frozenset[int], options: VllmOptions | ServerOptions
) -> Source:
    """Return, for one user more, what captures these layers: open already in this process, or new."""
    alike = (
        source
        for source in _open
        if source.options == options and known_by(source.target) == known_by(target)
        if isinstance(options, ServerOptions) or layers <= source.layers
    )
    if (source := next(alike, None)) is None:
        _open.append(source := Source(target, layers, options))
    source.users += 1
    return source


def known_by(target: TargetSpec) -> tuple[Any, ...]:
    return target.path, target.revision, target.dtype


def arguments(target: TargetSpec, options: VllmOptions) -> dict[str, Any]:
    """Return what a server is started with, beside what lets it capture."""
    positions = getattr(target.text_config, "max_position_embeddings", None)
    context = min(options.max_tokens, positions or options.max_tokens) + 1
    return {
        "model": target.path, "dtype": str(target.dtype).removeprefix("torch."),
        "max_model_len": context, "max_num_seqs": options.in_flight,
        # A row goes through whole, not in chunks.
        "max_num_batched_tokens": max(context, options.in_flight),
        **({"revision": target.revision} if target.revision else {}),
        **({"trust_remote_code": True} if target.source.get("trust_remote_code") else {}),
    }  # fmt: skip


_open: list[Source] = []
