"""Attention of a block: over the context before its anchor, and over its own rows.

A query of the block at anchor a sees context keys j < a (in a sliding layer only those within the
window) and its own block, under one softmax. All blocks of a sample share the context keys, so
that part is one fused kernel over [rows of all blocks, T] with an additive mask; the in-block part
is a small product per block, and blocks never meet, so nothing of size [rows, rows] exists.
The two are joined by their log-sum-exps, exactly (see `draftcore_nn.attention`).

Softmax arithmetic is in fp32 (fp64 for fp64 inputs).

Shape letters: B batch, T tokens, M kept blocks, S rows of a block, Q all rows of a sample's blocks
(per_sample * S), A query heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from draftcore_nn import attention as fused
from draftcore_nn.layers import full_precision
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftcore_dflash.blocks import Blocks


@dataclass(frozen=True)
class AttentionMask:
    """What the rows of all blocks see: bias_B1QT is added to context scores; `causal` in a block."""

    bias_B1QT: Tensor
    causal: bool

    @classmethod
    def of(
        cls, blocks: Blocks, shape: tuple[int, int], block_size: int, *,
        window: int | None, causal: bool, dtype: torch.dtype,
    ) -> AttentionMask:  # fmt: skip
        """Say what blocks see of a context of `shape` [B, T]: a window, or all of it.

        What is hidden gets a large negative score, not an infinite one: a row without any context
        (anchor 0) then gets a weight of exactly 0 for it in the joint softmax.
        """
        batch, length = shape
        anchor, positions = blocks.anchor_M, blocks.positions(block_size)
        time_T = torch.arange(length, device=anchor.device)
        seen_MST = (time_T < anchor[:, None, None]).expand(-1, block_size, -1)
        if window is not None:
            seen_MST = seen_MST & (time_T > positions[..., None] - window)
        rows = batch * blocks.per_sample
        # CUDA's kernel wants rows of the bias to start at multiples of 16 elements.
        bias = torch.zeros(
            rows, block_size, length + -length % 16, dtype=dtype, device=anchor.device
        )
        bias[blocks.slot_M, :, :length] = lowest(dtype) * (~seen_MST).to(dtype)
        return cls(bias.view(batch, 1, -1, bias.shape[-1])[..., :length], causal)


def lowest(dtype: torch.dtype) -> float:
    """Return a score below any other, with room to be scaled and added to."""
    return torch.finfo(dtype).min / 4


def attend(
    query_MSAD: Tensor, key_MSAD: Tensor, value_MSAD: Tensor, context_key_BATD: Tensor,
    context_value_BATD: Tensor, slot_M: Tensor, mask: AttentionMask,
) -> Tensor:  # fmt: skip
    """Attend from every row of every block; returns [M, S, A, D] in the query's dtype.

    Keys and values have their heads expanded to A. Scores are scaled by D^-0.5.
    """
    return _JointAttention.apply(  # type: ignore[no-any-return, no-untyped-call]
        query_MSAD, key_MSAD, value_MSAD, context_key_BATD, context_value_BATD,
        mask.bias_B1QT, slot_M, mask.causal,
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
            joined = joined.to(query.dtype)
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
    """Lay blocks out as [B, A, Q, D], zeros elsewhere (they then add nothing to gradients)."""
    batch, _, rows, _ = bias_B1QT.shape
    block_size, heads, width = x_MSAD.shape[1:]
    flat = x_MSAD.new_zeros(batch * rows // block_size, block_size, heads, width)
    return flat.index_copy(0, slot_M, x_MSAD).view(batch, rows, heads, width).transpose(1, 2)


def _take(x_BAQ: Tensor, like_MSA: Tensor, slot_M: Tensor) -> Tensor:
    """Undo `_pad`: turn [B, A, Q, ...] into [M, S, A, ...]."""
    rows = torch.unflatten(x_BAQ.transpose(1, 2), 1, (-1, like_MSA.shape[1]))
    return rows.flatten(0, 1).index_select(0, slot_M)
