"""A drafter's keys and values in preallocated slots: where rows are written, and what they see.

A token's slot is its position. So positions say all: by what heads are rotated, which slots are
written, which are seen. Slots that were not written yet, or whose row was not accepted, hold leftovers:
a row sees slots up to its own position only, and each is written again before a row gets there.

Shape letters: B batch, L layers, S slots, R rows that attend, T rows that are written, A query heads,
G key/value heads, D head width, Z = S, or S + R.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from draftcore_nn.layers import Rotary
from draftcore_nn.target import DecoderShape

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """What follows from rows' positions: cosines and sines, as `rotate` takes them; what they see."""

    angles: tuple[Tensor, Tensor]
    seen_B1RZ: Tensor


@dataclass
class CachedState:
    """The base of a drafter's state, a dataclass of tensors with the batch first; see `select_rows`.

    Derive from it with fields of your own, and make it of `empty_slots`.
    """

    keys_BLGSD: Tensor
    values_BLGSD: Tensor

    def rows(
        self, rotary: Rotary, positions_BR: Tensor, *, window: int | None = None,
        block: bool = False, causal: bool = True,
    ) -> Rows:  # fmt: skip
        """Place rows: each sees the slots up to its own, where it is written before it attends.

        A `block`, ascending from its first position, is never written: it sees the slots before that, and
        itself, each row up to its own place where it is `causal`. With a `window` a row sees so many slots,
        its own place included, and all of a block's that it may.
        """
        size, device = positions_BR.shape[1], positions_BR.device
        slots_S = torch.arange(self.keys_BLGSD.shape[3], device=device)
        end_BR1 = positions_BR[:, :1, None] if block else positions_BR[..., None] + 1
        seen_BRZ = (slots_S < end_BR1).expand(-1, size, -1)
        if window is not None:
            seen_BRZ = seen_BRZ & (slots_S > positions_BR[..., None] - window)
        if block:
            own_RR = torch.ones(size, size, dtype=torch.bool, device=device)
            own_RR = own_RR.tril() if causal else own_RR
            seen_BRZ = torch.cat([seen_BRZ, own_RR.expand(len(seen_BRZ), -1, -1)], 2)
        return Rows(rotary(positions_BR), seen_BRZ[:, None])

    def write(self, layer: int, key_values: Iterable[Tensor], positions_BT: Tensor) -> None:
        """Write rotated keys and values, [B, T, G, D], into the slots of their positions."""
        for slots, x_BTGD in zip((self.keys_BLGSD, self.values_BLGSD), key_values, strict=True):
            x_BGTD = x_BTGD.transpose(1, 2).to(slots.dtype)
            index_BGTD = positions_BT[:, None, :, None].expand_as(x_BGTD)
            slots[:, layer].scatter_(2, index_BGTD, x_BGTD)

    def attend(
        self, layer: int, query_BRAD: Tensor, rows: Rows, own: KeysValues | None = None
    ) -> Tensor:
        """Attend from rotated queries; returns [B, R, A, D].

        A block gives its `own` rotated keys and values, [B, R, G, D]; other rows were written before.
        """
        key_BGZD, value_BGZD = self.keys_BLGSD[:, layer], self.values_BLGSD[:, layer]
        if own is not None:
            key_BGZD = torch.cat([key_BGZD, own[0].transpose(1, 2)], 2)
            value_BGZD = torch.cat([value_BGZD, own[1].transpose(1, 2)], 2)
        attended_BARD = functional.scaled_dot_product_attention(
            query_BRAD.transpose(1, 2), key_BGZD, value_BGZD, rows.seen_B1RZ, enable_gqa=True
        )
        return attended_BARD.transpose(1, 2)


def empty_slots(
    shape: DecoderShape, layers: int, batch: int, slots: int, like: Tensor
) -> KeysValues:
    """Return keys and values for so many slots a row, of the dtype and device of a weight.

    A row of up to `max_len` positions that drafts K tokens needs max_len + K + 1.
    """
    size = (batch, layers, shape.num_key_value_heads, slots, shape.head_dim)
    return like.new_zeros(size), like.new_zeros(size)
