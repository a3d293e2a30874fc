"""The graph plugin `tbo`, two-batch overlap: runs a batch as two halves beside each other.

A batch holds right-padded rows: tensors [B, ...] per row, among them `lengths_B`, and [B, T, ...] per
token; the shape letters of a name (`_B`, `_BT`) tell which. The rows before a cut are the first half,
the others the second. Where the smaller half would have too few of the tokens, one row is cut in two:
its later tokens become the first row of the second half, and attend to the keys and values that the
first half keeps (`draftcore_graphs.divided`).

On CUDA the second half runs on a second stream, which is forked and joined within the graph: small
kernels of one half fill the device while those of the other end. Elsewhere it follows the first.

In a graph the cut depends on the padded shape alone, so a replay changes nothing of it.

Shape letters: B rows, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from draftcore.contracts.runner import Batch, Outputs, ShapeKey
from draftcore_graphs.cuda import beside
from draftcore_graphs.divided import DividedRow
from draftcore_graphs.graph_plugin import GraphPlugin, Work
from draftcore_graphs.options import LEAST_SHARE


@dataclass(frozen=True)
class Cut:
    """Where a batch is cut: before row `row`, or after `inside` tokens of it."""

    row: int
    inside: int = 0


def balanced_cut(rows: int, width: int, least_share: float = LEAST_SHARE) -> Cut | None:
    """Return the cut that balances the tokens of rows of one width; None for a single token.

    A row is cut only where the smaller half would otherwise have less than `least_share` of the tokens.
    """
    if rows // 2 >= max(1, least_share * rows):
        return Cut(rows // 2)
    half = rows * width // 2
    return Cut(half // width, half % width) if half else None


def split(batch: Batch, cut: Cut) -> tuple[Batch, Batch]:
    """Return the halves. The host reads no value, so that a graph can hold the split."""
    first = {name: value[: cut.row + (cut.inside > 0)] for name, value in batch.items()}
    second = {name: value[cut.row :] for name, value in batch.items()}
    if cut.inside:
        for name, value in batch.items():
            if per_token(name):
                first[name], second[name] = _cut_rows(value, cut)
        first["lengths_B"], second["lengths_B"] = _cut_lengths(batch["lengths_B"], cut)
    return first, second


def merge(first: Outputs, second: Outputs, cut: Cut) -> Outputs:
    """Join the halves' outputs, each tensor [B, T, ...], to those of the whole batch."""

    def joined(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return None if one is None or other is None else _merged(one, other, cut)

    return tree_map(joined, first, second)


def per_token(name: str) -> bool:
    return name.rpartition("_")[2].startswith("BT")


class TwoBatchOverlap(GraphPlugin):
    """Has the work of every bucket recorded by halves; a bucket of one token stays whole."""

    def __init__(self, least_share: float = LEAST_SHARE) -> None:
        self.least_share = least_share

    def on_capture(self, key: ShapeKey, batch: Batch, work: Work) -> Work:
        cut = balanced_cut(len(batch["lengths_B"]), _width(batch), self.least_share)
        return work if cut is None else Halves(work, cut, batch)

    def on_replay(self, key: ShapeKey, batch: Batch) -> None:
        """Do nothing: a replay is cut as its bucket was."""


@dataclass(frozen=True)
class Halves:
    """The work of a bucket, done by halves beside each other."""

    work: Work
    cut: Cut
    whole: Batch

    def __call__(
        self, batch: Batch, *, ends: DividedRow | None = None, begins: DividedRow | None = None
    ) -> Outputs:
        if batch is not self.whole:  # another plugin has cut the batch
            return self.work(batch, ends=ends, begins=begins)
        row = DividedRow(self.cut.inside, _width(batch)) if self.cut.inside else None
        first, second = split(batch, self.cut)
        with beside(batch["lengths_B"].device) as second_stream:
            one = self.work(first, ends=row)
            with second_stream:
                other = self.work(second, begins=row)
        return merge(one, other, self.cut)


def _cut_lengths(lengths_B: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return the lengths of the rows of both halves; the cut row has a part in each."""
    before, row, after = lengths_B.tensor_split((cut.row, cut.row + 1))
    head = row.clamp(max=cut.inside)
    return torch.cat([before, head]), torch.cat([row - head, after])


def _width(batch: Batch) -> int:
    """Return the tokens of a padded row."""
    return next(value.shape[1] for name, value in batch.items() if per_token(name))


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
