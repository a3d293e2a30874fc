"""The other process of `transport.py`: a producer, and a client that uses Mooncake naively.

The trainer's process calls the methods of a `Producer` one at a time and waits, so that only one of
the two works. Samples are three quarters and one quarter of bf16 features, and 16 KiB of tokens; as
many different ones are put in turn as do not fit into any cache.
"""

import ctypes
import io
import resource
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from draftcore_file.store import FileStore
from torch import Tensor

from draftcore.contracts.store import FeatureStore, SampleRef, StoreItem, TensorSpec

LOOPBACK = "127.0.0.1"
UNCACHED = 256 << 20  # bytes that are gone through before any of them is used again
BLOB_BYTES = 256 << 20  # of the naive client's staging memory


def open_store(uri: str) -> FeatureStore:
    if uri.startswith("file:"):
        return FileStore.open(uri)
    from draftcore_mooncake.store import MooncakeStore

    return MooncakeStore.open(uri)


def samples_of(nbytes: int) -> list[dict[str, Tensor]]:
    """As many samples of this size as the caches do not hold; at least two, at most 64."""
    shapes = {"hidden.2": nbytes // 8 * 3, "last_hidden": nbytes // 8}
    return [
        {name: torch.randn(size).bfloat16() for name, size in shapes.items()}
        | {"token_ids": torch.arange(2048)}
        for _ in range(min(max(2, UNCACHED // nbytes), 64))
    ]


class Producer:
    """What the producer does when the trainer calls. Times are in seconds."""

    def __init__(self, uri: str, nbytes: int) -> None:
        self.store, self.turn = open_store(uri), 0
        self.samples = samples_of(nbytes)
        self.copies = [{n: torch.ones_like(t) for n, t in one.items()} for one in self.samples]
        self.wire = torch.cat([t.view(torch.uint8) for t in self.samples[0].values()]).numpy()

    def put(self, count: int = 1) -> tuple[float, tuple[SampleRef, ...]]:
        """Put samples in one call, under ids that were never used."""
        items = [StoreItem(uuid.uuid4().hex, self._next(), 2048, "bench") for _ in range(count)]
        began = time.perf_counter()
        refs = self.store.put_many(items)
        return time.perf_counter() - began, refs

    def copy(self) -> float:
        """Copy a sample as a put does, into memory that is used already."""
        given, copies = self._next(), self.copies[(self.turn + 1) % len(self.copies)]
        began = time.perf_counter()
        for name, tensor in given.items():
            copies[name].copy_(tensor)
        return time.perf_counter() - began

    def send(self, port: int) -> float:
        """Send a sample's bytes on a connection of their own, until it is said that they arrived."""
        with socket.create_connection((LOOPBACK, port)) as stream:
            stream.recv(1)
            began = time.perf_counter()
            stream.sendall(self.wire)
            stream.recv(1)
            return time.perf_counter() - began

    def faults(self) -> int:
        return faults()

    def private(self) -> int:
        return private()

    def give_large_memory_back(self) -> None:
        give_large_memory_back()

    def naive(self, address: str, segment: int) -> None:
        self.client = Naive(address, segment)

    def naive_close(self) -> None:
        self.client.close()

    def naive_put(self, key: str) -> float:
        return self.client.put(key, self._next())

    def naive_put_blob(self, key: str) -> float:
        return self.client.put_blob(key, self._next())

    def _next(self) -> dict[str, Tensor]:
        self.turn = (self.turn + 1) % len(self.samples)
        return self.samples[self.turn]


class Link:
    """Calls a producer's methods, by name, from the trainer's process."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def __call__(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.pipe.recv()

    def begin(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def stream(self, room: Tensor) -> float:
        """Seconds that one TCP connection takes to bring a sample."""
        view, got = memoryview(room.numpy()), 0
        with socket.create_server((LOOPBACK, 0)) as server:
            self.begin("send", server.getsockname()[1])
            with server.accept()[0] as stream:
                stream.send(b"1")
                while got < len(view):
                    got += stream.recv_into(view[got:])
                stream.send(b"1")
                return float(self.pipe.recv())


@contextmanager
def producing(uri: str, nbytes: int) -> Iterator[Link]:
    """Start a producer in a process of its own."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_produce, args=(there, uri, nbytes))
    process.start()
    there.close()
    try:
        here.recv()  # it is ready
        yield Link(here)
    finally:
        here.close()
        process.join()


def _produce(pipe: Connection, uri: str, nbytes: int) -> None:
    torch.set_num_threads(1)
    producer = Producer(uri, nbytes)
    pipe.send("ready")
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            break
        pipe.send(getattr(producer, method)(*arguments))
    producer.store.close()


def faults() -> int:
    """Pages that the kernel gave to this process; fresh memory costs one for each 4 KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def private() -> int:
    """Bytes of memory that this process shares with no other and with no file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def give_large_memory_back() -> None:
    """Let malloc take 1 MiB and more from the kernel each time, so that `faults` counts it."""
    ctypes.CDLL(None).mallopt(ctypes.c_int(-3), ctypes.c_int(1 << 20))  # M_MMAP_THRESHOLD


class Naive:
    """Mooncake as it is easily used: each tensor under a key of its own, or all in a pickle."""

    def __init__(self, address: str, segment: int) -> None:
        from draftcore_mooncake.engine import load

        library = load()
        self.store, self.config = library.MooncakeDistributedStore(), library.ReplicateConfig()
        self.config.with_hard_pin = True
        args = (LOOPBACK, "P2PHANDSHAKE", segment, BLOB_BYTES, "tcp", "", address)
        assert self.store.setup(*args) == 0

    def put(self, key: str, tensors: dict[str, Tensor]) -> float:
        began = time.perf_counter()
        for name, tensor in tensors.items():
            pointer, nbytes = tensor.data_ptr(), tensor.nbytes
            self.store.register_buffer(pointer, nbytes)
            assert self.store.put_from(f"{key}/{name}", pointer, nbytes, self.config) == 0
            self.store.unregister_buffer(pointer)
        return time.perf_counter() - began

    def get(self, key: str, specs: Sequence[TensorSpec]) -> float:
        began = time.perf_counter()
        for spec in specs:
            assert self.store.is_exist(f"{key}/{spec.name}") == 1
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            self.store.register_buffer(tensor.data_ptr(), tensor.nbytes)
            got = self.store.get_into(f"{key}/{spec.name}", tensor.data_ptr(), tensor.nbytes)
            assert got == tensor.nbytes
            self.store.unregister_buffer(tensor.data_ptr())
        return time.perf_counter() - began

    def put_blob(self, key: str, tensors: dict[str, Tensor]) -> float:
        began = time.perf_counter()
        blob = io.BytesIO()
        torch.save(tensors, blob)
        assert self.store.put(key, blob.getvalue(), self.config) == 0
        return time.perf_counter() - began

    def get_blob(self, key: str) -> float:
        began = time.perf_counter()
        torch.load(io.BytesIO(self.store.get(key)))
        return time.perf_counter() - began

    def remove(self, key: str) -> None:
        self.store.remove_by_regex(f"^{key}", True)

    def close(self) -> None:
        self.store.close()
