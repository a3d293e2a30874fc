"""The server's end of the feature store: one thread that writes, off the scheduler's path.

The scheduler hands over slices of what the forward left on the device, with an event that says when
they are there, and goes on. The thread copies them on a stream of its own into pinned memory, which
torch pools, and puts them into the store that the launch environment names. What is under way is
bounded in bytes: beyond that a capture is refused as `busy`, and the client asks again later.

The store is opened at the first put, and closed after a minute without one, so that a server that
waits for the next run keeps no memory of the last.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftcore.binding import bind
from draftcore.errors import DraftcoreError
from draftcore.plugins import load
from draftcore.records import FeatureStore, SampleRef, StoreItem
from draftcore.stores import StoreAway, StoreError, StoreFull
from draftcore_sglang.wire import (
    AWAY,
    BUSY,
    FAILED,
    FULL,
    NOT_FINITE,
    REFUSED,
    Ask,
    Refusal,
    unpack,
)

IDLE = 60.0  # seconds
LENT = 600.0  # seconds that a lent sample may be read, if the client does not free it
AT_ONCE = 64  # samples of one put


@dataclass(frozen=True)
class Job:
    """A prompt whose forward was launched. `parts` are its pieces in order, one for each chunk."""

    ask: Ask
    tokens: int
    parts: Sequence[Part]
    answer: Callable[[dict[str, Any]], None]

    @property
    def nbytes(self) -> int:
        states = (state for part in self.parts for state in part.states.values())
        return sum(state.numel() * state.element_size() for state in states)


@dataclass(frozen=True)
class Part:
    """States [t, H] of consecutive tokens by feature name; `ready` is a CUDA event, or None."""

    states: dict[str, Tensor]
    ready: Any = None


class Writer:
    """Puts jobs into the store at `uri` and answers each with its receipt, from its own thread."""

    def __init__(self, uri: str, max_bytes: int) -> None:
        self.uri, self.max_bytes = uri, max_bytes
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._waiting = 0  # bytes
        self._lock = threading.Lock()
        self._store: FeatureStore | None = None
        self._lent: deque[tuple[float, SampleRef]] = deque()
        self._stream: Any = None
        threading.Thread(target=self._run, name="draftcore-writer", daemon=True).start()

    def take(self, job: Job) -> None:
        """Take a job over. Raises Refusal where too much is under way."""
        with self._lock:
            if self._waiting and self._waiting + job.nbytes > self.max_bytes:
                raise Refusal(BUSY, f"{self._waiting} bytes wait for the store already")
            self._waiting += job.nbytes
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            try:
                jobs = [self._jobs.get(timeout=IDLE)]
            except queue.Empty:
                self._close()
                continue
            while len(jobs) < AT_ONCE and not self._jobs.empty():
                jobs.append(self._jobs.get())
            self._write(jobs)
            with self._lock:
                self._waiting -= sum(job.nbytes for job in jobs)

    def _write(self, jobs: Sequence[Job]) -> None:
        """Put jobs together; where that fails, one by one, so that each has a reason of its own."""
        try:
            self._put(jobs)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].answer(_refusal(error).receipt)
                return
            for job in jobs:
                self._write([job])

    def _put(self, jobs: Sequence[Job]) -> None:
        refs = self._stored([self._item(job) for job in jobs])
        for job, ref in zip(jobs, refs, strict=True):
            if job.ask.lent:
                self._lent.append((time.monotonic() + LENT, ref))
            job.answer({"ref": ref.to_json()})

    def _stored(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        """Put items; once more into the store opened anew, where a run since has made another."""
        while True:
            fresh = self._store is None
            try:
                if self._store is None:
                    self._store = open_store(self.uri)
                self._end_loans(self._store)
                return self._store.put_many(items)
            except (StoreFull, StoreAway):
                raise
            except StoreError:
                self._close()
                if fresh:
                    raise

    def _item(self, job: Job) -> StoreItem:
        tensors = self._on_host(job)
        for name, packed in job.ask.beside.items():
            value_T = unpack(*packed)
            if len(value_T) != job.tokens:
                raise Refusal(REFUSED, f"{len(value_T)} rows of {name!r} for {job.tokens} tokens")
            tensors[name] = value_T
        return StoreItem(job.ask.sample, tensors, job.tokens, job.ask.origin)

    def _on_host(self, job: Job) -> dict[str, Tensor]:
        """Copy a job's features to the host in the asked type, [T, H] each. Raises Refusal for nan."""
        dtype: torch.dtype = getattr(torch, job.ask.dtype)
        states = job.parts[0].states
        device = states[job.ask.names[0]].device
        pinned = device.type == "cuda"
        tensors = {
            name: torch.empty((job.tokens, states[name].shape[1]), dtype=dtype, pin_memory=pinned)
            for name in job.ask.names
        }
        if not pinned:
            finite = self._copy(job, tensors)
        else:
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                finite = self._copy(job, tensors)
            self._stream.synchronize()
        for name, flags in finite.items():
            if not all(bool(flag) for flag in flags):
                raise Refusal(NOT_FINITE, f"feature {name!r} holds inf or nan in {dtype}")
        return tensors

    def _copy(self, job: Job, tensors: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        """Start the copies; returns by name whether all is finite, to be read when they are done.

        Cast and look where the states lie: fewer bytes travel, and no copy waits for the host.
        """
        finite: dict[str, list[Tensor]] = {name: [] for name in tensors}
        at = 0
        for part in job.parts:
            if part.ready is not None:
                part.ready.wait(self._stream)
            rows = len(part.states[job.ask.names[0]])
            for name, value in tensors.items():
                state = part.states[name].to(value.dtype)
                value[at : at + rows].copy_(state, non_blocking=True)
                finite[name].append(state.isfinite().all())
            at += rows
        return finite

    def _end_loans(self, store: FeatureStore) -> None:
        """Free what clients that died have not read."""
        while self._lent and self._lent[0][0] < time.monotonic():
            store.free([self._lent.popleft()[1]])

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with suppress(Exception):  # it may be gone; this thread must go on
                store.close()


def open_store(uri: str) -> FeatureStore:
    """Open a store through its plugin. Raises DraftcoreError for one that stays in a process."""
    name = uri.partition(":")[0]
    binding = bind(load(), "store", name)
    if "shared" not in binding.capabilities:
        raise DraftcoreError(
            f"the store {uri!r} stays in one process\n"
            "  set DRAFTCORE_SINK to one that `draftcore list-plugins` shows as shared"
        )
    return binding.hook.feature_store(name=name, uri=uri, options=binding.options({}))


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    kind = (
        FULL if isinstance(error, StoreFull) else AWAY if isinstance(error, StoreAway) else FAILED
    )
    text = str(error) if isinstance(error, DraftcoreError) else f"{type(error).__name__}: {error}"
    return Refusal(kind, text)
