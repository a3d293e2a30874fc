"""Acceptance measured by real speculative decoding, and its reports.

A `Drafter` is what an algorithm brings for it: the reference decoder of its draft. Decoding runs it
beside the target (`decode`), eagerly or through graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftcore.records import FeatureRequest


class Drafter(Protocol):
    """A reference decoder over a fixed batch with preallocated KV; no host sync in `propose`.

    Positions: `prefill` takes the prompt's tokens, their target features and the first generated
    token; `accept` takes what the target verified in a round, left-aligned. A state is tensors, batch
    first, in dataclasses, dicts, lists or tuples; weights are read at every call (see `graphs`).

    Shape letters: B rows, T tokens, K drafted tokens (`num_drafts`), V vocabulary.
    """

    num_drafts: int
    request: FeatureRequest

    def allocate(self, batch: int, max_len: int) -> Any:
        """Return a state with KV for `batch` rows of up to `max_len` positions."""
        ...

    def prefill(
        self,
        state: Any,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:
        """Read right-padded prompts of `lengths_B` tokens, with their features, [B, T, H] each.

        `next_B` is the token that the target generated first; the next proposal goes on from it.
        """
        ...

    def propose(
        self, state: Any, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens_BK and, when sampling, the probabilities_BKV they were drawn from."""
        ...

    def accept(
        self, state: Any, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        """Take over a verified round.

        `tokens_BK` holds K+1 tokens a row, of which the first counts_B (accepted drafts, then the
        target's own token) are new; `features` are the target's for the K+1 positions it read
        (the last token of the round before, then the drafts), of which counts_B are valid.
        """
        ...

    def select(self, state: Any, rows_B: Tensor) -> Any:
        """Return a state that keeps only these rows, in this order."""
        ...
