"""Attention among the pairs of a sample: who sees whom, and the kernels that respect it.

Pair (a, d) sees the rows at depth 0 up to its anchor, and its own anchor's pairs up to its depth: what a
parallel decoder has in its cache, and the mask rows before. A pair never sees another anchor's masks.

There are two ways to the same numbers: compiled for CUDA one FlexAttention, which visits only tiles of
scores in which something is seen, found here from the anchors; elsewhere one fused kernel with a table.

Shape letters: B batch, T tokens, E pairs, A query heads, G key/value heads, D head width, I tiles of
queries, J tiles of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from draftcore_nn import masks
from draftcore_nn.masks import TILE
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:  # it brings torch's compiler, which takes seconds
    from torch.nn.attention.flex_attention import BlockMask


def rule_of(anchor_BE: Tensor, depth_BE: Tensor) -> masks.Rule:
    """Say which pairs see which, as `draftcore_nn.masks` takes it."""

    def sees(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other, depth = anchor_BE[b, query], anchor_BE[b, key], depth_BE[b, key]
        return ((depth == 0) & (other <= own)) | ((other == own) & (depth <= depth_BE[b, query]))

    return sees


def seen_by(anchor_BE: Tensor, depth_BE: Tensor, tiles: Mapping[str, Tensor]) -> Tensor | BlockMask:
    """Return what pairs see: a table [B, 1, E, E], or for a compiled draft with `tiles` a BlockMask."""
    rule, (batch, count) = rule_of(anchor_BE, depth_BE), anchor_BE.shape
    if tiles and torch.compiler.is_compiling():
        return masks.Tiles(tiles).mask(rule, (count, count))
    return masks.dense(rule, (batch, count, count), anchor_BE.device)


def attend(
    query_BEAD: Tensor, key_BEGD: Tensor, value_BEGD: Tensor, seen: Tensor | BlockMask
) -> Tensor:
    """Attend from every pair; returns [B, E, A, D]. Scores are scaled by D^-0.5."""
    query, key, value = (x.transpose(1, 2) for x in (query_BEAD, key_BEGD, value_BEGD))
    if isinstance(seen, Tensor):
        # CUDA's fused kernel for a table takes no grouped heads.
        share = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(share, 1) for x in (key, value))
        found = functional.scaled_dot_product_attention(query, key, value, seen)
    else:
        from torch.nn.attention.flex_attention import flex_attention

        flexed = flex_attention(query, key, value, block_mask=seen, enable_gqa=True)
        assert isinstance(flexed, Tensor)
        found = flexed
    return found.transpose(1, 2)


def tiles_of(anchor_BE: Tensor, length: int) -> dict[str, Tensor]:
    """List the tiles of scores in which something is seen, on the CPU.

    The first `length` pairs are the rows at depth 0; the anchors of the others ascend.
    """
    batch, count = anchor_BE.shape
    # What fills the last tile up is like the pair before it.
    anchor_BIX = torch.unflatten(
        torch.cat([anchor_BE, anchor_BE[:, -1:].expand(batch, -count % TILE)], 1), 1, (-1, TILE)
    )
    start_I = torch.arange(0, count, TILE)
    first_BI, last_BI = anchor_BIX.amin(-1), anchor_BIX.amax(-1)
    rows_J, whole_J = start_I < length, start_I + TILE <= length
    partly_BIJ = rows_J & (start_I <= last_BI[..., None])
    whole_BIJ = whole_J & (start_I + TILE - 1 <= first_BI[..., None])
    # Pairs above depth 0 are seen by those of their anchor.
    masked_BIX = torch.arange(anchor_BIX[0].numel()).view(-1, TILE) >= length
    low_BI = anchor_BIX.where(masked_BIX, count).amin(-1)
    high_BI = anchor_BIX.where(masked_BIX, -2).amax(-1)
    own_BIJ = (low_BI[:, :, None] <= high_BI[:, None]) & (high_BI[:, :, None] >= low_BI[:, None])
    return masks.listed((partly_BIJ | own_BIJ) & ~whole_BIJ, whole_BIJ)
