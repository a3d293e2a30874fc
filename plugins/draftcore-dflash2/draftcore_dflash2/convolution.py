"""A short convolution over the rows of a block, whose taps depend on its input.

It lets the rows talk in order before and after attention or the MLP. A tap is a learned number per
channel, and what a projection of the row gives for the channel's group. Rows before the block's first
count as zeros. See `DFlash2Draft` for what it is part of.

Shape letters: S rows of a block, H hidden, J taps, N groups of channels, C channels of a group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from draftcore_nn.layers import full_precision
from torch import Tensor, nn
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

    Arithmetic is in fp32 (fp64 for fp64 inputs).
    """
    size, groups = x_SH.shape[-2], change_SJN.shape[-1]
    exact = torch.promote_types(x_SH.dtype, torch.float32)
    with full_precision(x_SH.device):
        x_SNC = torch.unflatten(x_SH, -1, (groups, -1)).to(exact)
        sum_SNC = torch.zeros_like(x_SNC)
        for j, (base_H, change_SN) in enumerate(
            zip(base_JH.to(exact), change_SJN.unbind(-2), strict=True)
        ):
            tap_SNC = base_H.view(groups, -1) + change_SN[..., None]
            earlier_SNC = functional.pad(x_SNC, (0, 0, 0, 0, j, 0))[..., :size, :, :]
            sum_SNC = sum_SNC + tap_SNC * earlier_SNC
        return sum_SNC.flatten(-2).to(x_SH.dtype)


def reset_convolutions(module: nn.Module) -> None:
    """Make the identity of every convolution in a module."""
    for part in module.modules():
        if isinstance(part, ShortConvolution):
            part.reset()
