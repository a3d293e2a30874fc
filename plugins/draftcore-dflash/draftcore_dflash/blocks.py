"""Anchors, the blocks that start at them, and what each row of a block is to predict.

A sample's anchors are drawn by a generator of their own, seeded by (run seed, sample id, epoch), so
they depend neither on the batch nor on what was drawn before, and a resumed run draws the same.
Dropped anchors cost nothing: `Blocks` lists the kept ones only, whatever sample they belong to.

Shape letters: B batch, T tokens, N anchors per sample, M kept blocks, S rows of a block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
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


@dataclass(frozen=True)
class Targets:
    """What rows are to predict: token_MS, valid_MS (it counts), weight_MS (0 where not valid)."""

    token_MS: Tensor
    valid_MS: Tensor
    weight_MS: Tensor

    @classmethod
    def of(
        cls, batch: DraftBatch, blocks: Blocks, block_size: int, gamma: float | None,
        dtype: torch.dtype, *, shifted: bool = False,
    ) -> Targets:  # fmt: skip
        """Say what rows predict: row k the token at its own position, and row 0 nothing.

        When shifted, row k predicts the next position's. The first predicting row weighs 1, each
        further one exp(-1/gamma) of the one before. `dtype` is the weights'.
        """
        offsets_S = torch.arange(block_size, device=blocks.anchor_M.device)
        index_MS = blocks.positions(block_size) + int(shifted)
        length = batch.token_ids_BT.shape[1]
        inside_MS = (index_MS < length) & blocks.keep_M[:, None]
        index_MS = index_MS.clamp_max(length - 1)
        valid_MS = inside_MS & batch.loss_mask_BT[blocks.sample_M[:, None], index_MS]
        rank_S = offsets_S if shifted else offsets_S - 1
        decay_S = torch.exp(rank_S.to(dtype) * (0.0 if gamma is None else -1 / gamma))
        valid_MS = valid_MS & (rank_S >= 0)
        return cls(
            token_MS=batch.token_ids_BT[blocks.sample_M[:, None], index_MS],
            valid_MS=valid_MS,
            weight_MS=valid_MS.to(dtype) * decay_S,
        )


def draw_blocks(batch: DraftBatch, num_anchors: int, seed: int) -> Blocks:
    """Draw up to `num_anchors` anchors per sample, uniform without replacement, in order.

    A position may be one if its token and the next are to be learned. Sorted anchors see contexts
    of like length side by side. The mask comes to the host: the one wait of a step on a GPU.
    """
    mask_BT = batch.loss_mask_BT.cpu()
    pair_BT = mask_BT & functional.pad(mask_BT[:, 1:], (0, 1))
    rows = [
        draw_anchors(pair_T.nonzero()[:, 0], num_anchors, seed, sample)
        for pair_T, sample in zip(pair_BT, batch.ids, strict=True)
    ]
    width = max(1, *map(len, rows))
    anchors_BN = torch.zeros(len(rows), width, dtype=torch.long)
    keep_BN = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, anchors in enumerate(rows):
        anchors_BN[row, : len(anchors)] = anchors
        keep_BN[row, : len(anchors)] = True
    return Blocks.of(anchors_BN, keep_BN).to(batch.token_ids_BT.device)


def draw_anchors(eligible: Tensor, num_anchors: int, seed: int, sample: SampleId) -> Tensor:
    """Choose ascending anchors among the eligible positions of one use of one sample."""
    key = f"{seed}/{sample.feature_id}/{sample.epoch - 1}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    order = torch.randperm(len(eligible), generator=generator)
    return eligible[order[:num_anchors].sort().values]
