"""Fused attention that also returns the log-sum-exp of its scores, and its backward.

With it, attention over these keys can be joined with any further ones under one softmax: weigh each
part's output by exp(own log-sum-exp - joint log-sum-exp) and add. Given the *joint* output and
log-sum-exp, the backward yields exact gradients of this part, since dS = P * (dO.V - rowsum(dO * O))
holds with P and O of the joint softmax for any part of the keys (arXiv 2205.14135).

The kernels are those of scaled_dot_product_attention, called by name because the public function
gives no log-sum-exp. They scale scores by D^-0.5 and accumulate the softmax in fp32 (fp64 for fp64).

Further keys are few, so their scores may exist: `further_scores` and `further_backward` are for them.

Shape letters: B batch, A query heads, G key/value heads, Q queries, T keys, D head width; of further
keys N groups of queries, R queries that share a head of keys, X keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


def attend(
    query_BAQD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, bias_B1QT: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the output [B, A, Q, D], the log-sum-exp [B, A, Q], and what the backward needs.

    `bias_B1QT` is added to the scores; without it attention is causal, over as many queries as keys.
    CUDA wants the rows of a bias to start at multiples of 16 elements.
    """
    causal = bias_B1QT is None
    if _hopper(query_BAQD, bias_B1QT):
        output, logsumexp, _, _, _, _, *philox, _ = aten._scaled_dot_product_cudnn_attention(
            query_BAQD, key_BGTD, value_BGTD, None, True, 0.0, True
        )
        return output, logsumexp.squeeze(-1), tuple(philox)
    tensors = (query_BAQD, *(_over_queries(x, query_BAQD) for x in (key_BGTD, value_BGTD)))
    if query_BAQD.device.type == "cpu":
        output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            *tensors, 0.0, causal, attn_mask=bias_B1QT
        )
        return output, logsumexp, ()
    if _half(query_BAQD, bias_B1QT):
        output, logsumexp, _, _, _, _, *philox, _ = aten._scaled_dot_product_flash_attention(
            *tensors, 0.0, True
        )
        return output, logsumexp, tuple(philox)
    output, logsumexp, *philox = aten._scaled_dot_product_efficient_attention(
        *tensors, _over_heads(bias_B1QT, query_BAQD), True, 0.0, causal
    )
    return output, logsumexp[..., : query_BAQD.shape[2]], tuple(philox)


def attend_backward(
    grad_BAQD: Tensor, query_BAQD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor,
    bias_B1QT: Tensor | None, output_BAQD: Tensor, logsumexp_BAQ: Tensor, saved: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values, given the joint output and log-sum-exp."""
    rows, causal = query_BAQD.shape[2], bias_B1QT is None
    if _hopper(query_BAQD, bias_B1QT):
        return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
            grad_BAQD, query_BAQD, key_BGTD, value_BGTD, output_BAQD,
            logsumexp_BAQ.unsqueeze(-1).contiguous(), *saved, None, None, None, rows, rows, 0.0, True,
        )  # fmt: skip
    expanded = (_over_queries(key_BGTD, query_BAQD), _over_queries(value_BGTD, query_BAQD))
    tensors = (grad_BAQD, query_BAQD, *expanded)
    if query_BAQD.device.type == "cpu":
        # This kernel reads log-sum-exp by the strides its forward gave it: [B, Q, A] in memory.
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, output_BAQD, logsumexp_BAQ, 0.0, causal, attn_mask=bias_B1QT
        )
    elif _half(query_BAQD, bias_B1QT):
        grads = aten._scaled_dot_product_flash_attention_backward(
            *tensors, output_BAQD, logsumexp_BAQ.contiguous(), None, None, rows, rows, 0.0, True,
            *saved,
        )  # fmt: skip
    else:
        # This kernel wants rows of log-sum-exp padded to 32.
        padded = functional.pad(logsumexp_BAQ, (0, -rows % 32)).contiguous()
        grads = aten._scaled_dot_product_efficient_attention_backward(
            *tensors, _over_heads(bias_B1QT, query_BAQD), output_BAQD, padded, *saved, 0.0,
            [True, True, True, False], causal,
        )  # fmt: skip
    query, *keys_values = grads[:3]
    key, value = (torch.unflatten(x, 1, (key_BGTD.shape[1], -1)).sum(2) for x in keys_values)
    return query, key, value


def further_scores(query_NGRD: Tensor, key_NGXD: Tensor) -> Tensor:
    """Return the scores of further keys, [N, G, R, X] in fp32 (fp64 for fp64), scaled as above."""
    exact = torch.promote_types(query_NGRD.dtype, torch.float32)
    return few(query_NGRD.to(exact) * query_NGRD.shape[-1] ** -0.5, key_NGXD.to(exact).mT)


def few(x_NGRI: Tensor, y_NGIX: Tensor) -> Tensor:
    """Multiply many small matrices, [N, G, R, X]; a compiler fuses this, and would call a library."""
    if not torch.compiler.is_compiling():
        return x_NGRI @ y_NGIX
    return (x_NGRI[..., None] * y_NGIX[:, :, None]).sum(-2)


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
    slope_NGRX = part_NGRX * (few(grad_NGRD, value_NGXD.to(exact).mT) - delta_NGR1) * scale
    query_grad = few(slope_NGRX, key_NGXD.to(exact))
    return query_grad, few(slope_NGRX.mT, query_NGRD.to(exact)), few(part_NGRX.mT, grad_NGRD)


def _hopper(query_BAQD: Tensor, bias_B1QT: Tensor | None) -> bool:
    """cuDNN's kernel is the quickest where there are instructions for it, and takes grouped heads."""
    suits = query_BAQD.shape[-1] % 8 == 0 and query_BAQD.shape[-1] <= 128
    return _half(query_BAQD, bias_B1QT) and query_BAQD.is_cuda and suits and _has_hopper()


def _has_hopper() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


# As torch.compiler.assume_constant_result does, which imports torch's compiler for it: seconds.
_has_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _half(query_BAQD: Tensor, bias_B1QT: Tensor | None) -> bool:
    """CUDA's quick kernels take half precision, and no bias."""
    return bias_B1QT is None and query_BAQD.dtype in (torch.float16, torch.bfloat16)


def _over_queries(x_BGTD: Tensor, query_BAQD: Tensor) -> Tensor:
    """Repeat heads of keys or values for the query heads that share them."""
    share = query_BAQD.shape[1] // x_BGTD.shape[1]
    return x_BGTD if share == 1 else x_BGTD.repeat_interleave(share, 1)


def _over_heads(bias_B1QT: Tensor | None, query_BAQD: Tensor) -> Tensor | None:
    return None if bias_B1QT is None else bias_B1QT.expand(-1, query_BAQD.shape[1], -1, -1)
