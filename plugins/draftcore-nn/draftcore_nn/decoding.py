"""What decoders do in every round, without waiting for the device.

Shape letters: B rows, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftcore.contracts.algorithm import Proposal

State = TypeVar("State")
Choice = tuple[Tensor, Tensor | None]


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Choice:
    """Pick tokens [...] from logits [..., V]; when sampling, also return their distributions.

    At temperature 0 the token is the most probable one, and there is no distribution.
    """
    if temperature <= 0:
        return logits.argmax(-1), None
    exact = torch.promote_types(logits.dtype, torch.float32)
    probs = (logits / temperature).softmax(-1, dtype=exact)
    # The first arrival of exponential clocks; torch.multinomial checks its input on the host.
    clocks = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / clocks.clamp_min(torch.finfo(exact).tiny)).argmax(-1), probs


def chain(choices: Sequence[Choice]) -> Proposal:
    """Propose the K tokens [B] that were chosen one after another."""
    tokens_BK = torch.stack([token_B for token_B, _ in choices], 1)
    probs = [probs_BV for _, probs_BV in choices if probs_BV is not None]
    return Proposal(tokens_BK, torch.stack(probs, 1) if probs else None)


def at(x_BT: Tensor, index_B: Tensor) -> Tensor:
    """Take one place of each row: of [B, T, ...] the places [B], as [B, ...]."""
    return x_BT[torch.arange(len(index_B), device=index_B.device), index_B]


@torch.inference_mode()
def select_rows(state: State, rows_B: Tensor) -> State:
    """Return a state, a dataclass of tensors with the batch first, of these rows in this order.

    A drafter takes it as it is: `select = staticmethod(select_rows)`.
    """
    kept: dict[str, Any] = {name: value[rows_B] for name, value in vars(state).items()}
    return type(state)(**kept)
