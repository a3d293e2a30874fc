"""Put captured states into the store, in a process that shares memory with a server.

The scheduler of a server is one Python thread that launches some ten kernels for each layer. Beside
a thread that puts it would share the interpreter's lock with every copy, digest and JSON of a put,
and each side wait for the other (docs/performance.md, 2026-11-22); so puts have a process. It gets
jobs when their states have arrived, and answers each with its receipt once that is stored. Several
threads put: checks, copies and digests let go of the lock, and one core copies 3 to 4 GB/s.

It ends when the server's end of the connection closes, however that happens. The store is opened at
the first put, and closed after a minute without one, so that a server that waits for the next run
keeps no memory of the last.
"""

from __future__ import annotations

import mmap
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftcore import bind, load_plugins
from draftcore.contracts.store import (
    FeatureStore,
    SampleRef,
    StoreAway,
    StoreError,
    StoreFull,
    StoreItem,
)
from draftcore.errors import DraftcoreError
from draftcore.tensors import all_finite
from draftcore_sglang.wire import AWAY, FAILED, FULL, NOT_FINITE, REFUSED, Ask, Refusal, unpack

LARGEST = "largest"  # beside features: the largest magnitude in all that was staged with them
IDLE = 60.0  # seconds
LENT = 600.0  # seconds that a lent sample may be read, if the client does not free it
THREADS = 4  # that put

Receipt = dict[str, Any]


class Place(NamedTuple):
    """Where [rows, width] numbers lie in the shared memory, one row after the other."""

    start: int  # byte
    rows: int
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        flat = memory[self.start : self.start + self.nbytes]
        return flat.view(self.dtype).view(self.rows, self.width)


@dataclass(frozen=True)
class Job:
    """A prompt whose states lie in the shared memory: in `parts`, by feature, one for each chunk.

    A part has `LARGEST` too where a device found it.
    """

    rid: str
    ask: Ask
    tokens: int
    parts: Sequence[Mapping[str, Place]]


class Writer:
    """Puts jobs whose states lie in `memory` into the store at `uri`; any thread may."""

    def __init__(self, uri: str, memory: Tensor) -> None:
        self.uri, self.memory = uri, memory
        self._store: FeatureStore | None = None
        self._lent: deque[tuple[float, SampleRef]] = deque()
        self._mutex = threading.Lock()  # of the two, and of the connection

    def run(self, connection: Connection) -> None:
        """Take lists of jobs and send receipts by request id until the other end closes."""
        with suppress(EOFError, OSError), ThreadPoolExecutor(THREADS) as threads:
            while True:
                if not connection.poll(IDLE):
                    self.close()
                    continue
                jobs: Sequence[Job] = connection.recv()
                share = -(-len(jobs) // THREADS)  # one put and one message each
                for at in range(0, len(jobs), share):
                    threads.submit(self._answer, connection, jobs[at : at + share])
        self.close()

    def _answer(self, connection: Connection, jobs: Sequence[Job]) -> None:
        receipts = self.write(jobs)
        with self._mutex:
            connection.send(receipts)

    def write(self, jobs: Sequence[Job]) -> dict[str, Receipt]:
        """Put jobs together; where that fails, one by one, so that each has a reason of its own."""
        try:
            refs = self._stored([self._item(job) for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                return {jobs[0].rid: refusal_of(error).receipt}
            return {rid: receipt for job in jobs for rid, receipt in self.write([job]).items()}
        pairs = list(zip(jobs, refs, strict=True))
        with self._mutex:
            self._lent += [(time.monotonic() + LENT, ref) for job, ref in pairs if job.ask.lent]
        return {job.rid: {"ref": ref.to_json()} for job, ref in pairs}

    def close(self) -> None:
        with self._mutex:
            self._leave()

    def _stored(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        """Put items; once more into the store opened anew, where a run since has made another."""
        while True:
            store, fresh = self._opened()
            try:
                return store.put_many(items)
            except (StoreFull, StoreAway):
                raise
            except StoreError:
                with self._mutex:
                    if self._store is store:
                        self._leave()
                if fresh:
                    raise

    def _opened(self) -> tuple[FeatureStore, bool]:
        """Return the store, and whether it was opened just now. Frees what clients left unread."""
        with self._mutex:
            fresh = self._store is None
            if self._store is None:
                self._store = open_store(self.uri)
            while self._lent and self._lent[0][0] < time.monotonic():
                self._store.free([self._lent.popleft()[1]])
            return self._store, fresh

    def _leave(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with suppress(Exception):  # it may be gone; this process must go on
                store.close()

    def _item(self, job: Job) -> StoreItem:
        dtype: torch.dtype = getattr(torch, job.ask.dtype)
        tensors = {name: self._whole(job, name).to(dtype) for name in job.ask.names}
        if not self._found_finite(job, dtype):
            for name, value_TH in tensors.items():
                require_finite(name, value_TH)
        beside = {name: unpack(*packed) for name, packed in job.ask.beside.items()}
        for name, value_T in beside.items():
            if len(value_T) != job.tokens:
                raise Refusal(REFUSED, f"{len(value_T)} rows of {name!r} for {job.tokens} tokens")
        return StoreItem(job.ask.sample, beside | tensors, job.tokens, job.ask.origin)

    def _found_finite(self, job: Job, dtype: torch.dtype) -> bool:
        """Say whether a device found all of this job finite, also in the type that is stored."""
        if any(LARGEST not in part for part in job.parts):
            return False
        largest = torch.cat([part[LARGEST].of(self.memory) for part in job.parts])
        return bool(largest.to(dtype).isfinite().all())

    def _whole(self, job: Job, name: str) -> Tensor:
        """Return a feature's chunks as one [T, H]; a single one stays where it lies."""
        chunks = [part[name].of(self.memory) for part in job.parts]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def require_finite(name: str, value_TH: Tensor) -> None:
    """Raise Refusal for a feature that holds inf or nan."""
    if not all_finite([value_TH]):
        raise Refusal(NOT_FINITE, f"feature {name!r} holds inf or nan in {value_TH.dtype}")


def open_store(uri: str) -> FeatureStore:
    """Open a store through its plugin. Raises DraftcoreError for one that stays in a process."""
    name = uri.partition(":")[0]
    binding = bind(load_plugins(), "store", name)
    if "shared" not in binding.capabilities:
        raise DraftcoreError(
            f"the store {uri!r} stays in one process\n"
            "  set DRAFTCORE_SINK to one that `draftcore list-plugins` shows as shared"
        )
    store: FeatureStore = binding.hook.feature_store(name=name, uri=uri)
    return store


def shared_memory(fd: int, nbytes: int) -> Tensor:
    """Map shared memory as bytes."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


def main() -> None:
    """Run a writer for `staging`: URI of the store, file and size of the memory, connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, and that ends this
    torch.set_num_threads(1)  # others would wait for each other in copies of a megabyte
    uri, (memory, nbytes, connection) = sys.argv[1], map(int, sys.argv[2:])
    Writer(uri, shared_memory(memory, nbytes)).run(Connection(connection))


def refusal_of(error: Exception) -> Refusal:
    """Return an error as a client gets it: its kind, by which it asks again or not, and the reason."""
    if isinstance(error, Refusal):
        return error
    kind = (
        FULL if isinstance(error, StoreFull) else AWAY if isinstance(error, StoreAway) else FAILED
    )
    text = str(error) if isinstance(error, DraftcoreError) else f"{type(error).__name__}: {error}"
    return Refusal(kind, text)
