"""A short convolution over the rows of a block, whose taps depend on its input.

It lets the rows talk in order before and after attention or the MLP. A tap is a learned number per
channel, and what a projection of the row gives for the channel's group. Rows before the block's first
count as zeros. See `DFlash2Draft` for what it is part of.

Shape letters: S rows of a block, H hidden, J taps, N groups of channels, C channels of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class ShortConvolution(nn.Module):
    """Convolves what a sublayer reads and what it returns; the taps of both follow from the former."""

    def __init__(self, width: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        sizes = (2, kernel_size, width // group_size)  # before and after the sublayer
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, width))
        self.kernel_projection = nn.Linear(width, sizes[0] * sizes[1] * sizes[2], bias=False)
        self.sizes = sizes
        self.reset()

    def reset(self) -> None:
        """Start as the identity: only a row's own tap is 1, and no input changes it."""
        with torch.no_grad():
            self.base_kernel.zero_()[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def forward(self, x_SH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a sublayer on a block's rows, [..., S, H], with a convolution before and after it."""
        change_S2JN = torch.unflatten(self.kernel_projection(x_SH), -1, self.sizes)
        before_SJN, after_SJN = change_S2JN.unbind(-3)
        inner_SH = sublayer(convolve(x_SH, self.base_kernel[0], before_SJN))
        return convolve(inner_SH, self.base_kernel[1], after_SJN)


def convolve(x_SH: Tensor, base_JH: Tensor, change_SJN: Tensor) -> Tensor:
    """Return sum over j of (base[j] + change[s, j, group]) * x[s - j], in the dtype of x.

    Arithmetic is in fp32 (fp64 for fp64 inputs). Nothing as large as x is kept for the backward but x.
    """
    # What it returns is made by the last operation: torch 2.11 would compile a view without gradient.
    convolved_SNC = _Convolved.apply(x_SH, base_JH, change_SJN)  # type: ignore[no-untyped-call]
    return convolved_SNC.flatten(-2).to(x_SH.dtype)  # type: ignore[no-any-return]


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SH: Tensor, base_JH: Tensor, change_SJN: Tensor) -> Tensor:
        ctx.save_for_backward(x_SH, base_JH, change_SJN)
        x_SNC, taps = _grouped(x_SH, change_SJN), _taps(base_JH, change_SJN)
        terms = [tap_SNC * _shifted(x_SNC, j) for j, tap_SNC in enumerate(taps)]
        return sum(terms[1:], terms[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SNC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_SH, base_JH, change_SJN = ctx.saved_tensors
        x_SNC, taps = _grouped(x_SH, change_SJN), _taps(base_JH, change_SJN)
        back = [_shifted(grad_SNC * tap_SNC, -j) for j, tap_SNC in enumerate(taps)]
        pulls = [grad_SNC * _shifted(x_SNC, j) for j in range(len(taps))]
        base_grad = torch.stack([pull.flatten(0, -3).sum(0).flatten() for pull in pulls])
        change_grad = torch.stack([pull.sum(-1) for pull in pulls], -2)
        x_grad = sum(back[1:], back[0]).flatten(-2)
        return x_grad.to(x_SH.dtype), base_grad.to(base_JH.dtype), change_grad.to(change_SJN.dtype)


def _grouped(x_SH: Tensor, change_SJN: Tensor) -> Tensor:
    """Return [..., S, N, C] in the dtype of the arithmetic."""
    exact = torch.promote_types(x_SH.dtype, torch.float32)
    return torch.unflatten(x_SH, -1, (change_SJN.shape[-1], -1)).to(exact)


def _taps(base_JH: Tensor, change_SJN: Tensor) -> list[Tensor]:
    """Return the taps of every row, [..., S, N, C] each."""
    base_JNC = _grouped(base_JH, change_SJN)
    changes = change_SJN.unbind(-2)
    return [
        base_NC + change_SN[..., None] for base_NC, change_SN in zip(base_JNC, changes, strict=True)
    ]


def _shifted(x_SNC: Tensor, rows: int) -> Tensor:
    """Move rows down by so many, or up where that is negative; zeros come in."""
    size = x_SNC.shape[-3]
    if rows < 0:
        return functional.pad(x_SNC, (0, 0, 0, 0, 0, -rows))[..., -rows:, :, :]
    return functional.pad(x_SNC, (0, 0, 0, 0, rows, 0))[..., :size, :, :]


def reset_convolutions(module: nn.Module) -> None:
    """Make the identity of every convolution in a module."""
    for part in module.modules():
        if isinstance(part, ShortConvolution):
            part.reset()
