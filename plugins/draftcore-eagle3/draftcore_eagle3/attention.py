"""Attention of the training-time test: causal over step-0 keys, plus a few keys of the own row.

At step k a query sees the step-0 keys up to its row and one extra key per step 1..k from the same
row, under one softmax. Scores over the step-0 keys never exist as a matrix: a fused kernel returns
its output and log-sum-exp, and the extra keys are merged in (see `draftcore_nn.attention`).

All kernels accumulate the softmax in fp32 (fp64 for fp64 inputs).

Shape letters: B batch, T tokens, N active rows, A query heads, G key/value heads, D head width,
X extra keys.
"""

from __future__ import annotations

from typing import Any

import torch
from draftcore_nn import attention as fused
from draftcore_nn.layers import full_precision
from torch import Tensor
from torch.autograd.function import once_differentiable


def attend(
    query_NAD: Tensor, key_BATD: Tensor, value_BATD: Tensor, extra_key_NGXD: Tensor,
    extra_value_NGXD: Tensor, rows_N: Tensor,
) -> Tensor:  # fmt: skip
    """Attend from the rows `rows_N` (flat b*T + t) over step-0 keys 0..t and the rows' extra keys.

    Keys and values of step 0 come with their heads expanded to A. Scores are scaled by
    D^-0.5. Returns [N, A, D] in the query's dtype.
    """
    return _JointAttention.apply(  # type: ignore[no-any-return, no-untyped-call]
        query_NAD, key_BATD, value_BATD, extra_key_NGXD, extra_value_NGXD, rows_N
    )


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_NAD: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        extra_key, extra_value, rows_N = rest
        with full_precision(query_NAD.device):
            output, logsumexp, saved = fused.attend(_pad(query_NAD, key, rows_N), key, value)
            output_NAD, logsumexp_NA = _take(output, rows_N), _take(logsumexp, rows_N)
            # The step-0 keys count as one key with their log-sum-exp for a score.
            scores = torch.cat([logsumexp_NA[..., None], _extra_scores(query_NAD, extra_key)], -1)
            log_parts = scores.log_softmax(-1)
            joint_NA = logsumexp_NA - log_parts[..., 0]
            part_NGRX = _grouped(log_parts[..., 1:].exp(), extra_key)
            output_NAD = output_NAD * log_parts[..., :1].exp()
            output_NAD = output_NAD + (part_NGRX @ extra_value.to(part_NGRX.dtype)).flatten(1, 2)
            output_NAD = output_NAD.to(query_NAD.dtype)
        ctx.save_for_backward(query_NAD, key, value, *rest, output_NAD, joint_NA, *saved)
        return output_NAD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NAD: Tensor) -> tuple[Tensor | None, ...]:
        query_NAD, key, value, extra_key, extra_value, rows_N, output_NAD, joint_NA, *saved = (
            ctx.saved_tensors
        )
        with full_precision(query_NAD.device):
            grad_query, grad_key, grad_value = fused.attend_backward(
                _pad(grad_NAD, key, rows_N), _pad(query_NAD, key, rows_N), key, value, None,
                _pad(output_NAD, key, rows_N), _pad(joint_NA[..., None], key, rows_N)[..., 0],
                saved,
            )  # fmt: skip
            scores_NAX = _extra_scores(query_NAD, extra_key)
            exact = scores_NAX.dtype
            grad, query = grad_NAD.to(exact), query_NAD.to(exact)
            delta_NA1 = (grad * output_NAD).sum(-1, keepdim=True)
            part_NAX = (scores_NAX - joint_NA[..., None]).exp()
            slope_NAX = (_grouped(grad, extra_value) @ extra_value.to(exact).mT).flatten(1, 2)
            slope_NAX = part_NAX * (slope_NAX - delta_NA1) * query.shape[-1] ** -0.5
            slope_NGRX = _grouped(slope_NAX, extra_key)
            grad_query_NAD = _take(grad_query, rows_N).to(exact)
            grad_query_NAD = grad_query_NAD + (slope_NGRX @ extra_key.to(exact)).flatten(1, 2)
            grad_extra_key = slope_NGRX.mT @ _grouped(query, extra_key)
            grad_extra_value = _grouped(part_NAX, extra_key).mT @ _grouped(grad, extra_key)
        return (
            grad_query_NAD.to(query_NAD.dtype), grad_key, grad_value,
            grad_extra_key.to(extra_key.dtype), grad_extra_value.to(extra_value.dtype), None,
        )  # fmt: skip


def _extra_scores(query_NAD: Tensor, extra_key_NGXD: Tensor) -> Tensor:
    """Score each row's query with its own extra keys; returns [N, A, X] in fp32 or fp64."""
    exact = torch.promote_types(query_NAD.dtype, torch.float32)
    query_NGRD = _grouped(query_NAD.to(exact), extra_key_NGXD) * query_NAD.shape[-1] ** -0.5
    scores_NGRX: Tensor = query_NGRD @ extra_key_NGXD.to(exact).mT
    return scores_NGRX.flatten(1, 2)


def _grouped(x_NA: Tensor, like_NG: Tensor) -> Tensor:
    """Split query heads into the groups that share a key head: [N, A, ...] to [N, G, A/G, ...]."""
    return torch.unflatten(x_NA, 1, (like_NG.shape[1], -1))


def _pad(x_NAD: Tensor, like_BATD: Tensor, rows_N: Tensor) -> Tensor:
    """Lay active rows out as [B, A, T, D], zeros elsewhere (they then add nothing to gradients)."""
    batch, heads, length, _ = like_BATD.shape
    flat = x_NAD.new_zeros(batch * length, heads, x_NAD.shape[-1]).index_copy(0, rows_N, x_NAD)
    return flat.view(batch, length, heads, -1).transpose(1, 2)


def _take(x_BAT: Tensor, rows_N: Tensor) -> Tensor:
    """Undo `_pad`: turn [B, A, T, ...] into [N, A, ...]."""
    return x_BAT.transpose(1, 2).flatten(0, 1).index_select(0, rows_N)
