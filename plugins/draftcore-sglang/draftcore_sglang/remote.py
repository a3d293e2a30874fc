"""The capture `sglang-server`: running servers compute, and store by themselves what they captured.

Each prompt is a request of its own, many at a time, spread over the servers. A server batches them as
they come, so the last bits of features depend on its load. Where the servers' store is the
run's own, samples never pass through this process (`deliver`); otherwise they are read from the
servers' store and freed there (`features`). A receipt is believed only when the store has the sample.
A row's images go along as data, since a server may be on another machine, and it writes their tokens
again: it has to come out at the row's.

Shape letters: T tokens, H width.
"""

from __future__ import annotations

import base64
import functools
import io
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote
from urllib.request import urlopen

import torch
from draftcore_eval import selftest
from torch import Tensor

from draftcore.contracts.capture import (
    BadRows,
    CaptureBatch,
    CapturedBatch,
    FeatureRequest,
    RowError,
)
from draftcore.contracts.run import RunEnded
from draftcore.contracts.store import FeatureStore, SampleRef, StoreAway, StoreFull
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, UsageError, one_line
from draftcore.files import regular
from draftcore.stopping import asked_to_stop
from draftcore_sglang import plain
from draftcore_sglang.client import Server, ServerAway, Servers
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.wire import (
    AWAY,
    BUSY,
    FAILED,
    FIELD,
    FULL,
    MISREAD,
    NOT_FINITE,
    REFUSED,
    SHORT,
    VERSION,
    Ask,
    Refusal,
    digest,
    pack,
)
from draftcore_sglang.writer import open_store

logger = logging.getLogger(__name__)
T = TypeVar("T")
LOOK = 0.5  # seconds between two looks whether the run is asked to stop
PAUSE = 0.2  # seconds before a busy server is asked again
ATTEMPTS = 3  # of a sample that servers fail to capture
# In `about`: the layers that a server without this dist returns; that one took a row with images.
PLAIN, SEES = "plain", "sees"


class Prompt(NamedTuple):
    """A row's tokens, its images as data URIs, and what the target's processor makes of those."""

    row: str
    tokens: list[int]
    pictures: tuple[str, ...] = ()
    made: Any = None


class ServerCapture:
    """Captures at servers. Raises UsageError for servers that cannot serve this target or request."""

    def __init__(self, target: TargetSpec, request: FeatureRequest, options: ServerOptions) -> None:
        target.require_layers(request)
        self.target, self.request, self.options = target, request, options
        self._store: FeatureStore | None = None
        self._lock = threading.Lock()
        self._warned = False
        self._examples: dict[bool, tuple[Prompt, dict[str, Tensor]]] = {}  # that servers passed on
        self._sink: str | None = None  # of the first server, where the others must store as well
        self.servers = Servers(options.servers, options.in_flight, options.patience, self._look)
        self._capacity = options.in_flight * len(self.servers.all)
        self._threads = ThreadPoolExecutor(self._capacity, "sglang-server")
        try:
            self._wait([self._threads.submit(self.servers.look_at_all)])
        except BaseException:
            self.close()
            raise

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        """Yield features of the request's dtype on the CPU.

        Raises BadRows for rows with a feature that is not finite, DraftcoreError where no server
        answers.
        """
        pending: deque[tuple[CaptureBatch, list[Future[Any]]]] = deque()

        def first() -> CapturedBatch:
            batch, jobs = pending.popleft()
            found = self._wait(jobs)
            return CapturedBatch(batch, tuple(found))

        for batch in batches:
            jobs = [self._threads.submit(self._fetch, batch, at) for at in range(len(batch.rows))]
            pending.append((batch, jobs))
            while sum(len(jobs) for _, jobs in pending) >= self._capacity:
                yield first()
        while pending:
            yield first()

    def reaches(self, store: FeatureStore) -> bool:
        """Say whether the servers put into this very store."""
        sink = self._sink
        reached = bool(sink) and place(str(sink)) == place(store.uri)
        if sink and not reached and not self._warned:
            self._warned = True
            through = "features pass through this process: the servers' store is %s, the run's %s"
            logger.warning(through, sink, store.uri)
        return reached

    def deliver(
        self, batch: CaptureBatch, text: Sequence[dict[str, Tensor]], origin: str, to: FeatureStore
    ) -> tuple[SampleRef, ...]:
        """Have a batch captured and stored. Raises StoreFull and StoreAway as the servers met them."""
        ids, request, jobs = batch.ids, self.request, []
        for at, (sample, tensors) in enumerate(zip(ids, text, strict=True)):
            beside = {name: pack(value) for name, value in tensors.items()}
            ask = Ask(sample, request.names, request.dtype, origin, beside)
            jobs.append(self._threads.submit(self._captured, batch, at, ask))
        try:
            self._wait(jobs)
            held = to.lookup(ids)
            if all(sample in held and held[sample].provenance == origin for sample in ids):
                return tuple(held[sample] for sample in ids)
        except BaseException:
            done = [job for job in jobs if job.done() and not job.cancelled()]
            found = [job.result() for job in done if job.exception() is None]
            with suppress(DraftcoreError):
                to.free(ref for ref in found if isinstance(ref, SampleRef))
            raise
        raise UsageError(
            f"the servers say that they stored samples in {self._sink}, and "
            f"{to.uri} does not have them\n"
            "  set DRAFTCORE_SINK of the servers to the run's store, as seen from their machine"
        )

    def _wait(self, jobs: Sequence[Future[T]]) -> list[T]:
        """Return what all of them gave. Raises RunEnded where the run is asked to stop meanwhile."""
        while wait(jobs, LOOK).not_done:
            if asked_to_stop:
                self.close()
                raise RunEnded("asked to stop", "interrupted")
        return results(jobs)

    def close(self) -> None:
        self.servers.close()
        self._threads.shutdown(cancel_futures=True)
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # ------------------------------------------------------------ one sample

    def _fetch(self, batch: CaptureBatch, at: int) -> dict[str, Tensor]:
        """Read one row's features from the servers' store, or from a plain server's answer."""
        ask = Ask(uuid.uuid4().hex, self.request.names, self.request.dtype, "", {}, lent=True)
        found = self._captured(batch, at, ask)
        return self._read(found) if isinstance(found, SampleRef) else found

    def _read(self, ref: SampleRef) -> dict[str, Tensor]:
        with self._lock:
            if self._store is None:
                self._store = open_store(ref.uri)
            store = self._store
        with store.get(ref) as handle:
            features = {name: value.clone() for name, value in handle.tensors.items()}
        store.free([ref])
        return features

    def _captured(self, batch: CaptureBatch, at: int, ask: Ask) -> SampleRef | dict[str, Tensor]:
        """Capture one row at some server; what fails there is tried at others."""
        prompt = self._prompt(batch, at)
        attempts, deadline = 0, time.monotonic() + self.options.patience
        while True:
            try:
                return self.servers.ask(functools.partial(self._ask, prompt, ask))
            except Refusal as refusal:
                attempts += refusal.kind == FAILED
                again = refusal.kind == BUSY or (refusal.kind == FAILED and attempts < ATTEMPTS)
                if not again or time.monotonic() > deadline:
                    raise self._explained(refusal, batch, at) from refusal
                time.sleep(PAUSE)

    def _prompt(self, batch: CaptureBatch, at: int) -> Prompt:
        row, tokens = f"dataset row {batch.rows[at]}", [int(token) for token in batch.token_ids[at]]
        images = batch.images[at] if batch.images else ()
        if not images:
            return Prompt(row, tokens)
        assert self.target.images is not None  # or the row would have none
        try:
            made = self.target.images.inputs(tokens, images)
        except RowError as error:
            raise BadRows({at: f"{row}: {error}"}) from error
        return Prompt(row, tokens, tuple(png(image.uri) for image in images), made)

    def _ask(self, prompt: Prompt, ask: Ask, server: Server) -> SampleRef | dict[str, Tensor]:
        if prompt.pictures:
            return self._ask_to_see(prompt, ask, server)
        if PLAIN in server.about:
            return self._ask_plain(prompt.tokens, server)
        return self._stored(prompt, ask, server)[0]

    def _ask_to_see(self, prompt: Prompt, ask: Ask, server: Server) -> SampleRef:
        """Capture a row with images. Raises UsageError for a server that has read none as rows have them."""
        if server.about.get("image_token") is None:
            of = "runs no draftcore-sglang" if PLAIN in server.about else "serves text alone"
            raise UsageError(
                f"sglang server {server.url} {of}, and {prompt.row} has images\n"
                "  start it as the README of draftcore-sglang says, or capture with capture.name=hf"
            )
        try:
            with server.looking:
                if self.options.self_test and SEES not in server.about:
                    self._test(server, prompt)
                    server.about[SEES] = True
            ref, _ = self._stored(prompt, ask, server)
        except Refusal as refusal:
            if refusal.kind == MISREAD and SEES not in server.about:
                raise UsageError(
                    f"{prompt.row} has images, and cannot be captured at a server: {refusal}\n"
                    "  capture with capture.name=sglang or hf, or leave such rows out of the data"
                ) from refusal
            raise
        server.about[SEES] = True
        return ref

    def _stored(
        self, prompt: Prompt, ask: Ask, server: Server, **more: Any
    ) -> tuple[SampleRef, dict[str, Any]]:
        """Have a prompt captured. Raises Refusal; ServerAway for an answer without a receipt."""
        tokens = prompt.tokens
        if prompt.pictures:
            ask = replace(ask, read=digest(tokens))
            tokens = gathered(tokens, server.about["image_token"], len(prompt.pictures))
            more["image_data"] = prompt.pictures
        body = request_body(tokens, {FIELD: ask.to_json()})
        answer = server.post({**body, **more}, self.options.timeout)
        receipt = receipt_of(answer)
        if receipt is None:
            raise ServerAway(f"sglang server {server.url} answers without a receipt")
        if "error" in receipt:
            why = f"{server.url}: {one_line(receipt.get('reason', ''))}"
            raise Refusal(one_line(receipt["error"]), why)
        return ref_of(receipt, ask), answer

    def _ask_plain(self, tokens: Sequence[int], server: Server) -> dict[str, Tensor]:
        body = {**request_body(tokens, {}), "return_hidden_states": True}
        answer = server.post(body, self.options.timeout, self.options.max_json)
        layers = server.about[PLAIN]
        features = plain.read_states(answer, self.request, layers, len(tokens))
        for name, value_TH in features.items():
            if len(value_TH) != len(tokens):
                raise UsageError(
                    f"sglang server {server.url} returned {len(value_TH)} rows of {name} for "
                    f"{len(tokens)} tokens\n  start it with --chunked-prefill-size -1 and "
                    "--disable-radix-cache, or install draftcore-sglang beside it"
                )
        return features

    def _explained(self, refusal: Refusal, batch: CaptureBatch, at: int) -> DraftcoreError:
        row = f"dataset row {batch.rows[at]} (sample {batch.ids[at]})"
        if refusal.kind == FULL:
            each = self.request.token_bytes(int(self.target.text_config.hidden_size))
            return StoreFull(
                self._sink or "", needed=len(batch.token_ids[at]) * each, samples=1, free=0,
                limit="its bytes, as the server says",
                remedy="free samples, or raise max_bytes in the store's URI",
            )  # fmt: skip
        if refusal.kind == AWAY:
            return StoreAway(str(refusal))
        if refusal.kind == NOT_FINITE:
            wider = "capture in a wider type (capture.dtype=float32), or leave the row out"
            return BadRows({at: f"{row}: {refusal}\n  {wider}"})
        if refusal.kind in (REFUSED, SHORT, MISREAD):
            return BadRows({at: f"{row}: {refusal}"})
        return DraftcoreError(f"{row} is not captured: {refusal.kind}: {refusal}")

    # ------------------------------------------------------------ what a server is

    def _look(self, server: Server) -> dict[str, Any]:
        """Ask a server what it is, and refuse it where it does not fit."""
        prompt = selftest.prompt_of(self.target)
        answer = server.post(request_body(prompt, {FIELD: {"about": True}}), self.options.timeout)
        receipt = receipt_of(answer)
        if receipt is None:
            return self._look_plain(server)
        about: dict[str, Any] = receipt["about"]
        self._require_fit(server, about)
        if self.options.self_test:
            try:
                self._test(server, Prompt("a short prompt", prompt))
            except Refusal as refusal:
                raise UsageError(
                    f"a short prompt was not captured: {refusal.kind}: {refusal}\n"
                    "  look into the server's log"
                ) from refusal
        return about

    def _look_plain(self, server: Server) -> dict[str, Any]:
        layers = plain.layers_of(server, self.options.timeout)
        plain.require_served(server, self.request, layers)
        self._require_alike(server, "")
        logger.warning(
            "sglang server %s does not run draftcore-sglang: it sends states as text, slowly and up to "
            "max_json=%d bytes\n  install draftcore-sglang beside it",
            server.url,
            self.options.max_json,
        )
        return {PLAIN: layers}

    def _require_fit(self, server: Server, about: Mapping[str, Any]) -> None:
        if about.get("version") != VERSION:
            raise UsageError(
                f"sglang server {server.url} speaks version {one_line(about.get('version'))} of the capture, "
                f"this side {VERSION}\n  use one version of draftcore-sglang on both sides"
            )
        if not about["sink"].isprintable():
            raise ValueError("the URI of a store that cannot be printed")
        if about["problem"]:
            raise UsageError(
                f"sglang server {server.url} cannot capture: {one_line(about['problem'])}\n"
                "  start it as the README of draftcore-sglang says"
            )
        text = self.target.text_config
        ours = (self.target.num_layers, int(text.hidden_size), self.target.vocab_size)
        theirs = tuple(int(about[name]) for name in ("layers", "width", "vocabulary"))
        if ours != theirs:
            raise UsageError(
                f"sglang server {server.url} serves another target, {one_line(about['model'])}\n"
                f"  (layers, width, vocabulary) there: {theirs}, of {self.target.path!r}: {ours}\n"
                "  start it with the run's target, or correct capture.options.servers"
            )
        if lacking := [name for name in self.request.names if name not in about["names"]]:
            layers = ",".join(map(str, self.request.layers))
            raise UsageError(
                f"sglang server {server.url} does not capture {', '.join(lacking)}, only "
                f"{one_line(', '.join(about['names']))}\n  start it with DRAFTCORE_LAYERS={layers}"
            )
        self._require_alike(server, about["sink"])

    def _require_alike(self, server: Server, sink: str) -> None:
        """Refuse a server that stores elsewhere than the others; '' for nowhere."""
        with self._lock:
            self._sink = sink if self._sink is None else self._sink
        here, there = place(sink), place(self._sink)
        if here != there:
            raise UsageError(
                f"sglang server {server.url} stores into {one_line(here or 'nothing')}, another one into "
                f"{one_line(there or 'nothing')}\n"
                "  set DRAFTCORE_SINK to one store on all servers, with draftcore-sglang beside each"
            )

    def _test(self, server: Server, prompt: Prompt) -> None:
        """Compare a prompt's features with transformers', and its prediction with the head's.

        One with images is the first that a server captured. Raises Refusal where this one does not.
        """
        request, seen = replace(self.request, last_hidden=True, dtype="float32"), prompt.made
        with self._lock:
            prompt, expected = self._examples.get(seen is not None) or (
                prompt,
                selftest.reference(self.target, request, prompt.tokens, "sglang", seen) or {},
            )
        ask = Ask(uuid.uuid4().hex, request.names, "float32", "", {}, lent=True)
        ref, answer = self._stored(prompt, ask, server, return_logprob=True)
        found = self._read(ref)
        logprob, token, _ = answer["meta_info"]["output_token_logprobs"][0]
        theirs, who = torch.tensor([logprob]), f"sglang server {server.url}"
        selftest.require_own_head(self.target, found["last_hidden"][-1], theirs, who, [int(token)])
        selftest.require_same(
            self.target, found, expected, "sglang", selftest.SEEN * (seen is not None)
        )
        self._examples[seen is not None] = prompt, expected


def results(jobs: Sequence[Future[T]]) -> list[T]:
    """Return what all rows of a batch gave. Raises one BadRows for all that cannot be captured.

    Any other error is raised first: it may be over when the batch is tried again.
    """
    errors = [error for job in jobs if (error := job.exception()) is not None]
    bad: dict[int, str] = {}
    for error in errors:
        if not isinstance(error, BadRows):
            raise error
        bad |= error.reasons
    if bad:
        raise BadRows(bad)
    return [job.result() for job in jobs]


def request_body(tokens: Sequence[int], custom: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request for one new token, with a key that keeps it out of the prefix cache."""
    params = {"max_new_tokens": 1, "temperature": 0, "custom_params": dict(custom) or None}
    return {"input_ids": list(tokens), "sampling_params": params, "extra_key": uuid.uuid4().hex}


def gathered(tokens: Sequence[int], image_token: int, images: int) -> list[int]:
    """Return tokens with one in the place of each image, as sglang is given them; it adds the others.

    Raises Refusal where that are more or fewer places than images.
    """
    runs = [(token, list(run)) for token, run in groupby(tokens)]
    places = sum(token == image_token for token, _ in runs)
    if places != images:
        raise Refusal(
            MISREAD,
            f"the target's processor writes {images} images as {places} runs of token {image_token}, "
            "and sglang takes one run for an image",
        )
    return [one for token, run in runs for one in (run[:1] if token == image_token else run)]


def png(uri: str) -> str:
    """Return an image as a data URI that all read alike: turned as its camera says, in RGB, exact."""
    import PIL.Image
    from transformers.image_utils import load_image

    data = urlopen(uri).read() if uri.startswith("data:") else regular(Path(uri)).read_bytes()
    file = io.BytesIO()
    load_image(PIL.Image.open(io.BytesIO(data))).save(file, "png", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def receipt_of(answer: Any) -> dict[str, Any] | None:
    """Return the receipt in an answer; None where the server wrote none."""
    found = answer.get("meta_info", {}).get(FIELD) if isinstance(answer, dict) else None
    return found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else None


def ref_of(receipt: Mapping[str, Any], ask: Ask) -> SampleRef:
    """Return the ref in a receipt. Raises ValueError for that of another sample, which would be freed."""
    ref = SampleRef.from_json(receipt["ref"])
    if ref.feature_id != ask.sample:
        raise ValueError(f"{ref.feature_id} was stored, and {ask.sample} was asked for")
    return ref


def place(uri: str) -> str:
    """Return the part of a store's URI that tells it from other stores: all but the options."""
    return unquote(uri.partition("?")[0])
