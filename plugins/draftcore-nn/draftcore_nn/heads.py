"""Products with a head, and losses of their logits, as operators that a compiler does not look into.

They are for CUDA and half precision, where Triton is there, as `suits` says. Logits exist for a slice of
rows at a time, in one piece of memory: Triton's kernels read them, and write their gradient over them
(see `kernels`).

Shape letters: R rows, H hidden, V vocabulary, U the draft's own; r a slice of rows.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

SLICE_ELEMENTS = 1 << 28  # of logits that exist together: 512 MiB
HAS_TRITON = find_spec("triton") is not None
TILE = 128  # rows that a product with a head computes together


def suits(x: Tensor) -> bool:
    """Whether there are kernels for logits of this dtype and device."""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def slices(rows: int, width: int) -> list[slice]:
    """Cut rows of so many logits each into slices of like length."""
    count = max(1, -(-rows * width // SLICE_ELEMENTS))
    size = max(1, -(-rows // count // TILE)) * TILE
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def numbers(rows: int, like: Tensor) -> Tensor:
    """Return memory for one fp32 number of each row."""
    return torch.empty(rows, dtype=torch.float32, device=like.device)


def tokens(rows: int, like: Tensor) -> Tensor:
    """Return memory for one token of each row."""
    return torch.empty(rows, dtype=torch.long, device=like.device)


def add_product(sum_VH: Tensor, x_VR: Tensor, y_RH: Tensor) -> None:
    """Add a product to a sum in fp32, without a rounding to half precision on the way."""
    torch.addmm(sum_VH, x_VR, y_RH, out_dtype=torch.float32, out=sum_VH)


@torch.library.custom_op("draftcore::cross_entropy", mutates_args=())
def cross_entropy(
    hidden_RH: Tensor, head_VH: Tensor, label_R: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's cross entropy, its best token, and d loss / d hidden [R, H] if that is wanted."""
    from draftcore_nn import kernels

    loss_R, best_R, slope_RH = _cross_entropy_like(hidden_RH, head_VH, label_R, wanted)
    parts = slices(len(hidden_RH), len(head_VH))
    memory_rV = hidden_RH.new_empty(parts[0].stop if parts else 0, len(head_VH))
    for part in parts:
        logits_rV = torch.mm(hidden_RH[part], head_VH.T, out=memory_rV[: part.stop - part.start])
        kernels.cross_entropy(logits_rV, label_R[part], loss_R[part], best_R[part], wanted)
        if wanted:
            torch.mm(logits_rV, head_VH, out=slope_RH[part])
    return loss_R, best_R, slope_RH


@cross_entropy.register_fake
def _cross_entropy_like(
    hidden_RH: Tensor, head_VH: Tensor, label_R: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = hidden_RH.shape[0]
    slope_RH = hidden_RH.new_empty(hidden_RH.shape if wanted else 0)
    return numbers(rows, hidden_RH), tokens(rows, hidden_RH), slope_RH


@torch.library.custom_op("draftcore::teach", mutates_args=())
def teach(
    hidden_RH: Tensor, head_VH: Tensor, ids_U: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits of draft tokens [R, U], their log-sum-exp, that of all tokens, and the best of all."""
    from draftcore_nn import kernels

    own_RU, own_R, all_R, best_R = _teach_like(hidden_RH, head_VH, ids_U)
    parts, unused_R = slices(len(hidden_RH), len(head_VH)), torch.empty_like(best_R)
    memory_rV = hidden_RH.new_empty(parts[0].stop if parts else 0, len(head_VH))
    for part in parts:
        logits_rV = torch.mm(hidden_RH[part], head_VH.T, out=memory_rV[: part.stop - part.start])
        kernels.statistics(logits_rV, all_R[part], best_R[part])
        if ids_U is None:
            own_RU[part] = logits_rV
            own_R[part] = all_R[part]
        else:
            torch.index_select(logits_rV, 1, ids_U, out=own_RU[part])
            kernels.statistics(own_RU[part], own_R[part], unused_R[part])
    return own_RU, own_R, all_R, best_R


@teach.register_fake
def _teach_like(
    hidden_RH: Tensor, head_VH: Tensor, ids_U: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width = hidden_RH.shape[0], (head_VH if ids_U is None else ids_U).shape[0]
    own_R, all_R = numbers(rows, hidden_RH), numbers(rows, hidden_RH)
    return hidden_RH.new_empty(rows, width), own_R, all_R, tokens(rows, hidden_RH)
