"""A row of a batch that is divided between two parts of it, and what its attention keeps between them.

The part that the row ends leaves the keys and values of its beginning, layer by layer; the part
that it begins puts them before those of its rest. Nothing else is kept, and no other row attends
to what is not its own. Where both parts run on streams of their own, a layer of the second waits
for that layer of the first and for no more: that is how far they can run beside each other.

Shape letters: R rows of a part, T tokens of the whole row, W of a part, D width of a head.
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
    """The first `inside` tokens of a row are in one part, the others, up to `length`, in the next."""

    inside: int
    length: int
    kept: list[Kept] = field(default_factory=list)

    def beginning(self, num_layers: int) -> Cache:
        """The cache of a forward whose last row is the beginning."""
        self.kept = [Kept() for _ in range(num_layers)]
        return Cache(layers=[_Beginning(self, kept) for kept in self.kept])

    def rest(self) -> Cache:
        """The cache of a forward whose first row is the rest.

        Raises DraftcoreError where nothing is left of the beginning.
        """
        if not any(hasattr(kept, "keys") for kept in self.kept):
            raise DraftcoreError(
                "a row was divided between two parts of a batch, and the first left no keys and values"
                "\n  the target's attention does not keep them in the cache that it is given: leave "
                "out the graph plugin that divides rows"
            )
        return Cache(layers=[_Rest(self, kept) for kept in self.kept])

    def positions(self, tokens_BT: Tensor) -> Tensor:
        """Where the tokens [R, W] of the part with the rest stand in their rows."""
        R, W = tokens_BT.shape
        starts_B = torch.zeros(R, 1, dtype=torch.long, device=tokens_BT.device)
        starts_B[0] = self.inside
        positions_BT = starts_B + torch.arange(W, device=tokens_BT.device)
        return positions_BT.clamp_(max=self.length - 1)  # what is beyond is padding


class Kept:
    """One layer's keys and values of the beginning, [1, heads, inside, D], and when they are there."""

    def __init__(self) -> None:
        self.keys: Tensor
        self.values: Tensor
        self.there: torch.cuda.Event | None = None

    def note(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys.clone(), values.clone()
        if keys.is_cuda:
            self.there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.there.record()

    def wait(self) -> None:
        """Let the current stream wait, where another one computes them."""
        if self.there is not None:
            torch.cuda.current_stream().wait_event(self.there)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of a layer of a cache; masks and positions are given to it anyway."""

    def __init__(self, row: DividedRow, kept: Kept) -> None:
        super().__init__()
        self.row, self.kept = row, kept

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated ahead."""

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
        inside = self.row.inside
        self.kept.note(key_states[-1:, :, :inside], value_states[-1:, :, :inside])
        return key_states, value_states


class _Rest(_Layer):
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.kept.wait()
        keys = self._joined(self.kept.keys, key_states)
        return keys, self._joined(self.kept.values, value_states)

    def _joined(self, beginning: Tensor, states: Tensor) -> Tensor:
        """Rows [R, heads, T, D]: the divided one, whole, and the others, if any, as they are."""
        rest = states[:1, :, : self.row.length - self.row.inside]
        whole = torch.cat([beginning, rest], dim=2)
        return torch.cat([whole, states[1:]]) if len(states) > 1 else whole
