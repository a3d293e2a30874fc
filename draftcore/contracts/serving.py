"""What an algorithm says of its draft in a server that prefills apart from where it decodes.

Beside the KV cache a prefill server sends one *row* per request, of fixed columns, and the algorithm
makes its first draft input of these rows.

Shape letters: B requests, H hidden, K drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

FieldName = Literal["hidden", "topk_p", "topk_index"]
WIRE_COLUMNS = 16  # of `topk_p` and `topk_index`; `hidden` is as wide as the draft's state


@dataclass(frozen=True)
class DraftShape:
    """What the widths of a row depend on: the draft as it is served, never the target.

    `hidden_size` and `dtype` are those of the state that the draft hands from step to step.
    `layers` is 1 unless every step has a draft layer of its own, which proposes its own `topk`.
    """

    hidden_size: int
    dtype: str
    topk: int = 1
    layers: int = 1

    @property
    def proposals(self) -> int:
        return self.topk * self.layers


@dataclass(frozen=True)
class RowField:
    """One field of a row: `width` columns on the wire, the first `needed` of which are filled."""

    name: FieldName
    width: int
    dtype: str
    needed: int


def hidden_field(shape: DraftShape) -> RowField:
    """The state that the draft goes on from, of the last token that was prefilled."""
    return RowField("hidden", shape.hidden_size, shape.dtype, shape.hidden_size)


def topk_fields(shape: DraftShape) -> tuple[RowField, RowField]:
    """The draft's first proposals, best first, layer after layer, with their probabilities."""
    k = shape.proposals
    return (
        RowField("topk_p", WIRE_COLUMNS, "float32", k),
        RowField("topk_index", WIRE_COLUMNS, "int64", k),
    )


@dataclass(frozen=True)
class DisaggBatch:
    """What the hook gets: rows that were checked, stacked on the device of the lengths.

    A field that the algorithm's row leaves out has no columns.
    """

    rids: tuple[str, ...]
    seq_lens_B: Tensor
    hidden_BH: Tensor
    topk_p_BK: Tensor
    topk_index_BK: Tensor


@dataclass(frozen=True)
class DraftInput:
    """The first draft input: the state each request's draft goes on from, and what it proposes.

    hidden_BH: floating point, the *draft's* state; topk_p_BK float32 and topk_index_BK int64: the
    first proposals, best first; last_tokens_B int64: the token each request continues from. What
    an algorithm does not need has no columns. An empty batch has B = 0.
    """

    hidden_BH: Tensor
    topk_p_BK: Tensor
    topk_index_BK: Tensor
    last_tokens_B: Tensor


def nothing_to_go_on(last_tokens_B: Tensor) -> DraftInput:
    """The input of an algorithm that starts from the last token alone: typed, without columns."""
    none = last_tokens_B.new_zeros(len(last_tokens_B), 0)
    return DraftInput(none.float(), none.float(), none.long(), last_tokens_B)
