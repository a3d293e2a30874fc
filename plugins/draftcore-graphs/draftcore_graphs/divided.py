"""How the forward of a batch is run in two parts that share one row, as `tbo` does.

The first part ends with the beginning of the shared row, the second part begins with the rest of it.
The first part keeps the keys and values of the beginning, layer by layer; the second part puts them
before those of the rest. All other rows attend to their own tokens alone. Where the parts run on
two streams, a layer of the second part waits for the same layer of the first, and for nothing else.

Shape letters: R rows of a part, W tokens of a row in a part, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftcore.errors import DraftcoreError


@dataclass
class DividedRow:
    """The shared row: `inside` of its `length` tokens are in the first part, the rest in the second."""

    inside: int
    length: int
    kept: list[Kept] = field(default_factory=list)

    def beginning(self, num_layers: int) -> Cache:
        """Return the cache for the first part, whose last row is the beginning."""
        self.kept = [Kept() for _ in range(num_layers)]
        return Cache(layers=[_Beginning(self, kept) for kept in self.kept])

    def rest(self) -> Cache:
        """Return the cache for the second part, whose first row is the rest.

        Raises DraftcoreError where the first part kept nothing.
        """
        if not any(hasattr(kept, "keys") for kept in self.kept):
            raise DraftcoreError(
                "a row was divided between two parts of a batch, and the first kept no keys and values"
                "\n  the target's attention does not write them into the cache that it is given: "
                "leave out the graph plugin that divides rows"
            )
        return Cache(layers=[_Rest(self, kept) for kept in self.kept])

    def positions(self, tokens_BT: Tensor) -> Tensor:
        """Return the positions of the second part's tokens [R, W] in their rows."""
        R, W = tokens_BT.shape
        starts_B = torch.zeros(R, 1, dtype=torch.long, device=tokens_BT.device)
        starts_B[0] = self.inside
        positions_BT = starts_B + torch.arange(W, device=tokens_BT.device)
        return positions_BT.clamp_(max=self.length - 1)  # beyond there is padding


class Kept:
    """One layer's keys and values of the beginning, [1, heads, inside, D].

    `ready` is recorded when they are computed, for the stream of the second part to wait for.
    """

    keys: Tensor
    values: Tensor
    ready: torch.cuda.Event | None = None


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of a layer of a cache, although masks and positions are given."""

    def __init__(self, row: DividedRow, kept: Kept) -> None:
        super().__init__()
        self.row, self.kept = row, kept

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `update` keeps what it needs."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.row.length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.row.length

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.2x."""
        return self.row.length


class _Beginning(_Layer):
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        kept, inside = self.kept, self.row.inside
        kept.keys = key_states[-1:, :, :inside].clone()
        kept.values = value_states[-1:, :, :inside].clone()
        if key_states.is_cuda:
            kept.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            kept.ready.record()
        return key_states, value_states


class _Rest(_Layer):
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        kept = self.kept
        if kept.ready is not None:
            torch.cuda.current_stream().wait_event(kept.ready)
        return self._joined(kept.keys, key_states), self._joined(kept.values, value_states)

    def _joined(self, beginning: Tensor, states: Tensor) -> Tensor:
        """Return rows [R, heads, length, D]: the shared one, whole, and the others as they are."""
        rest = states[:1, :, : self.row.length - self.row.inside]
        whole = torch.cat([beginning, rest], dim=2)
        return torch.cat([whole, states[1:]]) if len(states) > 1 else whole
