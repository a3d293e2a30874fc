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
from draftcore_nn import heads
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
        exact = torch.promote_types(hidden_RH.dtype, torch.float32)
        given = (hidden_RH, query_RE.to(exact), successor_VE, head_VH, labels, weight_R, alpha)
        fixed = (top_k, replaced, detached, wanted)
        plain = labels.ndim == 1 or (scale == 1 and not softcap)
        with full_precision(hidden_RH.device):
            if heads.suits(hidden_RH) and plain:
                found = fused(*given, *fixed)
            else:
                found = _sliced(*given, scale, softcap, *fixed)
            unary_R, label_R, best_RK, ids_RK, score_RK, *slopes = found
            # What reads no logits is computed once: a compiler unrolls the slices.
            place_RK, log_RK = ids_RK == label_R[:, None], score_RK.log_softmax(-1)
            selector_R = -torch.where(place_RK, log_RK, 0).sum(-1)
            objective = ((unary_R + alpha * selector_R) * weight_R).sum()
            chosen_R = ids_RK.gather(1, score_RK.argmax(-1, keepdim=True))[:, 0]
            among_R = (best_RK == label_R[:, None]).any(-1)
            chosen = label_R, best_RK[:, 0].clone(), chosen_R, among_R
            if wanted:
                hidden_grad, query_grad, pull_RK = slopes
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


def _sliced(
    hidden_RH: Tensor, query_RE: Tensor, successor_VE: Tensor, head_VH: Tensor, labels: Tensor,
    weight_R: Tensor, alpha: Tensor, scale: float, softcap: float | None,
    top_k: int, replaced: bool, detached: bool, wanted: bool,
) -> list[Tensor]:  # fmt: skip
    """Return what `fused` does, by torch's own operations on a slice of rows at a time."""
    exact, half, by_row = query_RE.dtype, hidden_RH.dtype, []
    logits = 2 if labels.ndim > 1 else 1  # the teacher's beside the draft's
    width = max(logits * len(head_VH), top_k * query_RE.shape[1])
    rows = (hidden_RH, query_RE, labels, weight_R)
    for hidden_rH, query_rE, label, weight_r in in_slices(width, *rows):
        logits_rV = hidden_rH @ head_VH.T
        if label.ndim > 1:
            teacher_rV = capped((label @ head_VH.T).to(exact), scale, softcap).log_softmax(-1)
            label_r, unary_r, slope_rV = divergence(logits_rV.to(exact), teacher_rV)
        else:
            label_r, (unary_r, slope_rV) = label, surprise(logits_rV.to(exact), label)
        best_rK = logits_rV.topk(top_k).indices
        selected = select(
            logits_rV, best_rK, label_r, query_rE, successor_VE, alpha * weight_r, replaced, wanted
        )
        by_row.append([unary_r, label_r, best_rK, *selected[:2]])
        if not wanted:
            continue
        ids_rK, _, pulled_rE, pull_rK = selected
        slope_rV = slope_rV.mul_(weight_r[:, None])
        if not detached:
            slope_rV = slope_rV.scatter_add_(1, ids_rK, pull_rK)
        by_row[-1] += [slope_rV.to(half) @ head_VH, pulled_rE, pull_rK]
    return [torch.cat(part) for part in zip(*by_row, strict=True)]


def select(
    logits_rV: Tensor, best_rK: Tensor, label_r: Tensor, query_rE: Tensor, successor_VE: Tensor,
    weight_r: Tensor, replaced: bool, wanted: bool,
) -> list[Tensor]:  # fmt: skip
    """Return candidates and scores, and the selector's gradients of the query and of scores if wanted."""
    ids_rK = with_label(best_rK, label_r) if replaced else best_rK
    next_rKE = functional.embedding(ids_rK, successor_VE).to(query_rE.dtype)
    score_rK = score(logits_rV.gather(1, ids_rK), query_rE, next_rKE)
    if not wanted:
        return [ids_rK, score_rK]
    place_rK = ids_rK == label_r[:, None]
    counted_r = weight_r * place_rK.any(-1)
    pull_rK = (score_rK.log_softmax(-1).exp() - place_rK.to(score_rK.dtype)) * counted_r[:, None]
    return [ids_rK, score_rK, (pull_rK[:, None] @ next_rKE)[:, 0], pull_rK]


@torch.library.custom_op("draftcore::selected_cross_entropy", mutates_args=())
def fused(
    hidden_RH: Tensor, query_RE: Tensor, successor_VE: Tensor, head_VH: Tensor, labels: Tensor,
    weight_R: Tensor, alpha: Tensor, top_k: int, replaced: bool, detached: bool, wanted: bool,
) -> list[Tensor]:  # fmt: skip
    """Return by row unary losses, labels, best tokens, candidates, their scores, and gradients if wanted.

    These are of hidden states, of queries, and of scores; by kernels (`draftcore_nn.kernels`).
    """
    from draftcore_nn import kernels

    found: list[Tensor] = _fused_like(
        hidden_RH, query_RE, successor_VE, head_VH, labels, weight_R, alpha,
        top_k, replaced, detached, wanted,
    )  # fmt: skip
    factors = [(hidden_RH, head_VH), *([(labels, head_VH)] if labels.ndim > 1 else [])]
    scale_2R, unused_R = query_RE.new_empty(2, len(hidden_RH)), torch.empty_like(found[1])
    for part, (logits_rV, *teacher) in heads.sliced_logits(*factors):
        unary_r, label_r, best_rK, ids_rK, score_rK, *slopes = (x_R[part] for x_R in found)
        scale_2r = scale_2R[:, part]
        peak_rN = logits_rV.new_empty(len(logits_rV), -(-len(head_VH) // kernels.CHUNK))
        kernels.statistics(logits_rV, scale_2r[0], unused_R[part], peak_rN)
        if teacher:
            kernels.statistics(teacher[0], scale_2r[1], label_r)
        else:
            label_r.copy_(labels[part])
        best_rK.copy_(heads.most_probable(logits_rV, peak_rN, top_k))
        selected = select(
            logits_rV, best_rK, label_r, query_RE[part], successor_VE, alpha * weight_R[part],
            replaced, wanted,
        )  # fmt: skip
        for x_r, to_r in zip(selected, [ids_rK, score_rK, *slopes[1:]], strict=True):
            to_r.copy_(x_r)
        kernels.residual(
            logits_rV, teacher[0] if teacher else None, label_r, scale_2r, weight_R[part],
            unary_r, ids_rK, None if detached or not wanted else slopes[2], wanted,
        )  # fmt: skip
        if wanted:
            torch.mm(logits_rV, head_VH, out=slopes[0])
    return found


@fused.register_fake
def _fused_like(
    hidden_RH: Tensor, query_RE: Tensor, successor_VE: Tensor, head_VH: Tensor, labels: Tensor,
    weight_R: Tensor, alpha: Tensor, top_k: int, replaced: bool, detached: bool, wanted: bool,
) -> list[Tensor]:  # fmt: skip
    rows = hidden_RH.shape[0]
    label_R = labels.new_empty(rows, dtype=torch.long)
    best_RK, score_RK = label_R.new_empty(rows, top_k), query_RE.new_empty(rows, top_k)
    found = [query_RE.new_empty(rows), label_R, best_RK, torch.empty_like(best_RK), score_RK]
    more = [x.new_empty(x.shape) for x in (hidden_RH, query_RE, score_RK)]
    return [*found, *more] if wanted else found


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
