"""Segments on a CUDA device, and the stream and memory pool that all graphs of a device share.

Every graph of a device, of either phase, is recorded on one stream into one memory pool. No two graphs
replay at the same time, so a smaller bucket takes no memory beside a larger one that was recorded before
it. The stream lasts as long as the process, as libraries keep work space for each stream; the pool lasts
as long as a backend has a graph in it.

- A pool's id is invalid once its last graph is gone, so each pool keeps a small graph of its own.
- After a capture that cannot end, as after a host synchronisation, torch's allocator still takes it for
  open, and the process could capture nothing more. `CudaSegments._abandon` undoes that.
"""

from __future__ import annotations

import functools
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

_pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
_abandoned: list[torch.cuda.CUDAGraph] = []  # torch's allocators still point to them


def open_backend(name: str, options: BreakableOptions | None) -> SegmentBackend:
    """Open `full`, or `breakable` with its options. Raises UsageError without CUDA."""
    require_cuda(name)
    debug = options is not None and options.debug
    return SegmentBackend(lambda d: CudaSegments(d, name), breaks=name == "breakable", debug=debug)


def require_cuda(name: str) -> None:
    """Raise UsageError where there is no CUDA device for the backend `name`."""
    if not torch.cuda.is_available():
        raise UsageError(
            f"the graph backend {name!r} records CUDA graphs, and there is no CUDA device\n"
            f"  torch {torch.__version__} is built for "
            f"{f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}\n"
            "  set runner.prefill.name=eager and runner.decode.name=eager, or leave both out"
        )


class Pool:
    """Memory of a device that only graphs use."""

    def __init__(self, device: torch.device) -> None:
        self.id = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        free_cached(device)  # nothing can be freed while a graph is recorded
        with torch.cuda.device(device), torch.cuda.stream(capture_stream(device)):
            _begin(self._anchor, self)
            try:
                torch.zeros((), device=device)  # torch warns of an empty graph
            finally:
                self._anchor.capture_end()

    def holds(self, address: int) -> bool:
        parts: list[dict[str, Any]] = torch.cuda.memory_snapshot(self.id, False)  # type: ignore[no-untyped-call]
        return any(0 <= address - part["address"] < part["total_size"] for part in parts)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which this process records every graph of a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def beside(device: torch.device) -> Iterator[AbstractContextManager[Any]]:
    """Fork a second stream off the current one, yield a context that enters it, and join it.

    Without CUDA the context does nothing. Tensors that the second stream reads must be kept until it is
    joined.
    """
    if device.type != "cuda":
        yield nullcontext()
        return
    first, second = torch.cuda.current_stream(device), second_stream(device)
    second.wait_stream(first)
    yield torch.cuda.stream(second)
    first.wait_stream(second)


@functools.cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that runs beside a device's current one, the same for the whole process."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def shared_pool(device: torch.device) -> Pool:
    """Return the pool of all graphs that this process has on a device."""
    assert device.index is not None
    pool = _pools.get(device.index)
    if pool is None:
        pool = _pools[device.index] = Pool(device)
    return pool


def free_cached(device: torch.device) -> None:
    """Give back what torch keeps of a device's memory, once nothing runs there.

    Of an expandable segment torch waits for the stream that it belongs to alone, though another may
    still read there, as the first stream does where it joins what the second has made.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


class CudaSegments:
    """Records segments as CUDA graphs of one device, the current one if it is not given.

    Raises UsageError for another kind of device.
    """

    def __init__(self, device: torch.device | None, name: str) -> None:
        device = device or torch.device("cuda", torch.cuda.current_device())
        if device.type != "cuda":
            raise UsageError(
                f"the graph backend {name!r} records CUDA graphs, but the work to record runs on "
                f"{device}\n  set target.device=cuda, or leave out the runner graphs"
            )
        self.device, self.stream = device, capture_stream(device)
        self.pools = [shared_pool(device)]  # new graphs go into the last one
        self._graph: torch.cuda.CUDAGraph | None = None
        self._forked: set[torch.cuda.Stream] = set()
        self._empty: list[bool] = []  # whether each segment of a recording is empty

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Run the block on the capture stream, after everything that the device had to do."""
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield
            self.stream.synchronize()

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._empty.clear()
        free_cached(self.device)  # memory of the warm-up, which the graphs' pool cannot use
        try:
            with self._forks():
                yield
            if self._empty == [True]:
                raise DraftcoreError(
                    f"a graph was to be recorded on {self.device}, but nothing ran there\n"
                    "  put target and draft on the current CUDA device: set CUDA_VISIBLE_DEVICES, and "
                    "target.device=cuda"
                )
        except torch.AcceleratorError as error:
            raise DraftcoreError(_explained(error)) from error
        finally:
            if self._graph is not None:  # left open by an error
                with suppress(RuntimeError):
                    self.end()
            self._forked.clear()

    def begin(self) -> None:
        if (pool := shared_pool(self.device)) is not self.pools[-1]:
            self.pools.append(pool)  # another backend abandoned a capture, and the pool with it
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
        free_cached(self.device)

    def _end(self) -> torch.cuda.CUDAGraph:
        assert self._graph is not None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self._graph.capture_end()
            except RuntimeError:
                self._abandon()
                raise
        # torch warns of an empty graph. Between two breaks there may be nothing to record.
        self._empty.append(any("CUDA Graph is empty" in str(one.message) for one in said))
        graph, self._graph = self._graph, None
        return graph

    def _abandon(self) -> None:
        """Make torch forget a capture that could not begin or end, and give up its pool."""
        graph, self._graph = self._graph, None
        assert graph is not None
        pool = self.pools[-1]
        with suppress(RuntimeError):  # raised where the allocator knows that the capture is over
            torch._C._cuda_endAllocateToPool(self.device.index, pool.id)
            torch._C._cuda_releasePool(self.device.index, pool.id)
        graph.reset()
        _abandoned.append(graph)
        _pools.pop(self.device.index, None)
        # A new pool's first graph also tells the random generator that the capture is over.
        self.pools.append(shared_pool(self.device))

    @contextmanager
    def _forks(self) -> Iterator[None]:
        """Note the streams that a segment forks off, so that `end` joins them and `begin` forks them.

        Only forks by `Stream.wait_stream` are seen. CUDA refuses a fork by events that a break cuts.
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
    """The address of a tensor in a pool, which leaves its memory free for further use.

    Calling it returns a tensor at that address, valid while the pool exists. Call it outside of capture.
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


def _explained(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    if "unjoined" in reason:
        return (
            f"a side stream is not joined where a recorded segment ends: {reason}\n"
            "  join it by Stream.wait_stream before the function returns and before its attention"
        )
    return (
        f"this work cannot be recorded as a CUDA graph: {reason}\n"
        "  what copies to the host or waits for the device (.item(), .tolist(), a mask's nonzero) "
        "cannot;\n  use the backend breakable with debug=true, or the runner eager, for this target"
    )
