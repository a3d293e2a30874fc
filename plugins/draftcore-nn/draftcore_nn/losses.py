"""Cross entropy with a token or a distribution, over a large vocabulary, a slice of rows at a time.

Logits of a training step (rows x vocabulary) would not fit in memory. Where the head is frozen they
are not needed twice: d CE / d hidden = (softmax - onehot) W of a row does not depend on the row's
weight, so the forward computes it along with the loss, and the backward only scales it. That is one
product with W forward and one for the gradient, nothing recomputed. For a head that is trained the
backward makes the logits of each slice again.

A compiler has to know how many slices there are: then rows are cut into `PARTS`, and `padded` says
what fills them up.

Shape letters: R rows, H hidden, V vocabulary, U the draft's own; r a slice of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from draftcore_nn.layers import full_precision

# Logits exist for this many elements at a time: 256 MiB in fp32.
LOGIT_ELEMENTS = 1 << 26
PARTS = 16


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
        exact = torch.promote_types(hidden_RH.dtype, torch.float32)
        losses, bests, slopes = [], [], []
        with full_precision(hidden_RH.device):
            for hidden_rH, label_r in in_slices(len(head_VH), hidden_RH, labels_R):
                logits_rV = hidden_rH @ head_VH.T
                bests.append(logits_rV.argmax(-1))
                log_probs_rV = logits_rV.log_softmax(-1, dtype=exact)
                losses.append(-log_probs_rV.gather(1, label_r[:, None])[:, 0])
                if wanted:
                    slope_rV = residual(log_probs_rV, label_r[:, None])
                    slopes.append(slope_rV.to(head_VH.dtype) @ head_VH)
            loss_R, best_R = torch.cat(losses), torch.cat(bests)
        ctx.save_for_backward(torch.cat(slopes) if wanted else None)
        ctx.mark_non_differentiable(best_R)
        return loss_R, best_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slope_RH,) = ctx.saved_tensors
        return (slope_RH * grad_R[:, None]).to(slope_RH.dtype), None, None, None


def residual(log_probs_rV: Tensor, label_r1: Tensor) -> Tensor:
    """Turn log-probabilities into softmax - onehot, d CE / d logits; in place, but for a compiler."""
    if torch.compiler.is_compiling():  # it fuses this, and would keep the result of a scatter
        index_V = torch.arange(log_probs_rV.shape[-1], device=log_probs_rV.device)
        return log_probs_rV.exp() - (index_V == label_r1).to(log_probs_rV.dtype)
    probs_rV = log_probs_rV.exp_()
    return probs_rV.scatter_add_(1, label_r1, probs_rV.new_full(label_r1.shape, -1.0))


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
    parts = []
    with full_precision(head_VH.device):
        for (hidden_rH,) in in_slices(len(head_VH), last_hidden_RH.to(head_VH.dtype)):
            logits_rV = functional.linear(hidden_rH, head_VH)
            best_r = logits_rV.max(-1).indices
            if scale != 1 or softcap:
                exact_rV = logits_rV.to(torch.promote_types(logits_rV.dtype, torch.float32)) * scale
                exact_rV = softcap * torch.tanh(exact_rV / softcap) if softcap else exact_rV
                logits_rV = exact_rV.to(logits_rV.dtype)
            own_rU = logits_rV if ids_U is None else logits_rV.index_select(1, ids_U)
            scales = [_logsumexp(own_rU), _logsumexp(logits_rV)]
            parts.append((own_rU, *scales, index_V[best_r]))
        return Teacher(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _logsumexp(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
