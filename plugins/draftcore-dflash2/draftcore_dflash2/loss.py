"""The loss of a row's own logits and that of the selector, from one product with the target's head.

Both share the logits u = W h. The weights of all rows are known beforehand, so the forward computes the
gradients of the whole objective along with it, and the backward only scales. Logits, a teacher's too, and
rows of the selector's table exist for a slice of rows only (`draftcore_nn.losses`); the table's gradient is
added up once, from one row of E for each candidate.

Shape letters: R rows, H hidden, E rank, V vocabulary, K candidates; r a slice of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from draftcore_nn.layers import full_precision
from draftcore_nn.losses import capped, in_slices, residual
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from draftcore.contracts.algorithm import StepContext
from draftcore.errors import UsageError
from draftcore_dflash2.selector import score

if TYPE_CHECKING:
    from draftcore_dflash2.options import DFlash2Options


def selector_weight(options: DFlash2Options, context: StepContext) -> float:
    """Return alpha at a step: 0 for a share of the run, then up to its weight over as much again.

    Raises UsageError where it rises and the number of steps is not known.
    """
    if options.selector_warmup == 0:
        return options.selector_loss_alpha
    if context.total_steps < 1:
        raise UsageError(
            "dflash2 begins its selector's loss by how far the run is, and its number of steps is "
            "unknown\n  set train.max_steps, or the option selector_warmup to 0"
        )
    done = (context.step - 1) / context.total_steps
    return options.selector_loss_alpha * min(1.0, max(0.0, done / options.selector_warmup - 1))


class Losses(NamedTuple):
    """`objective` carries the gradient; the rest is by row.

    unary_R: the loss of u; selector_R: that of the selector, 0 where it does not count; label_R: the
    token to be learned; best_R: the most probable one by u; chosen_R: the selector's choice; among_R: is
    the label one of the K best by u.
    """

    objective: Tensor
    unary_R: Tensor
    selector_R: Tensor
    label_R: Tensor
    best_R: Tensor
    chosen_R: Tensor
    among_R: Tensor


def selected_cross_entropy(
    hidden_RH: Tensor, query_RE: Tensor, successor_VE: Tensor, head_VH: Tensor, labels: Tensor,
    weight_R: Tensor, alpha: Tensor, target_logits: tuple[float, float | None],
    options: DFlash2Options, top_k: int,
) -> Losses:  # fmt: skip
    """Return sum of weight * (unary + alpha * selector), and what it is made of.

    Labels are tokens [R], or the target's last hidden states [R, H] where the target teaches: then the
    unary loss is KL(p | softmax u), p by the target's logits with their scale and soft cap. Differentiable
    in `hidden_RH`, `query_RE` and `successor_VE`; arithmetic in fp32 or fp64.
    """
    inputs = (hidden_RH, query_RE, successor_VE)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    replaced, detached = options.missing == "replace", options.stop_gradient
    fixed = (*target_logits, top_k, replaced, detached, wanted)
    return Losses(
        *_Selected.apply(*inputs, head_VH, labels, weight_R, alpha, *fixed)  # type: ignore[no-untyped-call]
    )


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, query_RE: Tensor, successor_VE: Tensor, head_VH: Tensor,
        labels: Tensor, weight_R: Tensor, alpha: Tensor, scale: float, softcap: float | None,
        top_k: int, replaced: bool, detached: bool, wanted: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        exact, half = torch.promote_types(hidden_RH.dtype, torch.float32), hidden_RH.dtype
        by_row, slopes = [], []
        logits = 2 if labels.ndim > 1 else 1  # the teacher's beside the draft's
        width = max(logits * len(head_VH), top_k * query_RE.shape[1])
        with full_precision(hidden_RH.device):
            for hidden_rH, query_rE, label, weight_r in in_slices(
                width, hidden_RH, query_RE.to(exact), labels, weight_R
            ):
                logits_rV = hidden_rH @ head_VH.T
                if label.ndim > 1:
                    teacher_rV = capped((label @ head_VH.T).to(exact), scale, softcap)
                    teacher_rV = teacher_rV.log_softmax(-1)
                    label_r, unary_r, slope_rV = divergence(logits_rV.to(exact), teacher_rV)
                else:
                    label_r, (unary_r, slope_rV) = label, surprise(logits_rV.to(exact), label)
                best_rK = logits_rV.topk(top_k).indices
                ids_rK = with_label(best_rK, label_r) if replaced else best_rK
                next_rKE = functional.embedding(ids_rK, successor_VE).to(exact)
                score_rK = score(logits_rV.gather(1, ids_rK), query_rE, next_rKE)
                by_row.append((unary_r, label_r, best_rK, ids_rK, score_rK))
                if not wanted:
                    continue
                place_rK = ids_rK == label_r[:, None]
                counted_r = alpha * weight_r * place_rK.any(-1)
                pull_rK = (score_rK.log_softmax(-1).exp() - place_rK.to(exact)) * counted_r[:, None]
                slope_rV = slope_rV.mul_(weight_r[:, None])
                if not detached:
                    slope_rV = slope_rV.scatter_add_(1, ids_rK, pull_rK)
                pulled_rE = (pull_rK[:, None] @ next_rKE)[:, 0]
                slopes.append((slope_rV.to(half) @ head_VH, pulled_rE, pull_rK))
            # What reads no logits is computed once: a compiler unrolls the slices.
            unary_R, label_R, best_RK, ids_RK, score_RK = map(torch.cat, zip(*by_row, strict=True))
            place_RK, log_RK = ids_RK == label_R[:, None], score_RK.log_softmax(-1)
            selector_R = -torch.where(place_RK, log_RK, 0).sum(-1)
            objective = ((unary_R + alpha * selector_R) * weight_R).sum()
            chosen_R = ids_RK.gather(1, score_RK.argmax(-1, keepdim=True))[:, 0]
            among_R = (best_RK == label_R[:, None]).any(-1)
            chosen = label_R, best_RK[:, 0].clone(), chosen_R, among_R
            if wanted:
                hidden_grad, query_grad, pull_RK = map(torch.cat, zip(*slopes, strict=True))
                pairs_RE = (pull_RK[..., None] * query_RE.to(exact)[:, None]).flatten(0, 1)
                pairs_RE = pairs_RE.to(successor_VE.dtype)
                successor_grad = torch.zeros_like(successor_VE)
                successor_grad = successor_grad.index_add_(0, ids_RK.flatten(), pairs_RE)
                ctx.save_for_backward(hidden_grad, query_grad, successor_grad)
        ctx.mark_non_differentiable(unary_R, selector_R, *chosen)
        return objective, unary_R, selector_R, *chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [(saved * grad).to(saved.dtype) for saved in ctx.saved_tensors]
        return (*scaled, *(None,) * 10)


def divergence(logits_rV: Tensor, teacher_rV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the teacher's most probable token, KL(teacher | draft), and its slope in the logits."""
    log_probs_rV, shares_rV = logits_rV.log_softmax(-1), teacher_rV.exp()
    loss_r = (shares_rV * (teacher_rV - log_probs_rV)).sum(-1)
    return teacher_rV.argmax(-1), loss_r, log_probs_rV.exp() - shares_rV


def surprise(logits_rV: Tensor, label_r: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy with a token, and its slope in the logits."""
    log_probs_rV = logits_rV.log_softmax(-1)
    loss_r = -log_probs_rV.gather(1, label_r[:, None])[:, 0]
    return loss_r, residual(log_probs_rV, label_r[:, None])


def with_label(ids_rK: Tensor, label_r: Tensor) -> Tensor:
    """Put the label in the last candidate's place where it is not among them."""
    among_r = (ids_rK == label_r[:, None]).any(-1)
    last_r = torch.where(among_r, ids_rK[:, -1], label_r)
    return torch.cat([ids_rK[:, :-1], last_r[:, None]], 1)
