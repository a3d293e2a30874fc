"""Wrappers of a run: its held-out loss is lowest at step 2, and FULL names who lacks memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from draftcore import hookimpl
from draftcore.contracts.algorithm import StepContext, StepOutput
from draftcore.contracts.capture import CaptureBatch, CapturedBatch
from draftcore.errors import DraftcoreError

Wrapper = Generator[None, Any, Any]
GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
    "1.20 GiB is free. Including non-PyTorch memory, this process has 3 GiB memory in use."
)


def need(place: str) -> None:
    import torch

    full = os.environ.get("FULL")
    if full == place:
        torch.empty(1 << 55)
    if full == f"the plugin in {place}":
        raise DraftcoreError("its ring is out of memory\n  make it larger")
    if (full, place) == ("a GPU", "a step"):
        raise torch.OutOfMemoryError(GPU)


class Capture:
    def __init__(self, inner: Any) -> None:
        self.inner, self.close = inner, inner.close

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        need("a capture")
        yield from self.inner.features(batches)


@hookimpl(wrapper=True)
def capture() -> Wrapper:
    return Capture((yield))


@hookimpl(wrapper=True)
def build_draft() -> Wrapper:
    need("building")
    return (yield)


@hookimpl(wrapper=True)
def forward_loss(context: StepContext) -> Wrapper:
    import torch

    need("a step" if context.training else "an evaluation")
    output = yield
    far = torch.tensor(abs(context.step - 2.0))
    return output if context.training else StepOutput(far, torch.ones(()), {})
