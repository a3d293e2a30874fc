"""Triton's kernel for base and final cross entropy: both logits are read twice, and written over.

See `draftcore_nn.kernels`. Shape letters: R rows, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from draftcore_nn.kernels import BLOCK, WARPS, finish, merge
from torch import Tensor


@triton.jit
def _corrected(
    base, correction, label, final_weight, base_weight, loss,
    best, V, stride, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    base, correction, right = base + row * V, correction + row * V, tl.load(label + row)
    top, total = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    f_top, f_total = top, total
    place = tl.zeros([BLOCK], tl.int32)
    f_place = place
    for start in range(0, V, BLOCK):
        at = start + lanes
        x = tl.load(base + at, mask=at < V, other=float("-inf")).to(tl.float32)
        y = x + tl.load(correction + at, mask=at < V, other=0.0).to(tl.float32)
        top, total, place = merge(top, total, place, x, at)
        f_top, f_total, f_place = merge(f_top, f_total, f_place, y, at)
    scale, largest = finish(top, total, place)
    f_scale, f_largest = finish(f_top, f_total, f_place)
    found = tl.load(base + right).to(tl.float32)
    tl.store(loss + stride + row, scale - found)
    tl.store(loss + row, f_scale - (found + tl.load(correction + right).to(tl.float32)))
    tl.store(best + row, f_largest)
    tl.store(best + stride + row, largest)
    if WANTED:
        tl.debug_barrier()  # the label's logits are read before they are written over
        weight, f_weight = tl.load(base_weight + row), tl.load(final_weight + row)
        for start in range(0, V, BLOCK):
            at = start + lanes
            x = tl.load(base + at, mask=at < V).to(tl.float32)
            y = x + tl.load(correction + at, mask=at < V).to(tl.float32)
            hit = (at == right).to(tl.float32)
            slope, f_slope = (
                (tl.exp(x - scale) - hit) * weight,
                (tl.exp(y - f_scale) - hit) * f_weight,
            )
            tl.store(base + at, (slope + f_slope).to(base.dtype.element_ty), mask=at < V)
            tl.store(correction + at, f_slope.to(base.dtype.element_ty), mask=at < V)


def corrected(
    base_RV: Tensor, correction_RV: Tensor, label_R: Tensor, final_weight_R: Tensor,
    base_weight_R: Tensor, loss_2R: Tensor, best_2R: Tensor, wanted: bool,
) -> None:  # fmt: skip
    """Write final and base losses and best tokens; over base logits the sum of their gradients."""
    rows, size = base_RV.shape
    given = (base_RV, correction_RV, label_R, final_weight_R, base_weight_R, loss_2R, best_2R)
    with torch.cuda.device_of(base_RV):
        _corrected[(rows,)](
            *given, size, loss_2R.stride(0), wanted, BLOCK=BLOCK // 2, num_warps=WARPS
        )
