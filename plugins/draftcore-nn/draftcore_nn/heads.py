"""Products with a head, and losses of their logits, as operators that a compiler does not look into.

They are for CUDA and half precision, where Triton is there, as `suits` says. Logits exist for a slice of
rows at a time, in one piece of memory: Triton's kernels read them, and write their gradient over them
(see `kernels`).

Shape letters: R rows, H hidden, E rank of a correction, V vocabulary, U the draft's own, N chunks of a
vocabulary, K best tokens; r a slice of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

SLICE_ELEMENTS = 1 << 28  # of logits that exist together: 512 MiB
HAS_TRITON = find_spec("triton") is not None
TILE = 1024  # rows of which a product with a head fills a large device evenly
LK_DECAY, LEAST_OVERLAP = 3.0, 1e-5  # of `lk_lambda` and `lk_alpha`, see `distribution_losses`


def suits(x: Tensor) -> bool:
    """Say whether there are kernels for logits of this dtype and device."""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def sliced_logits(*factors: tuple[Tensor, Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield slices of rows, with logits [r, V] of each pair of rows [R, H] and a head [V, H].

    Slices are of like length. A slice's logits are written over those before; a caller may write there too.
    """
    rows_RH, head_VH = factors[0]
    rows, size = len(rows_RH), len(head_VH)
    count = max(1, -(-rows * len(factors) * size // SLICE_ELEMENTS))
    most = max(1, -(-rows // count // TILE)) * TILE
    memory = rows_RH.new_empty(len(factors), min(most, rows), size)
    for start in range(0, rows, most):
        part = slice(start, min(start + most, rows))
        pairs = zip(factors, memory[:, : part.stop - start], strict=True)
        yield part, [torch.mm(x_RH[part], y_VH.T, out=rV) for (x_RH, y_VH), rV in pairs]


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
    for part, (logits_rV,) in sliced_logits((hidden_RH, head_VH)):
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
    unused_R = torch.empty_like(best_R)
    for part, (logits_rV,) in sliced_logits((hidden_RH, head_VH)):
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


@torch.library.custom_op("draftcore::compare", mutates_args=())
def compare(
    hidden_RH: Tensor, low_RE: Tensor | None, up_VE: Tensor | None, head_VH: Tensor,
    last_hidden_RH: Tensor, label_R: Tensor, weight_R: Tensor, shares: Sequence[float], wanted: bool,
) -> list[Tensor]:  # fmt: skip
    """Return what `kernels.compare` says of each row, and the gradients of h, z and U if these are wanted."""
    from draftcore_nn import kernels

    found: list[Tensor] = _compare_like(
        hidden_RH, low_RE, up_VE, head_VH, last_hidden_RH, label_R, weight_R, shares, wanted
    )
    *by_row, slope_RH, slope_RE, up_grad_VE = found
    all_R, unused_R = numbers(len(hidden_RH), hidden_RH), tokens(len(hidden_RH), hidden_RH)
    up_grad_VE.zero_()
    factors = (hidden_RH, head_VH), (last_hidden_RH, head_VH)
    for part, (logits_rV, teacher_rV) in sliced_logits(*factors):
        kernels.statistics(teacher_rV, all_R[part], unused_R[part])
        kernels.compare(
            logits_rV, None if low_RE is None or up_VE is None else low_RE[part] @ up_VE.T,
            teacher_rV, all_R[part], label_R[part], weight_R[part], [x_R[part] for x_R in by_row],
            (*shares, LK_DECAY, LEAST_OVERLAP), wanted,
        )  # fmt: skip
        if not wanted:
            continue
        torch.mm(logits_rV, head_VH, out=slope_RH[part])
        if low_RE is not None and up_VE is not None:
            torch.mm(logits_rV, up_VE, out=slope_RE[part])
            add_product(up_grad_VE, logits_rV.T, low_RE[part])
    return found


@compare.register_fake
def _compare_like(
    hidden_RH: Tensor, low_RE: Tensor | None, up_VE: Tensor | None, head_VH: Tensor,
    last_hidden_RH: Tensor, label_R: Tensor, weight_R: Tensor, shares: Sequence[float], wanted: bool,
) -> list[Tensor]:  # fmt: skip
    rows = hidden_RH.shape[0]
    by_row = [*(numbers(rows, hidden_RH) for _ in range(3)), tokens(rows, hidden_RH)]
    slopes = [
        hidden_RH.new_empty(0 if x is None or not wanted else x.shape, dtype=dtype)
        for x, dtype in ((hidden_RH, None), (low_RE, None), (up_VE, torch.float32))
    ]
    return [*by_row, *slopes]


def most_probable(logits_RV: Tensor, peak_RN: Tensor, count: int) -> Tensor:
    """Return the places of so many largest logits of each row, [R, K], the largest first.

    `peak_RN` are those of chunks, from `kernels.statistics`. A chunk with one of the K largest logits is
    among the K chunks with the largest peaks, so the others are not looked at.
    """
    from draftcore_nn.kernels import CHUNK

    size = logits_RV.shape[1]
    chunk_RK = peak_RN.topk(min(count, peak_RN.shape[1]), sorted=False).indices
    within = torch.arange(CHUNK, device=logits_RV.device)
    place_RN = (chunk_RK[..., None] * CHUNK + within).flatten(1)
    near_RN = logits_RV.gather(1, place_RN.clamp_max(size - 1))
    near_RN = near_RN.masked_fill_(place_RN >= size, float("-inf"))
    return place_RN.gather(1, near_RN.topk(count).indices)
