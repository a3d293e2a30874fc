"""Attention of a block: over the context before its anchor, and over its own rows.

A query of the block at anchor a sees context keys j < a (in a sliding layer only those within the
window) and its own block, under one softmax. There are two ways to the same numbers:

- compiled for CUDA, one FlexAttention over the context's keys and those of all blocks. It visits only
  tiles in which something is seen, found here from the anchors, so nothing is as large as a mask;
- elsewhere the context is one fused kernel over [rows of all blocks, T] with an additive mask, as all
  blocks of a sample share its keys; the in-block part is a small product per block. The two are joined
  by their log-sum-exps, exactly (see `draftcore_nn.attention`).

Softmax arithmetic is in fp32 (fp64 for fp64 inputs).

Shape letters: B batch, T tokens, M kept blocks, S rows of a block, Q all rows of a sample's blocks
(per_sample * S), A query heads, G key/value heads, D head width, I tiles of queries, J tiles of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from draftcore_nn import attention as fused
from draftcore_nn import masks
from draftcore_nn.layers import cast, full_precision, take
from draftcore_nn.masks import TILE
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from draftcore_dflash.blocks import Blocks

if TYPE_CHECKING:  # it brings torch's compiler, which takes seconds
    from torch.nn.attention.flex_attention import BlockMask

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Tiles(masks.Tiles):
    """The tiles of scores in which blocks see something, found from their anchors.

    Keys are those of a context, so long, then those of the blocks. `anchor_BN` has the anchors of all slots.
    """

    anchor_BN: Tensor
    length: Tensor

    @classmethod
    def of_blocks(
        cls, blocks: Blocks, shape: tuple[int, int], block_size: int, window: int | None
    ) -> Tiles:
        """List the tiles of blocks on the CPU, for a context of `shape` [B, T]."""

        (batch, length), queries = shape, blocks.per_sample * block_size
        anchor_BN = torch.zeros(batch * blocks.per_sample, dtype=torch.long)
        anchor_BN = anchor_BN.index_copy(0, blocks.slot_M, blocks.anchor_M).view(batch, -1)
        anchor_BQ = functional.pad(anchor_BN.repeat_interleave(block_size, 1), (0, -queries % TILE))
        anchor_BIQ = torch.unflatten(anchor_BQ, 1, (-1, TILE))
        first_BI1, last_BI1 = anchor_BIQ.amin(-1, keepdim=True), anchor_BIQ.amax(-1, keepdim=True)
        key_J = torch.arange(0, length + queries, TILE)
        query_I1 = torch.arange(0, queries, TILE)[:, None]
        # A tile's rows are of whole blocks and of parts of two.
        start_I1 = length + query_I1 // block_size * block_size
        end_I1 = length + ((query_I1 + TILE - 1) // block_size + 1) * block_size
        own_IJ = (key_J < end_I1) & (key_J + TILE > start_I1)
        context_BIJ = (key_J < last_BI1) & (key_J < length)
        whole_BIJ = context_BIJ & (key_J + TILE <= first_BI1)
        if window is not None:
            context_BIJ = context_BIJ & (key_J + TILE > first_BI1 + 1 - window)
            whole_BIJ = whole_BIJ & (key_J > last_BI1 + block_size - 1 - window)
        partly_BIJ = (own_IJ | context_BIJ) & ~whole_BIJ
        return cls(masks.listed(partly_BIJ, whole_BIJ), anchor_BN, torch.tensor(length))

    def of_rows(self, length: int, block_size: int, window: int | None, causal: bool) -> BlockMask:
        """Return them with what is seen within a tile, for FlexAttention."""
        queries = self.anchor_BN.shape[1] * block_size
        rule = masks.blocks(self.anchor_BN, block_size, self.length, window=window, causal=causal)
        return self.mask(rule, (queries, length + queries))


@dataclass(frozen=True)
class AttentionMask:
    """What the rows of all blocks see: `seen` is added to context scores, or what FlexAttention reads."""

    seen: Tensor | BlockMask
    blocks: Blocks
    causal: bool

    @classmethod
    def of(
        cls, blocks: Blocks, shape: tuple[int, int], block_size: int, *, window: int | None,
        causal: bool, dtype: torch.dtype, tiles: Tiles | None = None,
    ) -> AttentionMask:  # fmt: skip
        """Say what blocks see of a context of `shape` [B, T]: a window, or all of it; `causal` in a block.

        `tiles` are for a compiled draft on CUDA; elsewhere FlexAttention would make all scores.
        """
        if tiles is not None and torch.compiler.is_compiling():
            return cls(tiles.of_rows(shape[1], block_size, window, causal), blocks, causal)
        return cls(_bias(blocks, shape, block_size, window, dtype), blocks, causal)


def _bias(
    blocks: Blocks, shape: tuple[int, int], block_size: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return what is added to context scores, [B, 1, Q, T]; slots without a block see all."""
    batch, length = shape
    anchor, positions = blocks.anchor_M, blocks.positions(block_size)
    time_T = torch.arange(length, device=anchor.device)
    seen_MST = (time_T < anchor[:, None, None]).expand(-1, block_size, -1)
    if window is not None:
        seen_MST = seen_MST & (time_T > positions[..., None] - window)
    seen_RST = seen_MST.new_ones(batch * blocks.per_sample, block_size, length)
    seen_RST = seen_RST.index_copy(0, blocks.slot_M, seen_MST)
    return masks.bias(seen_RST.view(batch, 1, -1, length), dtype)


def attend(query_MSAD: Tensor, own: KeysValues, context: KeysValues, mask: AttentionMask) -> Tensor:
    """Attend from every row of every block; returns [M, S, A, D] in the query's dtype.

    `own` are keys and values of the blocks, [M, S, G, D], `context` those of the context, [B, T, G, D].
    Scores are scaled by D^-0.5.
    """
    blocks, seen = mask.blocks, mask.seen
    if not isinstance(seen, Tensor):
        from torch.nn.attention.flex_attention import flex_attention

        rows = len(context[0]) * blocks.per_sample
        query_BAQD, *own_BGQD = (
            _laid(x, blocks.slot_M, rows, len(context[0])) for x in (query_MSAD, *own)
        )
        key, value = (
            torch.cat([x_BTGD.transpose(1, 2), x_BGQD], 2)
            for x_BTGD, x_BGQD in zip(context, own_BGQD, strict=True)
        )
        found = flex_attention(query_BAQD, key, value, block_mask=seen, enable_gqa=True)
        assert isinstance(found, Tensor)
        return take(_slots(found, query_MSAD.shape[1]), blocks.slot_M)
    share = query_MSAD.shape[2] // own[0].shape[2]
    given = [x if share == 1 else x.repeat_interleave(share, -2) for x in (*own, *context)]
    return _JointAttention.apply(  # type: ignore[no-any-return, no-untyped-call]
        query_MSAD, *given[:2], *(x_BTAD.transpose(1, 2) for x_BTAD in given[2:]), seen,
        blocks.slot_M, mask.causal,
    )  # fmt: skip


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, context_key: Tensor,
        context_value: Tensor, bias: Tensor, slot_M: Tensor, causal: bool,
    ) -> Tensor:  # fmt: skip
        with full_precision(query.device):
            query_BAQD = _pad(query, bias, slot_M)
            output, logsumexp, saved = fused.attend(query_BAQD, context_key, context_value, bias)
            scores_MASS = _own_scores(query, key, causal)
            context_MAS = _take(logsumexp, query, slot_M).transpose(1, 2).to(scores_MASS.dtype)
            joint_MAS = torch.logaddexp(context_MAS, scores_MASS.logsumexp(-1))
            value_MASD = _heads(value).to(joint_MAS.dtype)
            own_MASD = (scores_MASS - joint_MAS[..., None]).exp() @ value_MASD
            share_MSA1 = (context_MAS - joint_MAS).exp().transpose(1, 2)[..., None]
            joined = _take(output, query, slot_M) * share_MSA1 + own_MASD.transpose(1, 2)
            joined = cast(joined, query.dtype)
        ctx.causal = causal
        ctx.save_for_backward(
            query, key, value, context_key, context_value, bias, slot_M, joined, joint_MAS, *saved
        )
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context_key, context_value, bias, slot_M, joined, joint_MAS, *saved = (
            ctx.saved_tensors
        )
        with full_precision(query.device):
            grad_query, grad_context_key, grad_context_value = fused.attend_backward(
                _pad(grad, bias, slot_M), _pad(query, bias, slot_M), context_key, context_value,
                bias, _pad(joined, bias, slot_M),
                _pad(joint_MAS.transpose(1, 2)[..., None], bias, slot_M)[..., 0], saved,
            )  # fmt: skip
            own = fused.further_backward(
                _heads(grad), _heads(query), _heads(key), _heads(value),
                _own_scores(query, key, ctx.causal), _heads(joined), joint_MAS,
            )  # fmt: skip
            own_query, own_key, own_value = (x_MASD.transpose(1, 2) for x_MASD in own)
            own_query = own_query + _take(grad_query, query, slot_M)
        return (
            own_query.to(query.dtype), own_key.to(key.dtype), own_value.to(value.dtype),
            grad_context_key, grad_context_value, None, None, None,
        )  # fmt: skip


def _heads(x_MSAD: Tensor) -> Tensor:
    """Turn [M, S, A, D] into [M, A, S, D]."""
    return x_MSAD.transpose(1, 2)


def _own_scores(query_MSAD: Tensor, key_MSAD: Tensor, causal: bool) -> Tensor:
    """Score a block's rows with each other; returns [M, A, S, S]."""
    scores = fused.further_scores(_heads(query_MSAD), _heads(key_MSAD))
    if not causal:
        return scores
    size = scores.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf"))


def _pad(x_MSAD: Tensor, bias_B1QT: Tensor, slot_M: Tensor) -> Tensor:
    """Lay blocks out beside their bias, as [B, A, Q, D]."""
    batch, _, rows, _ = bias_B1QT.shape
    return _laid(x_MSAD, slot_M, batch * rows // x_MSAD.shape[1], batch)


def _laid(x_MSAD: Tensor, slot_M: Tensor, slots: int, batch: int) -> Tensor:
    """Lay blocks out as [B, A, Q, D], zeros elsewhere (they then add nothing to gradients)."""
    flat = x_MSAD.new_zeros(slots, *x_MSAD.shape[1:]).index_copy(0, slot_M, x_MSAD)
    return flat.view(batch, -1, *x_MSAD.shape[2:]).transpose(1, 2)


def _take(x_BAQ: Tensor, like_MSA: Tensor, slot_M: Tensor) -> Tensor:
    """Undo `_pad`: turn [B, A, Q, ...] into [M, S, A, ...]."""
    return _slots(x_BAQ, like_MSA.shape[1]).index_select(0, slot_M)


def _slots(x_BAQ: Tensor, block_size: int) -> Tensor:
    """Turn [B, A, Q, ...] into the blocks of all slots, [B*N, S, A, ...]."""
    return torch.unflatten(x_BAQ.transpose(1, 2), 1, (-1, block_size)).flatten(0, 1)
