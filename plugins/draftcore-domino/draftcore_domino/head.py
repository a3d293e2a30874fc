"""Base and final cross entropy from one product with the target's head, a slice of rows at a time.

Final logits are the base logits W h plus a correction U z of low rank, so W h serves both. The
weights of all rows are known beforehand, so the forward computes the gradients of the whole
objective along with it: one product with W for the losses, one for the gradient, and the
backward only scales. As in `draftcore_nn.losses`, logits exist for a slice of rows only.

Shape letters: R rows, H hidden, E rank of the correction, V vocabulary; r a slice of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from draftcore_nn import heads
from draftcore_nn.layers import cast, full_precision
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
        function = _fused if heads.suits(hidden_RH) else _sliced
        with full_precision(hidden_RH.device):
            up = up_VE.to(hidden_RH.dtype)
            weights = (1 - base_share) * weight_R, base_share * weight_R
            by_row, slopes = function(hidden_RH, low_RE, head_VH, up, labels_R, *weights, wanted)
            final_R, base_R, final_best_R, base_best_R = by_row
            mixed_R = (1 - base_share) * final_R + base_share * base_R
            objective = (mixed_R * weight_R).sum()
        if wanted:
            slope_RH, slope_RE, up_grad_VE = slopes
            ctx.save_for_backward(slope_RH, slope_RE, cast(up_grad_VE, up_VE.dtype))
        ctx.mark_non_differentiable(final_R, base_R, final_best_R, base_best_R)
        return objective, final_R, base_R, final_best_R, base_best_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [(saved * grad).to(saved.dtype) for saved in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)


def _sliced(
    hidden_RH: Tensor, low_RE: Tensor, head_VH: Tensor, up_VE: Tensor, labels_R: Tensor,
    final_weight_R: Tensor, base_weight_R: Tensor, wanted: bool,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:  # fmt: skip
    """Return what `Losses` has of each row, and the gradients of h, z and U if these are wanted."""
    exact, half = torch.promote_types(hidden_RH.dtype, torch.float32), hidden_RH.dtype
    up_grad_VE, by_row, slopes = torch.zeros_like(up_VE, dtype=exact), [], []
    for hidden_rH, low_rE, label_r, *weights in in_slices(
        len(head_VH), hidden_RH, low_RE, labels_R, final_weight_R, base_weight_R
    ):
        label_r1, final_weight_r1, base_weight_r1 = (x[:, None] for x in (label_r, *weights))
        base_rV = (hidden_rH @ head_VH.T).to(exact)
        final_rV = base_rV + low_rE @ up_VE.T
        best = (final_rV.argmax(-1), base_rV.argmax(-1))
        base_rV, final_rV = base_rV.log_softmax(-1), final_rV.log_softmax(-1)
        losses = (-rV.gather(1, label_r1)[:, 0] for rV in (final_rV, base_rV))
        by_row.append((*losses, *best))
        if not wanted:
            continue
        base_rV = residual(base_rV, label_r1).mul_(base_weight_r1)
        final_rV = residual(final_rV, label_r1).mul_(final_weight_r1)
        slope_rH = base_rV.add_(final_rV).to(half) @ head_VH
        final_rV = final_rV.to(half)
        slopes.append((slope_rH, final_rV @ up_VE))
        up_grad_VE = up_grad_VE + final_rV.T @ low_rE
    gathered = [torch.cat(part) for part in zip(*slopes, strict=True)]
    return [torch.cat(part) for part in zip(*by_row, strict=True)], [*gathered, up_grad_VE]


def _fused(*given: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the same by Triton's kernel."""
    loss_2R, best_2R, *slopes = fused(*given)
    return [*loss_2R, *best_2R], slopes


@torch.library.custom_op("draftcore::corrected_cross_entropy", mutates_args=())
def fused(
    hidden_RH: Tensor, low_RE: Tensor, head_VH: Tensor, up_VE: Tensor, labels_R: Tensor,
    final_weight_R: Tensor, base_weight_R: Tensor, wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return final and base losses [2, R], best tokens alike, and the gradients of h, z and U."""
    from draftcore_domino import kernels

    loss_2R, best_2R, slope_RH, slope_RE, up_grad_VE = _fused_like(
        hidden_RH, low_RE, head_VH, up_VE, labels_R, final_weight_R, base_weight_R, wanted
    )
    up_grad_VE.zero_()
    for part, (base_rV, final_rV) in heads.sliced_logits((hidden_RH, head_VH), (low_RE, up_VE)):
        kernels.corrected(
            base_rV, final_rV, labels_R[part], final_weight_R[part], base_weight_R[part],
            loss_2R[:, part], best_2R[:, part], wanted,
        )  # fmt: skip
        if wanted:
            torch.mm(base_rV, head_VH, out=slope_RH[part])
            torch.mm(final_rV, up_VE, out=slope_RE[part])
            heads.add_product(up_grad_VE, final_rV.T, low_RE[part])
    return loss_2R, best_2R, slope_RH, slope_RE, up_grad_VE


@fused.register_fake
def _fused_like(
    hidden_RH: Tensor, low_RE: Tensor, head_VH: Tensor, up_VE: Tensor, labels_R: Tensor,
    final_weight_R: Tensor, base_weight_R: Tensor, wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = hidden_RH.shape[0]
    loss_2R = hidden_RH.new_empty(2, rows, dtype=torch.float32)
    slopes = hidden_RH.new_empty(hidden_RH.shape), low_RE.new_empty(low_RE.shape)
    up_grad_VE = up_VE.new_empty(up_VE.shape, dtype=torch.float32)
    return loss_2R, loss_2R.new_empty(2, rows, dtype=torch.long), *slopes, up_grad_VE
