"""Losses of a token or a distribution, over a large vocabulary, a slice of rows at a time.

Logits of a training step (rows x vocabulary) would not fit in memory. Where the head is frozen they
are not needed twice: d CE / d hidden = (softmax - onehot) W of a row does not depend on the row's
weight, so the forward computes it along with the loss, and the backward only scales it. That is one
product with W forward and one for the gradient, nothing recomputed. For a head that is trained the
backward makes the logits of each slice again.

Where `heads` has an operator for a loss, it is taken: on CUDA in half precision. Else a compiler has to
know how many slices there are: then rows are cut into `PARTS`, and `padded` says what fills them up.

Shape letters: R rows, H hidden, E rank of a correction, V vocabulary, U the draft's own; r a slice of
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from draftcore_nn import heads
from draftcore_nn.heads import LEAST_OVERLAP, LK_DECAY
from draftcore_nn.layers import cast, full_precision

# Logits exist for this many elements at a time: 256 MiB in fp32.
LOGIT_ELEMENTS = 1 << 26
PARTS = 16
LOSSES = ("ce", "kl", "tv", "lk_alpha", "lk_lambda")  # of `distribution_losses`


def padded(rows: int) -> int:
    """Return how many rows a loss that may be compiled has to have: at least so many, cut evenly."""
    return max(1, -(-rows // PARTS)) * PARTS


def in_slices(vocab_size: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of rows alike, so that a slice's logits stay within `LOGIT_ELEMENTS`."""
    if torch.compiler.is_compiling():
        return zip(*(torch.unflatten(x, 0, (PARTS, -1)).unbind() for x in rows), strict=True)
    return zip(*(torch.split(x, max(1, LOGIT_ELEMENTS // vocab_size)) for x in rows), strict=True)


def cross_entropy(hidden_RH: Tensor, head_VH: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's cross entropy with its label (fp32 or fp64) and its most probable token.

    Differentiable in `hidden_RH`, and in `head_VH` where that is trained; a frozen one has the dtype
    of `hidden_RH`. Without rows both are empty.
    """
    if torch.is_grad_enabled() and head_VH.requires_grad:
        return _recomputed(hidden_RH, head_VH, labels_R)
    return _CrossEntropy.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden_RH, head_VH, labels_R, torch.is_grad_enabled() and hidden_RH.requires_grad
    )


def soft_cross_entropy(
    hidden_RH: Tensor, head_UH: Tensor, teacher_RU: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each row's -sum p log q (fp32 or fp64) and its most probable token.

    p is the softmax of a teacher's logits (`teach`), q that of the draft's. Differentiable in `hidden_RH`
    and `head_UH`, which may be trained.
    """
    return _recomputed(hidden_RH, head_UH, teacher_RU)


def _recomputed(hidden_RH: Tensor, head_VH: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Make each slice's logits anew in the backward; labels are tokens [R], or logits [R, V]."""

    def values(hidden_rH: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits_rV = functional.linear(hidden_rH, head_VH)
        exact_rV = logits_rV.to(torch.promote_types(logits_rV.dtype, torch.float32))
        if label.ndim > 1:
            label = label.softmax(-1, dtype=exact_rV.dtype)
        return functional.cross_entropy(exact_rV, label, reduction="none"), logits_rV.argmax(-1)

    parts = [
        checkpoint(values, *rows, use_reentrant=False, preserve_rng_state=False)
        for rows in in_slices(len(head_VH), hidden_RH, labels)
    ]
    return torch.cat([loss for loss, _ in parts]), torch.cat([best for _, best in parts])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, head_VH: Tensor, labels_R: Tensor, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        function = heads.cross_entropy if heads.suits(hidden_RH) else _sliced_cross_entropy
        with full_precision(hidden_RH.device):
            loss_R, best_R, slope_RH = function(hidden_RH, head_VH, labels_R, wanted)
        ctx.save_for_backward(slope_RH if wanted else None)
        ctx.mark_non_differentiable(best_R)
        return loss_R, best_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slope_RH,) = ctx.saved_tensors
        return (slope_RH * grad_R[:, None]).to(slope_RH.dtype), None, None, None


def _sliced_cross_entropy(
    hidden_RH: Tensor, head_VH: Tensor, labels_R: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each row's cross entropy, its best token, and d loss / d hidden [R, H] if that is wanted."""
    exact = torch.promote_types(hidden_RH.dtype, torch.float32)
    losses, bests, slopes = [], [], []
    for hidden_rH, label_r in in_slices(len(head_VH), hidden_RH, labels_R):
        logits_rV = hidden_rH @ head_VH.T
        bests.append(logits_rV.argmax(-1))
        log_probs_rV = logits_rV.log_softmax(-1, dtype=exact)
        losses.append(-log_probs_rV.gather(1, label_r[:, None])[:, 0])
        if wanted:
            slope_rV = residual(log_probs_rV, label_r[:, None])
            slopes.append(slope_rV.to(head_VH.dtype) @ head_VH)
    return torch.cat(losses), torch.cat(bests), torch.cat(slopes) if wanted else None


def residual(log_probs_rV: Tensor, label_r1: Tensor) -> Tensor:
    """Turn log-probabilities into softmax - onehot, d CE / d logits; in place, but for a compiler."""
    compiling = torch.compiler.is_compiling()
    return _less_at(log_probs_rV.exp() if compiling else log_probs_rV.exp_(), label_r1, 1.0)


def _less_at(x_rV: Tensor, label_r1: Tensor, amount: float) -> Tensor:
    """Subtract from one place of each row; in place, but for a compiler."""
    if torch.compiler.is_compiling():  # it fuses this, and would keep the result of a scatter
        index_V = torch.arange(x_rV.shape[-1], device=x_rV.device)
        return x_rV - amount * (index_V == label_r1).to(x_rV.dtype)
    return x_rV.scatter_add_(1, label_r1, x_rV.new_full(label_r1.shape, -amount))


# ---------------------------------------------------------------- a distribution


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at rows: its logits of draft tokens, and their scale.

    Their softmax is exp(logits - own_R), renormalised, or exp(logits - all_R), a share of the target's
    whole vocabulary. label_R: the draft index of the target's most probable token, -1 if it has none.
    """

    logits_RU: Tensor
    own_R: Tensor
    all_R: Tensor
    label_R: Tensor


@torch.no_grad()
def teach(
    last_hidden_RH: Tensor, head_VH: Tensor, scale: float, softcap: float | None,
    *, ids_U: Tensor | None = None,
) -> Teacher:  # fmt: skip
    """Run the target's head on its last hidden states, a slice of rows at a time.

    `scale` and `softcap` are what the target does to its logits: `TargetSpec.logit_scale` and
    `logit_softcap`, as `TargetSpec.capped` does outside of training. `ids_U` are the target ids of a
    draft vocabulary; None for the full one. A hidden state at token t is about token t + 1.
    """
    index_V = torch.arange(len(head_VH), device=head_VH.device)
    if ids_U is not None:
        index_V = torch.full_like(index_V, -1).index_copy(0, ids_U, index_V[: len(ids_U)])
    parts, last_hidden_RH = [], last_hidden_RH.to(head_VH.dtype)
    with full_precision(head_VH.device):
        if heads.suits(head_VH) and scale == 1 and not softcap:
            own_RU, own_R, all_R, best_R = heads.teach(last_hidden_RH, head_VH, ids_U)
            return Teacher(own_RU, own_R, all_R, index_V[best_R])
        for (hidden_rH,) in in_slices(len(head_VH), last_hidden_RH):
            logits_rV = functional.linear(hidden_rH, head_VH)
            best_r = logits_rV.max(-1).indices
            logits_rV = capped(logits_rV, scale, softcap)
            own_rU = logits_rV if ids_U is None else logits_rV.index_select(1, ids_U)
            scales = [_logsumexp(own_rU), _logsumexp(logits_rV)]
            parts.append((own_rU, *scales, index_V[best_r]))
        return Teacher(*(torch.cat(part) for part in zip(*parts, strict=True)))


def capped(logits_rV: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scale and cap the target's logits as the target does."""
    if scale == 1 and not softcap:
        return logits_rV
    exact_rV = logits_rV.to(torch.promote_types(logits_rV.dtype, torch.float32)) * scale
    exact_rV = softcap * torch.tanh(exact_rV / softcap) if softcap else exact_rV
    return exact_rV.to(logits_rV.dtype)


def _logsumexp(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)


# ---------------------------------------------------------------- a draft's and the target's, unmade


class DistributionLosses(NamedTuple):
    """What `distribution_losses` returns.

    `objective` carries the gradient; the rest is per row: each loss of the mixture, the overlap of
    the two distributions (sum of min(p, q): how probably a draft is accepted), and the draft's most
    probable token.
    """

    objective: Tensor
    losses: Mapping[str, Tensor]
    overlap_R: Tensor
    best_R: Tensor


def distribution_losses(
    hidden_RH: Tensor, head_VH: Tensor, last_hidden_RH: Tensor, label_R: Tensor, weight_R: Tensor,
    mixture: Mapping[str, float], *, scale: float = 1.0, softcap: float | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> DistributionLosses:  # fmt: skip
    """Compare a draft's distribution with a token and with the target's, a slice of rows at a time.

    The objective is the sum over rows of weight * (the sum of share * loss over the mixture), where
    q = softmax(W h), W being the frozen head, p is the target's softmax, W its last hidden state
    with `scale` and `softcap` as in `teach`, and a loss is one of

    - `ce`: -log q[label]; `kl`: sum p (log p - log q); `tv`: 1 - overlap, half the L1 distance;
    - `lk_alpha`: -log overlap (of at least 1e-5);
    - `lk_lambda`: w kl + (1 - w) tv, w = exp(-3 overlap) held constant in the gradient
      (arXiv 2602.23881; speculators calls the two `nla` and `lk_hybrid`).

    With `low_rank`, z [R, E] in the dtype of h and U [V, E], q is of W h + U z. Differentiable in h,
    z and U. Weights are constants, and 0 for rows that only fill up. Raises KeyError for another loss.
    """
    low_RE, up_VE = low_rank or (None, None)
    inputs = (hidden_RH, low_RE, up_VE)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    objective, overlap_R, best_R, *losses = _DistributionLosses.apply(  # type: ignore[no-untyped-call]
        *inputs, head_VH, last_hidden_RH, label_R, weight_R, dict(mixture), (scale, softcap), wanted
    )
    return DistributionLosses(objective, dict(zip(mixture, losses, strict=True)), overlap_R, best_R)


class _DistributionLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, low_RE: Tensor | None, up_VE: Tensor | None, head_VH: Tensor,
        last_hidden_RH: Tensor, label_R: Tensor, weight_R: Tensor, mixture: Mapping[str, float],
        capping: tuple[float, float | None], wanted: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weight_R = weight_R.to(torch.promote_types(hidden_RH.dtype, torch.float32))
        up = None if up_VE is None else up_VE.to(hidden_RH.dtype)
        last_hidden_RH = last_hidden_RH.to(head_VH.dtype)
        given = (hidden_RH, low_RE, up, head_VH, last_hidden_RH, label_R, weight_R)
        with full_precision(hidden_RH.device):
            if heads.suits(hidden_RH) and capping[0] == 1 and not capping[1]:
                shares = [mixture.get(name, 0.0) for name in LOSSES]
                *found, best_R, hidden_grad, low_grad, up_grad_VE = heads.compare(
                    *given, shares, wanted
                )
                slopes = [hidden_grad, *([] if up is None else [low_grad])]
            else:
                (*found, best_R), slopes, up_grad_VE = _sliced(*given, mixture, capping, wanted)
            by_name = dict(zip(LOSSES, _losses(*found), strict=True))
            per_row = [by_name[name] for name in mixture]
            shared = zip(mixture.values(), per_row, strict=True)
            objective = sum(
                (share * loss_R for share, loss_R in shared), torch.zeros_like(weight_R)
            )
            objective = (objective * weight_R).sum()
        if wanted:
            up_grads = [] if up_VE is None else [cast(up_grad_VE, up_VE.dtype)]
            ctx.save_for_backward(*slopes, *up_grads)
        overlap_R = found[2]
        ctx.mark_non_differentiable(overlap_R, best_R, *per_row)
        return objective, overlap_R, best_R, *per_row

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled: list[Tensor | None] = [
            (saved * grad).to(saved.dtype) for saved in ctx.saved_tensors
        ]
        return *scaled, *[None] * (10 - len(scaled))


def _sliced(
    hidden_RH: Tensor, low_RE: Tensor | None, up_VE: Tensor | None, head_VH: Tensor,
    last_hidden_RH: Tensor, label_R: Tensor, weight_R: Tensor, mixture: Mapping[str, float],
    capping: tuple[float, float | None], wanted: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:  # fmt: skip
    """Return what `heads.compare` does, by torch's operations: by row, gradients of h and z, that of U."""
    exact, half, by_row, slopes = weight_R.dtype, hidden_RH.dtype, [], []
    up_grad_VE = None if up_VE is None else torch.zeros_like(up_VE, dtype=exact)
    rows = (hidden_RH, last_hidden_RH, label_R, weight_R, *([] if low_RE is None else [low_RE]))
    for hidden_rH, last_rH, label_r, weight_r, *low in in_slices(2 * len(head_VH), *rows):
        logits_rV = (hidden_rH @ head_VH.T).to(exact)
        if up_VE is not None:
            logits_rV = logits_rV + low[0] @ up_VE.T
        best_r = logits_rV.argmax(-1)
        log_p_rV = capped(last_rH @ head_VH.T, *capping).log_softmax(-1, dtype=exact)
        found, slope_rV = _compare(
            logits_rV.log_softmax(-1), log_p_rV, label_r[:, None], mixture, wanted
        )
        by_row.append((*found, best_r))
        if slope_rV is None:
            continue
        slope_rV = (slope_rV * weight_r[:, None]).to(half)
        slopes.append([slope_rV @ head_VH, *([] if up_VE is None else [slope_rV @ up_VE])])
        if up_grad_VE is not None:
            up_grad_VE = up_grad_VE + slope_rV.T @ low[0]
    joined = [torch.cat(part) for part in zip(*by_row, strict=True)]
    return joined, [torch.cat(part) for part in zip(*slopes, strict=True)], up_grad_VE


def _losses(ce_R: Tensor, kl_R: Tensor, overlap_R: Tensor) -> tuple[Tensor, ...]:
    """Return all `LOSSES` of rows."""
    tv_R, kept_R = 1 - overlap_R, torch.exp(-LK_DECAY * overlap_R)
    lk_alpha_R = -overlap_R.clamp_min(LEAST_OVERLAP).log()
    return ce_R, kl_R, tv_R, lk_alpha_R, kept_R * kl_R + (1 - kept_R) * tv_R


def _compare(
    log_q_rV: Tensor, log_p_rV: Tensor, label_r1: Tensor, mixture: Mapping[str, float], wanted: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Return rows' cross entropy, KL and overlap, and d loss / d logits of q if that is wanted.

    All slopes are made of three: q - onehot of ce, q - p of kl, and of the overlap
    q (m - sum q m) with m = [q < p].
    """
    ce, kl, tv, alpha, lk = (mixture.get(name, 0.0) for name in LOSSES)
    q_rV, p_rV = log_q_rV.exp(), log_p_rV.exp()
    overlap_r = torch.minimum(q_rV, p_rV).sum(-1)
    ce_r, kl_r = -log_q_rV.gather(1, label_r1)[:, 0], torch.zeros_like(overlap_r)
    if "kl" in mixture or "lk_lambda" in mixture:
        kl_r = (p_rV * (log_p_rV - log_q_rV)).sum(-1)
    if not wanted:
        return (ce_r, kl_r, overlap_r), None
    floored_r, kept_r = overlap_r.clamp_min(LEAST_OVERLAP), torch.exp(-LK_DECAY * overlap_r)
    kl_r1 = (kl + lk * kept_r)[:, None]
    tv_r1 = (tv + lk * (1 - kept_r) + alpha * (overlap_r > LEAST_OVERLAP) / floored_r)[:, None]
    below_rV = (q_rV < p_rV).to(q_rV.dtype)
    share_r1 = (q_rV * below_rV).sum(-1, keepdim=True)
    slope_rV = q_rV * (ce + kl_r1 + tv_r1 * (share_r1 - below_rV))
    if kl or lk:
        slope_rV = slope_rV - kl_r1 * p_rV
    slope_rV = _less_at(slope_rV, label_r1, ce) if ce else slope_rV
    return (ce_r, kl_r, overlap_r), slope_rV
