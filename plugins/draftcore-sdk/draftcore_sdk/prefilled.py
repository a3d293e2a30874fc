"""Requests as a prefill server hands them over, for the tests of disaggregation.

Rows are filled as the wire is: as many columns as a field is wide, of which the algorithm needs
the first; the rest is what another request left there. States are large, some of their numbers are zeros
of either sign, those of the request ABORTED all; ids need 18 bits; probabilities come in no order and add up
to no 1, as those of several draft layers do.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from draftcore_sglang.rows import (
    Algorithm,
    Arrivals,
    DraftShape,
    HandedOver,
    RowField,
    first_draft_input,
    wire_row,
)
from torch import Tensor

from draftcore.contracts.serving import DraftInput

# Neither the tiny target's width nor a multiple of it; six proposals of the wire's sixteen.
SHAPE = DraftShape(hidden_size=24, dtype="float32", topk=2, layers=3)
SHAPES = (SHAPE, DraftShape(40, "bfloat16", topk=4), DraftShape(16, "float16"))
ABORTED = "aborted"
SLOTS, UNTOUCHED = 64, -7  # of a relay's buffers, and what is in them


@dataclass
class Log:
    """A relay that remembers what was written to it; it has a buffer of whatever name is asked for."""

    calls: list[tuple[str, list[int], Any]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.buffers.setdefault(name, torch.full((SLOTS,), UNTOUCHED))

    @property
    def overwritten(self) -> list[str]:
        """The buffers that were written to behind its back."""
        return [name for name, one in self.buffers.items() if (one != UNTOUCHED).any()]

    def publish(self, slots_B: Tensor, seq_lens_B: Tensor) -> None:
        self.calls.append(("publish", slots_B.tolist(), seq_lens_B.tolist()))

    def stash(self, slots_B: Tensor, made: Any) -> None:
        self.calls.append(("stash", slots_B.tolist(), made))


def request(rid: str, row: Sequence[RowField]) -> HandedOver:
    """A request with a full row, the same for the same id."""
    generator = torch.Generator().manual_seed(zlib.crc32(rid.encode()))
    values: dict[str, Tensor | None] = {}
    for column in row:
        drawn = torch.rand(column.width, generator=generator)
        if column.name == "topk_index":
            drawn = (drawn * 200_000).floor()
        elif column.name == "hidden":
            drawn = (4000 * (drawn - 0.5)) * (rid != ABORTED)
            drawn[1::5], drawn[2::5] = -0.0, 0.0
        values[column.name] = drawn.to(getattr(torch, column.dtype))
    return HandedOver(rid, values)


def arrivals(requests: Sequence[HandedOver], overlap: bool = True) -> Arrivals:
    """A batch of them, in slots 3, 5, 7 and so on."""
    slots_B = torch.arange(len(requests)) * 2 + 3
    return Arrivals(requests, slots_B, torch.arange(len(requests)) + 10, overlap)


def last_tokens(requests: Sequence[HandedOver]) -> Tensor:
    return torch.tensor([zlib.crc32(x.rid.encode()) % 200 for x in requests], dtype=torch.int64)


def take_over(
    algorithm: Algorithm, rids: Sequence[str], log: Log | None = None, overlap: bool = True,
    shape: DraftShape = SHAPE,
) -> DraftInput:  # fmt: skip
    """Take over requests of these ids, whose rows are full."""
    row = wire_row(algorithm, shape)
    requests = [request(rid, row) for rid in rids]
    batch, tokens_B = arrivals(requests, overlap), last_tokens(requests)
    return first_draft_input(algorithm, batch, tokens_B, log or Log(), shape, lambda found: found)
