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
from draftcore_nn.layers import cast, full_precision
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class Keys:
    """What rows see of their layer: the keys and values of step 0, and those that they made since.

    Those of step 0 are given for every row, [B*T, G, D].
    """

    def __init__(self, key: Tensor, value: Tensor, length: int) -> None:
        # Some kernels take a while for each length that they meet for the first time.
        self.length, self.more = length, -length % 64 if key.is_cuda else 0
        self.first = [
            functional.pad(
                torch.unflatten(x, 0, (-1, length)).transpose(1, 2), (0, 0, 0, self.more)
            )
            for x in (key, value)
        ]
        self.later: list[list[Tensor]] = [[], []]

    def add(self, *key_value: Tensor) -> None:
        """Take a step's keys and values of the rows that attend, [N, G, D] each."""
        for made, x_NGD in zip(self.later, key_value, strict=True):
            made.append(x_NGD)

    def attend(self, query_NAD: Tensor, rows_N: Tensor) -> Tensor:
        """Attend from the rows `rows_N`, flat b*T + t, see `attend`."""
        nothing = (len(rows_N), self.first[0].shape[1], 0, query_NAD.shape[-1])
        extra = [
            torch.stack(made, 2) if made else query_NAD.new_empty(nothing) for made in self.later
        ]
        cells_N = rows_N + self.more * (rows_N // self.length)
        return attend(query_NAD, self.first[0], self.first[1], extra[0], extra[1], cells_N)


def attend(
    query_NAD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, extra_key_NGXD: Tensor,
    extra_value_NGXD: Tensor, rows_N: Tensor,
) -> Tensor:  # fmt: skip
    """Attend from the rows `rows_N` (flat b*T + t) over step-0 keys 0..t and the rows' extra keys.

    Scores are scaled by D^-0.5. Returns [N, A, D] in the query's dtype.
    """
    return _JointAttention.apply(  # type: ignore[no-any-return, no-untyped-call]
        query_NAD, key_BGTD, value_BGTD, extra_key_NGXD, extra_value_NGXD, rows_N
    )


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_NAD: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        extra_key, extra_value, rows_N = rest
        with full_precision(query_NAD.device):
            output, logsumexp, saved = fused.attend(_pad(query_NAD, key, rows_N), key, value)
            output_NAD, logsumexp_NA = _take(output, rows_N), _take(logsumexp, rows_N)
            # The step-0 keys count as one key with their log-sum-exp for a score.
            extra_NGRX = fused.further_scores(_grouped(query_NAD, extra_key), extra_key)
            scores = torch.cat([logsumexp_NA[..., None], extra_NGRX.flatten(1, 2)], -1)
            log_parts = scores.log_softmax(-1)
            joint_NA = logsumexp_NA - log_parts[..., 0]
            part_NGRX = _grouped(log_parts[..., 1:].exp(), extra_key)
            extra_NGRD = fused.few(part_NGRX, extra_value.to(part_NGRX.dtype))
            output_NAD = output_NAD * log_parts[..., :1].exp() + extra_NGRD.flatten(1, 2)
            output_NAD = cast(output_NAD, query_NAD.dtype)
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
            grad_NGRD, query_NGRD, output_NGRD, joint_NGR = (
                _grouped(x, extra_key) for x in (grad_NAD, query_NAD, output_NAD, joint_NA)
            )
            scores_NGRX = fused.further_scores(query_NGRD, extra_key)
            extra_grad, grad_extra_key, grad_extra_value = fused.further_backward(
                grad_NGRD, query_NGRD, extra_key, extra_value, scores_NGRX, output_NGRD, joint_NGR
            )
            grad_query = _take(grad_query, rows_N).to(extra_grad.dtype) + extra_grad.flatten(1, 2)
        return (
            grad_query.to(query_NAD.dtype), grad_key, grad_value,
            grad_extra_key.to(extra_key.dtype), grad_extra_value.to(extra_value.dtype), None,
        )  # fmt: skip


def _grouped(x_NA: Tensor, like_NG: Tensor) -> Tensor:
    """Split query heads into the groups that share a key head: [N, A, ...] to [N, G, A/G, ...]."""
    return torch.unflatten(x_NA, 1, (like_NG.shape[1], -1))


def _pad(x_NAD: Tensor, like_BGTD: Tensor, rows_N: Tensor) -> Tensor:
    """Lay active rows out as [B, A, T, D], zeros elsewhere (they then add nothing to gradients)."""
    batch, _, length, _ = like_BGTD.shape
    flat = x_NAD.new_zeros(batch * length, *x_NAD.shape[1:]).index_copy(0, rows_N, x_NAD)
    return flat.view(batch, length, *x_NAD.shape[1:]).transpose(1, 2)


def _take(x_BAT: Tensor, rows_N: Tensor) -> Tensor:
    """Undo `_pad`: turn [B, A, T, ...] into [N, A, ...]."""
    return x_BAT.transpose(1, 2).flatten(0, 1).index_select(0, rows_N)
