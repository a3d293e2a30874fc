"""Two-batch overlap: a batch in two halves of like many tokens, to be run beside each other.

A batch holds right-padded rows, one request each: tensors [B, ...] per request, among them
`lengths_B`, and [B, T, ...] per token, told apart by the shape letters of their names (`_B`,
`_BT`). A cut leaves the requests before it to the first half and the others to the second. Where
one half would have too small a share of the tokens, one request is cut in two: its later tokens
begin the second half's first row. `starts_B` says how many tokens of a row lie in the first half,
`rows_B` which row of the batch it is: what looks back over a request, as attention does, runs the
first half first and finds its tokens there.

In a graph the cut depends on the padded shape alone. All that a replay changes are the numbers of
live tokens in the halves, `counts_2`, at an address that stays.

Shape letters: B requests, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from draftcore.graphs import GraphPlugin, Outputs, ShapeKey

Batch = Mapping[str, Tensor]
LEAST_SHARE = 0.48  # of the tokens, for the smaller half


@dataclass(frozen=True)
class Cut:
    """Where a batch is cut: before request `row`, or after `inside` tokens of it."""

    row: int
    inside: int = 0


def balanced_cut(lengths: Sequence[int], least_share: float = LEAST_SHARE) -> Cut | None:
    """Return the cut that balances the tokens of requests of these lengths; None for less than two.

    Requests are left whole unless the smaller half would then have less than `least_share` of the
    tokens, and also where a further request would make more requests than tokens.
    """
    total = sum(lengths)
    starts = [0, *accumulate(lengths)][:-1]
    row = min(range(len(lengths)), key=lambda row: abs(total - 2 * starts[row]), default=0)
    smaller = min(starts[row], total - starts[row]) if starts else 0
    if smaller > 0 and (smaller >= least_share * total or len(lengths) + 1 > total):
        return Cut(row)
    if total < 2:
        return None
    half = total // 2
    row = max(row for row, start in enumerate(starts) if start <= half)
    return Cut(row, half - starts[row])


def split(batch: Batch, cut: Cut) -> tuple[Batch, Batch]:
    """Return the halves. No value is looked at, so a graph can hold it."""
    lengths_B = batch["lengths_B"]
    rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
    whole = {**batch, "rows_B": rows_B, "starts_B": torch.zeros_like(lengths_B)}
    first = {name: value[: cut.row + (cut.inside > 0)] for name, value in whole.items()}
    second = {name: value[cut.row :] for name, value in whole.items()}
    if cut.inside:
        at_cut_B = rows_B == cut.row
        head_B = torch.where(at_cut_B, lengths_B.clamp(max=cut.inside), lengths_B)
        first["lengths_B"], second["lengths_B"] = head_B[: cut.row + 1], lengths_B[cut.row :]
        second["starts_B"] = torch.where(at_cut_B, head_B, 0)[cut.row :]
        second["lengths_B"] = second["lengths_B"] - second["starts_B"]
        for name, value in batch.items():
            if per_token(name):
                first[name], second[name] = _cut_rows(value, cut)
    return first, second


def merge(first: Outputs, second: Outputs, cut: Cut) -> Outputs:
    """Join the halves' outputs, each tensor [B, T, ...], to those of the whole batch."""
    if isinstance(first, Tensor):
        return _merged(first, second, cut)
    if isinstance(first, dict):
        return {name: merge(value, second[name], cut) for name, value in first.items()}
    if isinstance(first, tuple | list):
        pairs = zip(first, second, strict=True)
        return type(first)(merge(one, other, cut) for one, other in pairs)
    return None


def per_token(name: str) -> bool:
    return name.rpartition("_")[2].startswith("BT")


class TwoBatchOverlap(GraphPlugin):
    """Cuts every captured bucket; `run` does a bucket's work by halves."""

    def __init__(self, least_share: float = LEAST_SHARE) -> None:
        self.least_share = least_share
        self.cuts: dict[ShapeKey, Cut | None] = {}
        self.counts_2: Tensor | None = None  # int32, made at the first capture

    def on_capture(self, key: ShapeKey, batch: Batch) -> None:
        self.cuts[key] = balanced_cut([_width(batch)] * len(batch["lengths_B"]), self.least_share)
        if self.counts_2 is None:
            self.counts_2 = torch.zeros(2, dtype=torch.int32, device=batch["lengths_B"].device)
        self.on_replay(key, batch)

    def on_replay(self, key: ShapeKey, batch: Batch) -> None:
        """Count the live tokens of the halves; a bucket that is not cut has them in the first."""
        assert self.counts_2 is not None
        cut, lengths_B = self.cuts[key], batch["lengths_B"].clamp(max=_width(batch))
        halves = (lengths_B,) if cut is None else _lengths(split({"lengths_B": lengths_B}, cut))
        for at, half_B in enumerate(halves):
            self.counts_2[at] = half_B.sum()

    def run(self, key: ShapeKey, batch: Batch, work: Callable[[Batch], Outputs]) -> Outputs:
        """Call `work` for each half of the batch, or for a bucket that cannot be cut as it is."""
        cut = self.cuts[key]
        if cut is None:
            return work(batch)
        first, second = split(batch, cut)
        return merge(work(first), work(second), cut)


def _lengths(halves: tuple[Batch, Batch]) -> tuple[Tensor, Tensor]:
    return halves[0]["lengths_B"], halves[1]["lengths_B"]


def _width(batch: Batch) -> int:
    """The tokens of a padded row: one, where a batch has no tensor per token."""
    return next((value.shape[1] for name, value in batch.items() if per_token(name)), 1)


def _cut_rows(value_BT: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Cut one row in two. A half is as wide as its widest row."""
    before, row, after = value_BT.tensor_split((cut.row, cut.row + 1))
    head, tail = row[:, : cut.inside], row[:, cut.inside :]
    return _rows(before, head), _rows(tail, after)


def _merged(first: Tensor, second: Tensor, cut: Cut) -> Tensor:
    if not cut.inside:
        return torch.cat([first, second])
    before, head = first[: cut.row], first[cut.row :, : cut.inside]
    after, tail = second[1:], second[:1]
    width = max(first.shape[1] if len(before) else 0, second.shape[1] if len(after) else 0)
    width = width or cut.inside + tail.shape[1]
    row = torch.cat([head, tail[:, : width - cut.inside]], dim=1)
    return torch.cat([part for part in (before, row, after) if len(part)])


def _rows(*parts: Tensor) -> Tensor:
    """Join rows of several widths, padded with zeros."""
    width = max(part.shape[1] for part in parts if len(part))
    padded = [
        functional.pad(part.transpose(1, -1), (0, width - part.shape[1])).transpose(1, -1)
        for part in parts
        if len(part)
    ]
    return torch.cat(padded)
