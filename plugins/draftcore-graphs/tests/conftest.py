"""Segments on the CPU: what CUDA's capture does, with operations in the place of kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from draftcore_graphs.backend import SegmentBackend
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Tape(TorchDispatchMode):
    """Operations at fixed addresses: a replay reads and writes the memory of the recording.

    Outputs are poisoned when they are recorded, as a capture computes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero"):
            raise RuntimeError("operation not permitted when stream is capturing")
        given = {
            leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        writes = func._schema.is_mutable
        kept = tree_map(lambda x: x.clone() if isinstance(x, Tensor) and writes else x, args)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in made if tensor.data_ptr() not in given and not func.is_view]

        def step() -> None:
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for place, value in zip(made, again, strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)

        if "empty" not in func.overloadpacket.__name__:  # to allocate is no kernel
            self.steps.append(step)
        for tensor in fresh:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        if writes:  # nothing was written yet
            for argument, before in zip(args, kept, strict=True):
                if isinstance(argument, Tensor):
                    argument.copy_(before)
        return result

    def run(self) -> None:
        with torch.inference_mode():
            for step in self.steps:
                step()


class CpuSegments:
    """One tape per segment. `ended` counts them."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.tape: Tape | None = None
        self.ended = 0

    def aside(self) -> Any:
        return nullcontext()

    @contextmanager
    def recording(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.tape is not None:
                self.end()

    def begin(self) -> None:
        assert self.tape is None, "two segments at a time"
        self.tape = Tape()
        self.tape.__enter__()

    def end(self) -> Callable[[], None]:
        assert self.tape is not None, "no segment was begun"
        tape, self.tape = self.tape, None
        tape.__exit__(None, None, None)
        self.ended += 1
        return tape.run

    def pin(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def closing(self) -> Any:
        return nullcontext()


@pytest.fixture
def segments() -> CpuSegments:
    return CpuSegments()


@pytest.fixture
def backend(segments: CpuSegments) -> SegmentBackend:
    """`breakable`, on the CPU."""
    return SegmentBackend(lambda device: segments, breaks=True)
