"""Triton's kernels for losses: they read a slice's logits twice, and write their gradient over them.

A program has one row. It goes over the row once for its log-sum-exp and its largest logit, and again for
what the backward needs; a third time where a slope needs sums of both. Arithmetic is in fp32.
`draftcore_nn.heads` and algorithms call them where `suits` says so; `merge` and `finish` are for kernels of
an algorithm's own. Triton launches them on the current device, so that has to be the logits'.

Shape letters: R rows, V vocabulary, N chunks of it, K places.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # logits at a time of a row, and who reads them
CHUNK = 64  # logits of which the largest is noted, see `statistics`


@triton.jit
def merge(top, total, place, x, at):
    """Take one more logit into each lane: the largest, the sum of exp(logit - largest), its place."""
    larger = tl.maximum(top, x)
    total = total * tl.exp(top - larger) + tl.exp(x - larger)
    return larger, total, tl.where(x > top, at, place)


@triton.jit
def finish(top, total, place):
    """Return a row's log-sum-exp, and the first place of its largest logit."""
    largest = tl.max(top, 0)
    logsumexp = largest + tl.log(tl.sum(total * tl.exp(top - largest), 0))
    return logsumexp, tl.min(tl.where(top == largest, place, 2147483647), 0).to(tl.int64)


@triton.jit
def scan(logits, peak, V, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return a row's log-sum-exp, and the first place of its largest logit.

    With a CHUNK, write the largest of so many logits, and of the next, to `peak`.
    """
    lanes = tl.arange(0, BLOCK)
    top, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        at = start + lanes
        x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
        top, total, place = merge(top, total, place, x, at)
        if CHUNK:
            largest = tl.max(tl.reshape(x, [BLOCK // CHUNK, CHUNK]), 1)
            to = start // CHUNK + tl.arange(0, BLOCK // CHUNK)
            tl.store(peak + to, largest.to(peak.dtype.element_ty), mask=to * CHUNK < V)
    return finish(top, total, place)


@triton.jit
def _statistics(logits, logsumexp, best, peak, V, N, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale, largest = scan(logits + row * V, peak + row * N, V, BLOCK, CHUNK)
    tl.store(logsumexp + row, scale)
    tl.store(best + row, largest)


def statistics(
    logits_RV: Tensor, logsumexp_R: Tensor, best_R: Tensor, peak_RN: Tensor | None = None
) -> None:
    """Write each row's log-sum-exp, the first place of its largest logit, and the largest of each chunk."""
    (rows, size), peak = logits_RV.shape, logits_RV if peak_RN is None else peak_RN
    given = (logits_RV, logsumexp_R, best_R, peak, size, peak.shape[1], BLOCK)
    with torch.cuda.device_of(logits_RV):
        _statistics[(rows,)](*given, 0 if peak_RN is None else CHUNK, num_warps=WARPS)


@triton.jit
def _cross_entropy(logits, label, loss, best, V, WANTED: tl.constexpr, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits, right = logits + row * V, tl.load(label + row)
    scale, largest = scan(logits, logits, V, BLOCK, 0)
    tl.store(loss + row, scale - tl.load(logits + right).to(tl.float32))
    tl.store(best + row, largest)
    if WANTED:
        tl.debug_barrier()  # the label's logit is read before it is written over
        for start in range(0, V, BLOCK):
            at = start + lanes
            x = tl.load(logits + at, mask=at < V).to(tl.float32)
            slope = tl.exp(x - scale) - (at == right).to(tl.float32)
            tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < V)


def cross_entropy(
    logits_RV: Tensor, label_R: Tensor, loss_R: Tensor, best_R: Tensor, wanted: bool
) -> None:
    """Write each row's cross entropy and its best token; over logits softmax - onehot, if that is wanted."""
    rows, size = logits_RV.shape
    given = (logits_RV, label_R, loss_R, best_R, size, wanted)
    with torch.cuda.device_of(logits_RV):
        _cross_entropy[(rows,)](*given, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _corrected(logits, correction, at, V, CORRECTED: tl.constexpr):
    x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
    if CORRECTED:
        x += tl.load(correction + at, mask=at < V, other=0.0).to(tl.float32)
    return x


@triton.jit
def _compare(
    logits, correction, teacher, taught, label, weight, cross, divergence, overlap, best,
    V, ce, kl, tv, lk_alpha, lk_lambda, decay, least,
    CORRECTED: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits, correction, teacher = logits + row * V, correction + row * V, teacher + row * V
    right, p_scale = tl.load(label + row), tl.load(taught + row)
    top, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        at = start + lanes
        x = _corrected(logits, correction, at, V, CORRECTED)
        top, total, place = merge(top, total, place, x, at)
    scale, largest = finish(top, total, place)
    tl.store(cross + row, scale - _corrected(logits, correction, right, V, CORRECTED))
    tl.store(best + row, largest)
    common, below = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    kl_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + lanes
        x = _corrected(logits, correction, at, V, CORRECTED) - scale
        t = tl.load(teacher + at, mask=at < V, other=float("-inf")).to(tl.float32) - p_scale
        q, p = tl.exp(x), tl.exp(t)
        common += tl.minimum(q, p)
        below += tl.where(q < p, q, 0.0)
        kl_sum += tl.where(p > 0, p * (t - x), 0.0)
    shared, share = tl.sum(common, 0), tl.sum(below, 0)
    tl.store(overlap + row, shared)
    tl.store(divergence + row, tl.sum(kl_sum, 0))
    if WANTED:
        tl.debug_barrier()  # the label's logit is read before it is written over
        kept = tl.exp(-decay * shared)
        by_kl = kl + lk_lambda * kept
        by_tv = tv + lk_lambda * (1 - kept)
        by_tv += tl.where(shared > least, lk_alpha / tl.maximum(shared, least), 0.0)
        by_row = tl.load(weight + row)
        for start in range(0, V, BLOCK):
            at = start + lanes
            x = _corrected(logits, correction, at, V, CORRECTED)
            t = tl.load(teacher + at, mask=at < V, other=float("-inf")).to(tl.float32)
            q, p = tl.exp(x - scale), tl.exp(t - p_scale)
            slope = q * (ce + by_kl + by_tv * (share - (q < p).to(tl.float32)))
            slope -= by_kl * p + ce * (at == right).to(tl.float32)
            tl.store(logits + at, (slope * by_row).to(logits.dtype.element_ty), mask=at < V)


def compare(
    logits_RV: Tensor, correction_RV: Tensor | None, teacher_RV: Tensor, taught_R: Tensor,
    label_R: Tensor, weight_R: Tensor, by_row: Sequence[Tensor],
    numbers: Sequence[float], wanted: bool,
) -> None:  # fmt: skip
    """Write cross entropy, KL from the teacher, overlap with it, and the best token of each row.

    The teacher's log-sum-exp is given. Over logits goes d (sum of shares * losses) / d logits times the
    row's weight, if that is wanted. `numbers` are the shares of `draftcore_nn.losses.LOSSES`, and what two
    of these losses have in them.
    """
    rows, size = logits_RV.shape
    correction = logits_RV if correction_RV is None else correction_RV
    given = (logits_RV, correction, teacher_RV, taught_R, label_R, weight_R, *by_row, size)
    with torch.cuda.device_of(logits_RV):
        _compare[(rows,)](
            *given, *numbers, correction_RV is not None, wanted,
            BLOCK=BLOCK // 2, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _residual(
    logits, teacher, label, scale, weight, loss, places, more, V, K, stride,
    TAUGHT: tl.constexpr, WANTED: tl.constexpr, ADDED: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits, teacher, right = logits + row * V, teacher + row * V, tl.load(label + row)
    q_scale, by_row = tl.load(scale + row), tl.load(weight + row)
    place = tl.arange(0, LANES)
    at_places = tl.load(places + row * K + place, mask=place < K, other=0)
    own = tl.load(logits + at_places).to(tl.float32)
    own_q = tl.exp(own - q_scale)
    if TAUGHT:
        p_scale, kl_sum = tl.load(scale + stride + row), tl.zeros([BLOCK], tl.float32)
        own_p = tl.exp(tl.load(teacher + at_places).to(tl.float32) - p_scale)
    else:
        tl.store(loss + row, q_scale - tl.load(logits + right).to(tl.float32))
        own_p = (at_places == right).to(tl.float32)
    if TAUGHT or WANTED:
        tl.debug_barrier()  # what is read above is written over below
        for start in range(0, V, BLOCK):
            at = start + lanes
            x = tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32) - q_scale
            if TAUGHT:
                t = tl.load(teacher + at, mask=at < V, other=float("-inf")).to(tl.float32)
                t -= p_scale
                p = tl.exp(t)
                kl_sum += tl.where(p > 0, p * (t - x), 0.0)
            else:
                p = (at == right).to(tl.float32)
            if WANTED:
                slope = (tl.exp(x) - p) * by_row
                tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < V)
        if TAUGHT:
            tl.store(loss + row, tl.sum(kl_sum, 0))
    if ADDED:
        tl.debug_barrier()  # these places are written once more
        slope = (own_q - own_p) * by_row + tl.load(more + row * K + place, mask=place < K)
        tl.store(logits + at_places, slope.to(logits.dtype.element_ty), mask=place < K)


def residual(
    logits_RV: Tensor, teacher_RV: Tensor | None, label_R: Tensor, scale_2R: Tensor,
    weight_R: Tensor, loss_R: Tensor, place_RK: Tensor, more_RK: Tensor | None, wanted: bool,
) -> None:  # fmt: skip
    """Write each row's cross entropy with its label, or its KL from the teacher's distribution.

    `scale_2R` are log-sum-exps of draft and teacher. Over logits goes weight * d loss / d logits, if that
    is wanted, and at K places of a row what more is to be added there.
    """
    (rows, size), top_k = logits_RV.shape, place_RK.shape[1]
    teacher = logits_RV if teacher_RV is None else teacher_RV
    more = weight_R if more_RK is None else more_RK
    given = (logits_RV, teacher, label_R, scale_2R, weight_R, loss_R, place_RK, more)
    kind = (teacher_RV is not None, wanted, more_RK is not None)
    with torch.cuda.device_of(logits_RV):
        _residual[(rows,)](
            *given, size, top_k, scale_2R.stride(0), *kind,
            LANES=triton.next_power_of_2(top_k), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
