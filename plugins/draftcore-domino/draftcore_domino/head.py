"""Base and final cross entropy from one product with the target's head, a slice of rows at a time.

Final logits are the base logits W h plus a correction U z of low rank, so W h serves both. The
weights of all rows are known beforehand, so the forward computes the gradients of the whole
objective along with it: one product with W for the losses, one for the gradient, and the
backward only scales. As in `draftcore_nn.losses`, logits exist for a slice of rows only.

Shape letters: R rows, H hidden, E rank of the correction, V vocabulary; r a slice of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from draftcore_nn.layers import full_precision
from draftcore_nn.losses import in_slices, residual
from torch import Tensor
from torch.autograd.function import once_differentiable


class Losses(NamedTuple):
    """`objective` carries the gradient; the rest is per row: cross entropies, most probable tokens."""

    objective: Tensor
    final_R: Tensor
    base_R: Tensor
    final_best_R: Tensor
    base_best_R: Tensor


def corrected_cross_entropy(
    hidden_RH: Tensor, low_RE: Tensor, head_VH: Tensor, up_VE: Tensor, labels_R: Tensor,
    weight_R: Tensor, base_share: Tensor,
) -> Losses:  # fmt: skip
    """Return sum of weight * ((1 - share) CE(W h + U z) + share CE(W h)), and what it is made of.

    Differentiable in `hidden_RH` (h), `low_RE` (z) and `up_VE` (U); arithmetic in fp32 or fp64.
    """
    inputs = (hidden_RH, low_RE, up_VE)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return Losses(
        *_Corrected.apply(*inputs, head_VH, labels_R, weight_R, base_share, wanted)  # type: ignore[no-untyped-call]
    )


class _Corrected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, low_RE: Tensor, up_VE: Tensor, head_VH: Tensor,
        labels_R: Tensor, weight_R: Tensor, base_share: Tensor, wanted: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        exact, half = torch.promote_types(hidden_RH.dtype, torch.float32), hidden_RH.dtype
        up, up_grad_VE, by_row, slopes = up_VE.to(half), torch.zeros_like(up_VE), [], []
        with full_precision(hidden_RH.device):
            for hidden_rH, low_rE, label_r, weight_r in in_slices(
                len(head_VH), hidden_RH, low_RE, labels_R, weight_R
            ):
                label_r1, weight_r1 = label_r[:, None], weight_r[:, None]
                base_rV = (hidden_rH @ head_VH.T).to(exact)
                final_rV = base_rV + low_rE @ up.T
                best = (final_rV.argmax(-1), base_rV.argmax(-1))
                base_rV, final_rV = base_rV.log_softmax(-1), final_rV.log_softmax(-1)
                losses = (-rV.gather(1, label_r1)[:, 0] for rV in (final_rV, base_rV))
                by_row.append((*losses, *best))
                if not wanted:
                    continue
                base_rV = residual(base_rV, label_r1).mul_(base_share * weight_r1)
                final_rV = residual(final_rV, label_r1).mul_((1 - base_share) * weight_r1)
                slope_rH = base_rV.add_(final_rV).to(half) @ head_VH
                final_rV = final_rV.to(half)
                slopes.append((slope_rH, final_rV @ up))
                up_grad_VE = up_grad_VE + final_rV.T @ low_rE
            final_R, base_R, final_best_R, base_best_R = map(torch.cat, zip(*by_row, strict=True))
            mixed_R = (1 - base_share) * final_R + base_share * base_R
            objective = (mixed_R * weight_R).sum()
        if wanted:
            ctx.save_for_backward(*map(torch.cat, zip(*slopes, strict=True)), up_grad_VE)
        ctx.mark_non_differentiable(final_R, base_R, final_best_R, base_best_R)
        return objective, final_R, base_R, final_best_R, base_best_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [(saved * grad).to(saved.dtype) for saved in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)
