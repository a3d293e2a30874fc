"""Triton's kernels for losses: they read a slice's logits twice, and write their gradient over them.

A program has one row. It goes over the row once for its log-sum-exp and its largest logit, and again for
what the backward needs. Arithmetic is in fp32. `draftcore_nn.heads` and algorithms call them where `suits`
says so; `merge` and `finish` are for kernels of an algorithm's own. Triton launches them on the current
device, so that has to be the logits'.

Shape letters: R rows, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # logits at a time of a row, and who reads them


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
def scan(logits, V, BLOCK: tl.constexpr):
    """Return a row's log-sum-exp, and the first place of its largest logit."""
    lanes = tl.arange(0, BLOCK)
    top, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        at = start + lanes
        x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
        top, total, place = merge(top, total, place, x, at)
    return finish(top, total, place)


@triton.jit
def _statistics(logits, logsumexp, best, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale, largest = scan(logits + row * V, V, BLOCK)
    tl.store(logsumexp + row, scale)
    tl.store(best + row, largest)


def statistics(logits_RV: Tensor, logsumexp_R: Tensor, best_R: Tensor) -> None:
    """Write each row's log-sum-exp and the first place of its largest logit."""
    rows, size = logits_RV.shape
    given = (logits_RV, logsumexp_R, best_R, size)
    with torch.cuda.device_of(logits_RV):
        _statistics[(rows,)](*given, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _cross_entropy(logits, label, loss, best, V, WANTED: tl.constexpr, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits, right = logits + row * V, tl.load(label + row)
    scale, largest = scan(logits, V, BLOCK)
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
