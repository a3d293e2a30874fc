"""The gradients of a draft: added up over batches, terms of the loss and ranks, and then divided once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftcore.contracts.run import Ranks


class Gradients:
    """Gradients of a draft's parameters: views of flat buffers where ranks or terms add them up.

    Each term of a loss has a denominator, and so a buffer, of its own. Without ranks and with a single
    term, and of a sharded draft, there is none.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.buffers = list[Tensor]()

    def view_in_buffer(self, term: int) -> None:
        """Let gradients be views of a term's buffer; the first takes over the gradients that are there."""
        trained = [p for p in self.parameters if p.requires_grad]
        if not self.buffers:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            self.buffers.append(torch.cat([grad.flatten() for grad in grads]))
        while len(self.buffers) <= term:
            self.buffers.append(torch.zeros_like(self.buffers[0]))
        parts = torch.split(self.buffers[term], [p.numel() for p in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def all_reduce(self, denominators: Tensor, ranks: Ranks) -> Tensor:
        """Add up the gradients of all ranks and of all terms; returns what still divides them.

        That is 0 where no term has a denominator; one that has none adds nothing. `denominators` has
        one for each term that the loss has on any rank.
        """
        if (terms := len(denominators)) > max(1, len(self.buffers)):  # terms of other ranks alone
            self.view_in_buffer(terms - 1)
            self.view_in_buffer(0)
        for tensor in (denominators, *self.buffers):
            ranks.all_reduce(tensor)
        if len(self.buffers) < 2:
            return denominators.sum().float()
        for term, (buffer, below) in enumerate(zip(self.buffers, denominators, strict=False)):
            buffer.div_(below).masked_fill_(below <= 0, 0.0)
            if term:
                self.buffers[0].add_(buffer)
        return (denominators > 0).any().float()

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not self.buffers)
        for buffer in self.buffers[1:]:
            buffer.zero_()
