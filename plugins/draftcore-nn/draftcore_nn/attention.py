"""Fused attention that also returns the log-sum-exp of its scores, and its backward.

With it, attention over these keys can be joined with any further ones under one softmax: weigh each
part's output by exp(own log-sum-exp - joint log-sum-exp) and add. Given the *joint* output and
log-sum-exp, the backward yields exact gradients of this part, since dS = P * (dO.V - rowsum(dO * O))
holds with P and O of the joint softmax for any part of the keys (arXiv 2205.14135).

The kernels are those of scaled_dot_product_attention, called by name because the public function
gives no log-sum-exp. They scale scores by D^-0.5 and accumulate the softmax in fp32 (fp64 for fp64).

Further keys are few, so their scores may exist: `further_scores` and `further_backward` are for them.

Shape letters: B batch, A heads, Q queries, T keys, D head width; of further keys N groups of queries, G
heads of keys, R queries that share a head of keys, X keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


def attend(
    query_BAQD: Tensor, key_BATD: Tensor, value_BATD: Tensor, bias_B1QT: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the output [B, A, Q, D], the log-sum-exp [B, A, Q], and what the backward needs.

    `bias_B1QT` is added to the scores; without it attention is causal, over as many queries as keys.
    CUDA wants the rows of a bias to start at multiples of 16 elements.
    """
    tensors, causal = (query_BAQD, key_BATD, value_BATD), bias_B1QT is None
    if query_BAQD.device.type == "cpu":
        output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            *tensors, 0.0, causal, attn_mask=bias_B1QT
        )
        return output, logsumexp, ()
    if _flash(query_BAQD, bias_B1QT):
        output, logsumexp, _, _, _, _, *philox, _ = aten._scaled_dot_product_flash_attention(
            *tensors, 0.0, True
        )
        return output, logsumexp, tuple(philox)
    output, logsumexp, *philox = aten._scaled_dot_product_efficient_attention(
        *tensors, _over_heads(bias_B1QT, query_BAQD), True, 0.0, causal
    )
    return output, logsumexp[..., : query_BAQD.shape[2]], tuple(philox)


def attend_backward(
    grad_BAQD: Tensor, query_BAQD: Tensor, key_BATD: Tensor, value_BATD: Tensor,
    bias_B1QT: Tensor | None, output_BAQD: Tensor, logsumexp_BAQ: Tensor, saved: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values, given the joint output and log-sum-exp."""
    tensors, causal = (grad_BAQD, query_BAQD, key_BATD, value_BATD), bias_B1QT is None
    rows = query_BAQD.shape[2]
    if query_BAQD.device.type == "cpu":
        # This kernel reads log-sum-exp by the strides its forward gave it: [B, Q, A] in memory.
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            *tensors, output_BAQD, logsumexp_BAQ, 0.0, causal, attn_mask=bias_B1QT
        )
    if _flash(query_BAQD, bias_B1QT):
        return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            *tensors, output_BAQD, logsumexp_BAQ.contiguous(), None, None, rows, rows, 0.0, True,
            *saved,
        )  # fmt: skip
    # This kernel wants rows of log-sum-exp padded to 32.
    padded = functional.pad(logsumexp_BAQ, (0, -rows % 32)).contiguous()
    return aten._scaled_dot_product_efficient_attention_backward(  # type: ignore[no-any-return]
        *tensors, _over_heads(bias_B1QT, query_BAQD), output_BAQD, padded, *saved, 0.0,
        [True, True, True, False], causal,
    )[:3]  # fmt: skip


def further_scores(query_NGRD: Tensor, key_NGXD: Tensor) -> Tensor:
    """Return the scores of further keys, [N, G, R, X] in fp32 (fp64 for fp64), scaled as above."""
    exact = torch.promote_types(query_NGRD.dtype, torch.float32)
    scores: Tensor = (query_NGRD.to(exact) * query_NGRD.shape[-1] ** -0.5) @ key_NGXD.to(exact).mT
    return scores


def further_backward(
    grad_NGRD: Tensor, query_NGRD: Tensor, key_NGXD: Tensor, value_NGXD: Tensor,
    scores_NGRX: Tensor, output_NGRD: Tensor, logsumexp_NGR: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, further keys and values, given the joint output and log-sum-exp.

    They have the dtype of the scores.
    """
    exact, scale = scores_NGRX.dtype, query_NGRD.shape[-1] ** -0.5
    grad_NGRD = grad_NGRD.to(exact)
    delta_NGR1 = (grad_NGRD * output_NGRD.to(exact)).sum(-1, keepdim=True)
    part_NGRX = (scores_NGRX - logsumexp_NGR[..., None]).exp()
    slope_NGRX = part_NGRX * (grad_NGRD @ value_NGXD.to(exact).mT - delta_NGR1) * scale
    query_grad, key_grad = slope_NGRX @ key_NGXD.to(exact), slope_NGRX.mT @ query_NGRD.to(exact)
    return query_grad, key_grad, part_NGRX.mT @ grad_NGRD


def _flash(query_BAQD: Tensor, bias_B1QT: Tensor | None) -> bool:
    """CUDA's quickest kernel takes half precision, and no bias."""
    return bias_B1QT is None and query_BAQD.dtype in (torch.float16, torch.bfloat16)


def _over_heads(bias_B1QT: Tensor | None, query_BAQD: Tensor) -> Tensor | None:
    return None if bias_B1QT is None else bias_B1QT.expand(-1, query_BAQD.shape[1], -1, -1)
