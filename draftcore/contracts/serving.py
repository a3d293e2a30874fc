"""What an algorithm says of its draft in a server that prefills apart from where it decodes.

Beside the KV cache a prefill server sends one *row* per request, of the parts that the algorithm names,
and the algorithm makes its first draft input of these rows.

Shape letters: B requests, H hidden, K drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

# Of a row: the state that the draft hands from step to step, and its first proposals with probabilities.
RowPart = Literal["hidden", "topk"]


@dataclass(frozen=True)
class DisaggBatch:
    """What the hook gets: rows that were checked, stacked on the device of the lengths.

    A part that the algorithm's row leaves out has no columns.
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
    an algorithm does not need has no columns, and its type all the same. An empty batch has B = 0.
    """

    hidden_BH: Tensor
    topk_p_BK: Tensor
    topk_index_BK: Tensor
    last_tokens_B: Tensor
