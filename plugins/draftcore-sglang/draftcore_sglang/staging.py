"""Hold captured states in pinned memory on their way from a server's device to the store.

The scheduler launches copies of what a forward left on the device, on a stream of their own into
pinned memory, and goes on. A thread waits until they are there and sends the job to the process that
puts (`writer`), which shares that memory; whatever costs time or holds the interpreter's lock happens
there. What is under way is bounded by the memory: where it is full a capture is refused as `busy`,
and the client asks again later.

A forward's rows are copied together, one copy for each feature however many requests asked: a launch
costs the scheduler some ten microseconds. Requests share such a block, and the last receipt frees it.
The device also finds the largest magnitude in a block, one number: where that is finite the writer
need not look, which would take as long as the copy. All methods are called by one thread, the
scheduler's.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from draftcore.errors import DraftcoreError
from draftcore.tensors import largest_magnitude
from draftcore.uris import format_size
from draftcore_sglang.wire import BUSY, FAILED, Refusal
from draftcore_sglang.writer import LARGEST, Job, Place, Receipt, shared_memory

logger = logging.getLogger(__name__)
ALIGN = 64  # bytes
START = "from draftcore_sglang.writer import main; main()"
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


@dataclass(eq=False)
class Block:
    """States [rows, H] of consecutive rows of a forward, by feature, and how many requests use them."""

    start: int  # byte
    nbytes: int
    places: Mapping[str, Place]
    users: int = 0

    def part(self, names: Sequence[str], first: int, rows: int) -> dict[str, Place]:
        """Return where `rows` of these features lie, from the block's row `first` on."""
        found = {}
        for name in names:
            place = self.places[name]
            at = place.start + first * place.width * place.dtype.itemsize
            found[name] = place._replace(start=at, rows=rows)
        if LARGEST in self.places:
            found[LARGEST] = self.places[LARGEST]
        return found


class Staging:
    """Takes states and gives receipts. Raises DraftcoreError where memory cannot be pinned.

    `writer` is the process that puts them into the store at `uri`.
    """

    def __init__(self, uri: str, max_bytes: int, device: torch.device | str = "cpu") -> None:
        self.uri, self.max_bytes = uri, max_bytes
        self._memory = os.memfd_create("draftcore-staging")
        os.truncate(self._memory, max_bytes)
        self._bytes = shared_memory(self._memory, max_bytes)
        self._stream = _stream_to(self._bytes, torch.device(device))
        self._kept: list[Tensor] = []  # until they are copied
        self._blocks: list[Block] = []  # in the order of their bytes
        self._waiting: dict[str, Sequence[Block]] = {}  # by request id, at the writer
        self._unread: dict[str, Receipt] = {}  # answers of a writer that has ended
        self._launched: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.writer = WriterProcess(uri, self._memory, max_bytes)
        self._sender = threading.Thread(target=self._send, name="draftcore-staging", daemon=True)
        self._sender.start()

    @property
    def held_bytes(self) -> int:
        """The bytes of all blocks that somebody uses."""
        return sum(block.nbytes for block in self._blocks)

    def stage(self, states: Mapping[str, Tensor], ready: Any) -> Block:
        """Start copying states [rows, H]; `ready` is an event after which they are there, or None.

        Raises Refusal where too much is under way.
        """
        places, size = _layout(states, with_largest=self._stream is not None)
        at, start = self._room(size)
        places = {name: p._replace(start=start + p.start) for name, p in places.items()}
        self._kept += states.values()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if ready is not None:
                ready.wait(self._stream)
            for name, state in states.items():
                places[name].of(self._bytes).copy_(state, non_blocking=True)
            if LARGEST in places:
                largest = largest_magnitude(list(states.values()))
                places[LARGEST].of(self._bytes).copy_(largest.float().view(1, 1), non_blocking=True)
        block = Block(start, size, places)
        self._blocks.insert(at, block)
        return block

    def send(self, jobs: Mapping[str, tuple[Job, Sequence[Block]]]) -> None:
        """Have jobs written, by request id. Call it after each forward whose rows were staged."""
        if self.writer.ended:
            self._unread |= self._answered()
            self.writer = WriterProcess(self.uri, self._memory, self.max_bytes)
        self._waiting.update({rid: blocks for rid, (_, blocks) in jobs.items()})
        done = None
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        kept, self._kept = self._kept, []
        self._launched.put((done, kept, self.writer, [job for job, _ in jobs.values()]))

    def receipts(self) -> dict[str, Receipt]:
        """Return what was answered since, by request id; a failure for each if the writer ended."""
        found, self._unread = self._unread | self._answered(), {}
        return found

    def release(self, blocks: Sequence[Block]) -> None:
        """Let go of the blocks of a request."""
        for block in blocks:
            block.users -= 1
            if not block.users:
                self._blocks.remove(block)

    def close(self) -> None:
        """End the writer, once it has written the jobs that it was sent."""
        self._launched.put(None)
        self._sender.join()
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self.writer.connection.close()
        self.writer.process.wait()
        os.close(self._memory)

    def _answered(self) -> dict[str, Receipt]:
        found: dict[str, Receipt] = {}
        try:
            while len(found) < len(self._waiting) and self.writer.has_answered:
                found |= self.writer.connection.recv()
        except (EOFError, OSError):
            lost = Refusal(FAILED, f"the writer of this server ended with {self.writer.end()}")
            found = dict.fromkeys(self._waiting, lost.receipt) | found
        for rid in found:
            self.release(self._waiting.pop(rid))
        return found

    def _room(self, size: int) -> tuple[int, int]:
        """Return the first gap that holds so many bytes: its place among the blocks, its start."""
        start = 0
        for at, block in enumerate(self._blocks):
            if block.start - start >= size:
                return at, start
            start = block.start + block.nbytes
        if start + size > self.max_bytes:
            raise Refusal(BUSY, f"{format_size(self.held_bytes)} wait for the store already")
        return len(self._blocks), start

    def _send(self) -> None:
        while (launched := self._launched.get()) is not None:
            hand_over(*launched)
            del launched  # and the states on the device, before the next one comes


class WriterProcess:
    """A writer and the connection to it, which nobody else holds: it ends when this process does."""

    def __init__(self, uri: str, memory: int, max_bytes: int) -> None:
        here, there = socket.socketpair()
        with there:
            fds = (memory, there.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, uri, *map(str, (memory, max_bytes, fds[1]))],
                pass_fds=fds,
            )
        self.connection = Connection(here.detach())
        self._readable = select.poll()  # 2 us, where Connection.poll makes a selector in 50
        self._readable.register(self.connection, select.POLLIN)

    @property
    def has_answered(self) -> bool:
        """Say whether there is something to receive, be it the end."""
        return bool(self._readable.poll(0))

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> str:
        """Wait for a writer that closed its connection; return how it ended."""
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"status {code}; see the server's log"


def hand_over(
    done: Any, kept: Sequence[Tensor], writer: WriterProcess, jobs: Sequence[Job]
) -> None:
    """Wait for the copies of `kept`, and send their jobs.

    If that fails the writer is ended, so that all are answered.
    """
    try:
        if done is not None:
            done.synchronize()
        if jobs:
            writer.connection.send(jobs)
    except Exception:
        logger.exception("draftcore could not hand captures to their writer")
        writer.process.kill()


def _layout(states: Mapping[str, Tensor], *, with_largest: bool) -> tuple[dict[str, Place], int]:
    """Lay states, and the largest magnitude in them, one after the other; return their bytes too."""
    shapes = {name: (*state.shape, state.dtype) for name, state in states.items()}
    if with_largest:
        shapes[LARGEST] = 1, 1, torch.float32
    places, size = dict[str, Place](), 0
    for name, (rows, width, dtype) in shapes.items():
        places[name] = Place(size, rows, width, dtype)
        size += -(-places[name].nbytes // ALIGN) * ALIGN
    return places, size


def _stream_to(memory: Tensor, device: torch.device) -> Any:
    """Pin the memory and return a stream for copies to it; None on a CPU, where a copy blocks."""
    if device.type != "cuda":
        return None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE))
    if code:
        raise DraftcoreError(
            f"{format_size(memory.numel())} of memory cannot be pinned: CUDA error {code}\n"
            "  set a smaller DRAFTCORE_BUFFER"
        )
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
