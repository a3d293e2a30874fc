"""Anchors, the blocks that start at them, and what each row of a block is to predict.

A sample's anchors are drawn by a generator of their own, seeded by (run seed, sample id, epoch), so
they depend neither on the batch nor on what was drawn before, and a resumed run draws the same.
Dropped anchors cost nothing: `Blocks` lists the kept ones only, whatever sample they belong to. All
that depends on the mask's values is found here, on the CPU, so that no step waits for the device.

Shape letters: B batch, T tokens, N anchors per sample, M kept blocks, S rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from draftcore_nn.batches import generator_of, host_mask
from draftcore_nn.layers import take
from draftcore_nn.losses import padded
from torch import Tensor
from torch.nn import functional

from draftcore.contracts.algorithm import DraftBatch, OnDevice, SampleId


@dataclass(frozen=True)
class Blocks(OnDevice):
    """The kept blocks of a batch. There is always one: where none is kept, `keep_M` is false.

    sample_M: row of the batch; anchor_M: position of the first token; slot_M: place among the
    `per_sample` blocks of each row of the batch, flat.
    """

    sample_M: Tensor
    anchor_M: Tensor
    slot_M: Tensor
    keep_M: Tensor
    per_sample: int

    @classmethod
    def of(cls, anchors_BN: Tensor, keep_BN: Tensor) -> Blocks:
        """Take the anchors that are kept, in the order given."""
        slot_M = keep_BN.flatten().nonzero()[:, 0]
        if len(slot_M) == 0:
            slot_M = slot_M.new_zeros(1)
        return cls(
            sample_M=slot_M // anchors_BN.shape[1],
            anchor_M=anchors_BN.flatten()[slot_M],
            slot_M=slot_M,
            keep_M=keep_BN.flatten()[slot_M],
            per_sample=anchors_BN.shape[1],
        )

    def positions(self, block_size: int) -> Tensor:
        """Return every row's position, [M, S]; a block may run past the end of its sample."""
        return self.anchor_M[:, None] + torch.arange(block_size, device=self.anchor_M.device)


def rows_with_loss(valid_MS: Tensor) -> Tensor:
    """Return the rows that are valid, flat m*S + s, and what fills them up, see `Targets`."""
    row_R = valid_MS.flatten().nonzero()[:, 0]
    return functional.pad(row_R, (0, padded(len(row_R)) - len(row_R)), value=valid_MS.numel())


@dataclass(frozen=True)
class Targets(OnDevice):
    """What rows of blocks predict: the tokens at `index_MS`, where `valid_MS` says so.

    The rows with loss are `row_R`, flat m*S + s; what fills them up to a number that a compiled loss can
    cut evenly is M*S, one more than the last. `rank_S` counts rows from the first that predicts.
    """

    index_MS: Tensor
    valid_MS: Tensor
    row_R: Tensor
    rank_S: Tensor

    @classmethod
    def of(
        cls, mask_BT: Tensor, blocks: Blocks, block_size: int, *, shifted: bool = False
    ) -> Targets:
        """Find what rows predict, by the mask on the CPU: row k the token at its own position.

        Row 0 predicts nothing. When shifted, row k predicts the next position's.
        """
        rank_S = torch.arange(block_size) - int(not shifted)
        index_MS = blocks.positions(block_size) + int(shifted)
        length = mask_BT.shape[1]
        inside_MS = (index_MS < length) & blocks.keep_M[:, None] & (rank_S >= 0)
        index_MS = index_MS.clamp_max(length - 1)
        valid_MS = inside_MS & mask_BT[blocks.sample_M[:, None], index_MS]
        return cls(index_MS, valid_MS, rows_with_loss(valid_MS), rank_S)

    def weights(self, gamma: float | None, dtype: torch.dtype) -> Tensor:
        """Weigh rows, [M, S]: the first that predicts 1, each further one exp(-1/gamma) as much."""
        decay_S = torch.exp(self.rank_S.to(dtype) * (0.0 if gamma is None else -1 / gamma))
        return self.valid_MS.to(dtype) * decay_S

    def labels(self, token_ids_BT: Tensor, blocks: Blocks) -> Tensor:
        """Return the tokens that the rows with loss predict, [R]."""
        return self.take(token_ids_BT[blocks.sample_M[:, None], self.index_MS])

    def take(self, x_MS: Tensor) -> Tensor:
        """Take the rows with loss of [M, S, ...], as [R, ...]; what fills them up is some row."""
        count = self.valid_MS.numel()
        return take(x_MS.flatten(0, 1), self.row_R.clamp_max(count - 1), self.row_R < count)

    def weigh(self, x_R: Tensor, weight_MS: Tensor) -> Tensor:
        """Return the sum of rows' values by their weights."""
        return (self.lay(x_R) * weight_MS).sum()

    def mean(self, x_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of rows' values, and the number of rows, of which it is the mean."""
        count_MS = self.valid_MS.to(x_R.dtype)
        return self.weigh(x_R, count_MS), count_MS.sum()

    def lay(self, x_R: Tensor) -> Tensor:
        """Undo `take`: lay values of rows out as [M, S], zeros elsewhere."""
        flat = x_R.new_zeros(self.valid_MS.numel() + 1).index_copy(0, self.row_R, x_R)
        return flat[:-1].view(self.valid_MS.shape)


def draw_blocks(batch: DraftBatch, num_anchors: int, seed: int) -> Blocks:
    """Draw up to `num_anchors` anchors per sample, uniform without replacement, in order.

    A position may be one if its token and the next are to be learned. Sorted anchors see contexts
    of like length side by side.
    """
    mask_BT = host_mask(batch)
    pair_BT = mask_BT & functional.pad(mask_BT[:, 1:], (0, 1))
    rows = [
        draw_anchors(pair_T.nonzero()[:, 0], num_anchors, seed, sample)
        for pair_T, sample in zip(pair_BT, batch.ids, strict=True)
    ]
    width = max(1, *map(len, rows))
    anchors_BN = torch.stack([functional.pad(row, (0, width - len(row))) for row in rows])
    keep_BN = torch.stack([torch.arange(width) < len(row) for row in rows])
    return Blocks.of(anchors_BN, keep_BN)


def draw_anchors(eligible: Tensor, num_anchors: int, seed: int, sample: SampleId) -> Tensor:
    """Choose ascending anchors among the eligible positions of one use of one sample."""
    order = torch.randperm(len(eligible), generator=generator_of(sample, seed))
    return eligible[order[:num_anchors].sort().values]
