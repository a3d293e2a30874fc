"""Cross entropy with the target's distribution, from one product with the draft's head.

What a pair's loss weighs is known beforehand, so the forward computes the gradients with the loss, a
slice of pairs at a time, and the backward only scales them, as in `draftcore_nn.losses`. A teacher is asked
once for each row, and read by every depth that drafts it.

Shape letters: R pairs with loss, H hidden, U draft vocabulary; r a slice of pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from draftcore_nn.layers import full_precision
from draftcore_nn.losses import Teacher, in_slices
from torch import Tensor
from torch.autograd.function import once_differentiable


class Losses(NamedTuple):
    """`total`, which carries the gradient; of each pair its loss, overlap and most probable token."""

    total: Tensor
    loss_R: Tensor
    overlap_R: Tensor
    best_R: Tensor


def distill(
    hidden_RH: Tensor, head_UH: Tensor, teacher: Teacher, taught_R: Tensor, weight_R: Tensor
) -> Losses:
    """Return the weighted sum of -sum p log q, p of the teacher's row `taught_R`, and its parts.

    The overlap is sum min(p, q), p a share of the target's whole vocabulary: what verification accepts.
    Differentiable in `hidden_RH`, and in `head_UH` where that is trained. Arithmetic is in fp32 (fp64 for
    fp64).
    """
    wanted = torch.is_grad_enabled() and (hidden_RH.requires_grad or head_UH.requires_grad)
    given = (teacher.logits_RU, teacher.own_R, teacher.all_R, taught_R, weight_R)
    return Losses(*_Distill.apply(hidden_RH, head_UH, *given, wanted))  # type: ignore[no-untyped-call]


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, head_UH: Tensor, teacher_MU: Tensor, own_M: Tensor,
        all_M: Tensor, taught_R: Tensor, weight_R: Tensor, wanted: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        exact, half, by_row, slopes = own_M.dtype, hidden_RH.dtype, [], []
        head = head_UH.to(half)
        trained = wanted and head_UH.requires_grad
        head_slope_UH = torch.zeros_like(head_UH) if trained else None
        with full_precision(hidden_RH.device):
            for hidden_rH, taught_r, weight_r in in_slices(
                len(head_UH), hidden_RH, taught_R, weight_R
            ):
                logits_rU = hidden_rH @ head.T
                logs_rU = logits_rU.log_softmax(-1, dtype=exact)
                given_rU = teacher_MU.index_select(0, taught_r).to(exact)
                probs_rU = (given_rU - own_M[taught_r, None]).exp()
                share_rU = (given_rU - all_M[taught_r, None]).exp()
                found_rU = logs_rU.exp()
                overlap_r = torch.minimum(share_rU, found_rU).sum(-1)
                by_row.append((-(probs_rU * logs_rU).sum(-1), overlap_r, logits_rU.argmax(-1)))
                if not wanted:
                    continue
                slope_rU = ((found_rU - probs_rU) * weight_r[:, None]).to(half)
                slopes.append(slope_rU @ head)
                if head_slope_UH is not None:
                    head_slope_UH = head_slope_UH + (slope_rU.T @ hidden_rH).to(head_UH.dtype)
            loss_R, overlap_R, best_R = map(torch.cat, zip(*by_row, strict=True))
            total = (loss_R * weight_R).sum()
        if wanted:
            ctx.save_for_backward(torch.cat(slopes), head_slope_UH)
        ctx.mark_non_differentiable(loss_R, overlap_R, best_R)
        return total, loss_R, overlap_R, best_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        slopes = [None if x is None else (x * grad).to(x.dtype) for x in ctx.saved_tensors]
        return (*slopes, *[None] * 6)
