"""Triton's kernel for cross entropy with a teacher's distribution: logits are read twice, and written over.

See `draftcore_nn.kernels`. Shape letters: S steps, M supervised rows, U draft vocabulary.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from draftcore_nn.kernels import BLOCK, WARPS, finish, merge
from torch import Tensor


@triton.jit
def _distill(
    logits, teacher, own, whole, slope, cross, overlap,
    best, M, U, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    taught = row % M
    logits, teacher = logits + row * U, teacher + taught * U
    own_scale = tl.load(own + taught)
    share = tl.exp(own_scale - tl.load(whole + taught))
    top, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    place, expected = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, U, BLOCK):
        at = start + lanes
        x = tl.load(logits + at, mask=at < U, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher + at, mask=at < U, other=float("-inf")).to(tl.float32)
        top, total, place = merge(top, total, place, x, at)
        expected += tl.where(at < U, tl.exp(t - own_scale) * x, 0.0)
    scale, largest = finish(top, total, place)
    tl.store(cross + row, scale - tl.sum(expected, 0))
    tl.store(best + row, largest)
    weight, common = tl.load(slope + row), tl.zeros([BLOCK], tl.float32)
    for start in range(0, U, BLOCK):
        at = start + lanes
        x = tl.load(logits + at, mask=at < U, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher + at, mask=at < U, other=float("-inf")).to(tl.float32)
        q, p = tl.exp(x - scale), tl.exp(t - own_scale)
        common += tl.minimum(q, p * share)
        if WANTED:
            tl.store(logits + at, ((q - p) * weight).to(logits.dtype.element_ty), mask=at < U)
    tl.store(overlap + row, tl.sum(common, 0))


def distill(
    logits_SMU: Tensor, teacher_MU: Tensor, own_M: Tensor, all_M: Tensor, slope_SM: Tensor,
    cross_SM: Tensor, overlap_SM: Tensor, best_SM: Tensor, wanted: bool,
) -> None:  # fmt: skip
    """Write each row's cross entropy, overlap and best token, and over its logits their gradient."""
    given = (logits_SMU, teacher_MU, own_M, all_M, slope_SM, cross_SM, overlap_SM, best_SM)
    with torch.cuda.device_of(logits_SMU):
        _distill[(slope_SM.numel(),)](
            *given, *teacher_MU.shape, wanted, BLOCK=BLOCK, num_warps=WARPS
        )
