"""Segments on a CUDA device, and what all of them share in a process.

Every graph of a device, of whatever phase, is recorded on one stream into one memory pool: they
never replay at the same time, so a smaller bucket costs no memory beside a larger one that was
recorded before it. The stream lasts as long as the process, because libraries keep work space for
each stream; the pool lasts as long as a backend holds a graph in it.

Two things are odd. A pool's id is dead once its last graph is gone, so an empty graph of the pool's
own keeps it alive. And a capture that cannot end, as after a host synchronisation, leaves torch's
allocator believing that it goes on; `_abandon` undoes that, or the process would be of no use.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from draftcore.errors import DraftcoreError, UsageError
from draftcore_graphs.backend import SegmentBackend
from draftcore_graphs.options import BreakableOptions
from draftcore_graphs.segments import Step

_streams: dict[int, torch.cuda.Stream] = {}
_second_streams: dict[int, torch.cuda.Stream] = {}
_pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
_abandoned: list[torch.cuda.CUDAGraph] = []  # torch's allocators still point to them


def open_backend(name: str, options: BreakableOptions | None) -> SegmentBackend:
    """Open `full`, or `breakable` with its options. Raises UsageError without CUDA."""
    require_cuda(name)
    debug = options is not None and options.debug
    return SegmentBackend(lambda d: CudaSegments(d, name), breaks=name == "breakable", debug=debug)


def require_cuda(name: str) -> None:
    if not torch.cuda.is_available():
        raise UsageError(
            f"the graph backend {name!r} records CUDA graphs, and there is no CUDA device\n"
            f"  torch {torch.__version__} is built for "
            f"{f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}\n"
            "  use the backend eager (graphs.prefill.backend=eager, graphs.decode.backend=eager)"
        )


class Pool:
    """Memory of a device for graphs alone."""

    def __init__(self, device: torch.device) -> None:
        self.id = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.stream(capture_stream(device)):
            _begin(self._anchor, self)
            torch.zeros((), device=device)  # so that it is no empty graph, of which torch warns
            self._anchor.capture_end()

    def holds(self, address: int) -> bool:
        parts: list[dict[str, Any]] = torch.cuda.memory_snapshot(self.id, False)  # type: ignore[no-untyped-call]
        return any(0 <= address - part["address"] < part["total_size"] for part in parts)


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which this process records every graph of a device."""
    assert device.index is not None
    if device.index not in _streams:
        _streams[device.index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device.index]


@contextmanager
def beside(device: torch.device) -> Iterator[AbstractContextManager[Any]]:
    """Fork a second stream off the current one and join it at the end; yield the block to enter it.

    Without CUDA there is one stream: what is called second runs second. What the second stream
    reads must be kept until it is joined.
    """
    if device.type != "cuda":
        yield nullcontext()
        return
    first, second = torch.cuda.current_stream(device), second_stream(device)
    second.wait_stream(first)
    yield torch.cuda.stream(second)
    first.wait_stream(second)


def second_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process that runs beside a device's current one."""
    assert device.index is not None
    if device.index not in _second_streams:
        _second_streams[device.index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _second_streams[device.index]


def shared_pool(device: torch.device) -> Pool:
    """The pool of whatever graphs this process holds on a device."""
    assert device.index is not None
    pool = _pools.get(device.index)
    if pool is None:
        pool = _pools[device.index] = Pool(device)
    return pool


class CudaSegments:
    """Records segments as CUDA graphs of one device, the current one if it is not given.

    Raises UsageError for another kind of device.
    """

    def __init__(self, device: torch.device | None, name: str) -> None:
        device = device or torch.device("cuda", torch.cuda.current_device())
        if device.type != "cuda":
            raise UsageError(
                f"the graph backend {name!r} records CUDA graphs, but what it is to record runs on "
                f"{device}\n  set target.device=cuda, or use the backend eager"
            )
        self.device, self.stream = device, capture_stream(device)
        self.pools = [shared_pool(device)]  # the last one was recorded into last
        self._graph: torch.cuda.CUDAGraph | None = None
        self._forked: set[torch.cuda.Stream] = set()
        self._empty: list[bool] = []  # of the segments of a recording

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On the capture stream, when all that was asked of the device before is done."""
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield
            self.stream.synchronize()

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._empty.clear()
        torch.cuda.empty_cache()  # the memory of warming up, which the graphs do not share
        try:
            with self._forks():
                yield
            if self._empty == [True]:
                raise DraftcoreError(_nothing_recorded(self.device))
        except torch.AcceleratorError as error:
            raise DraftcoreError(_explained(error)) from error
        finally:
            if self._graph is not None:  # left open by an error
                with suppress(RuntimeError):
                    self.end()
            self._forked.clear()

    def begin(self) -> None:
        if (pool := shared_pool(self.device)) is not self.pools[-1]:
            self.pools.append(pool)  # another backend abandoned a capture into the one before
        self._graph = torch.cuda.CUDAGraph()
        try:
            _begin(self._graph, self.pools[-1])
        except RuntimeError:
            self._abandon()
            raise
        for stream in self._forked:
            stream.wait_stream(self.stream)

    def end(self) -> Step:
        for stream in self._forked:
            self.stream.wait_stream(stream)
        return self._end().replay

    def pin(self, tensor: Tensor) -> Callable[[], Tensor]:
        inside = any(pool.holds(tensor.data_ptr()) for pool in self.pools) if tensor.is_cuda else 0
        return Place(tensor) if inside and tensor.numel() else lambda: tensor

    @contextmanager
    def closing(self) -> Iterator[None]:
        torch.cuda.synchronize(self.device)  # a replay may still run
        yield
        self.pools.clear()
        torch.cuda.empty_cache()

    def _end(self) -> torch.cuda.CUDAGraph:
        assert self._graph is not None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self._graph.capture_end()
            except RuntimeError:
                self._abandon()
                raise
        # torch says so; between two breaks there may be nothing.
        self._empty.append(any("CUDA Graph is empty" in str(one.message) for one in said))
        graph, self._graph = self._graph, None
        return graph

    def _abandon(self) -> None:
        """Make torch forget a capture that could not begin or end, and the pool that it had."""
        graph, self._graph = self._graph, None
        assert graph is not None
        pool = self.pools[-1]
        with suppress(RuntimeError):  # where the allocator knows that the capture is over
            torch._C._cuda_endAllocateToPool(self.device.index, pool.id)
            torch._C._cuda_releasePool(self.device.index, pool.id)
        graph.reset()
        _abandoned.append(graph)
        _pools.pop(self.device.index, None)
        # A new pool's first graph tells the random generator, too, that nothing is being captured.
        self.pools.append(shared_pool(self.device))

    @contextmanager
    def _forks(self) -> Iterator[None]:
        """Note the streams that a segment forks off, so that `end` joins and `begin` forks them.

        Only `Stream.wait_stream` is seen. A fork by events that a break cuts is refused by CUDA.
        """
        wait = torch.cuda.Stream.wait_stream

        def noting_wait(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
            wait(stream, other)
            inside = other == self.stream or other in self._forked
            if self._graph is not None and inside and stream != self.stream:
                self._forked.add(stream)

        torch.cuda.Stream.wait_stream = noting_wait  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            torch.cuda.Stream.wait_stream = wait  # type: ignore[method-assign]


class Place:
    """Where a tensor of a pool lies, without keeping its memory from being used again.

    Calling it gives a tensor there, valid as long as the pool is. Not to be called during capture.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.device = tensor.dtype, tensor.device
        self.size, self.stride = tensor.size(), tensor.stride()
        steps = zip(self.size, self.stride, strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps)
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (span * tensor.element_size(),),
            "typestr": "|u1",  # bytes: the interface knows no bfloat16
            "strides": None,
            "version": 3,
        }

    def __call__(self) -> Tensor:
        octets = torch.as_tensor(self, device=self.device)
        return octets.view(self.dtype).as_strided(self.size, self.stride)


def _begin(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    # thread_local: other threads, which read ahead or watch, may call CUDA meanwhile.
    graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")


def _nothing_recorded(device: torch.device) -> str:
    return (
        f"a graph was to be recorded on {device}, but nothing ran there\n"
        "  put target and draft on the current CUDA device: set CUDA_VISIBLE_DEVICES, and "
        "target.device=cuda"
    )


def _explained(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    if "unjoined" in reason:
        return (
            f"a side stream is not joined where a recorded segment ends: {reason}\n"
            "  join it by Stream.wait_stream before the function returns or its attention begins"
        )
    return (
        f"this work cannot be recorded as a CUDA graph: {reason}\n"
        "  what copies to the host or waits for the device (.item(), .tolist(), a mask's nonzero) "
        "cannot;\n  use the backend breakable with debug=true, or eager, for this target"
    )
