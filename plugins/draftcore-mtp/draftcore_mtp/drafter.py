"""The reference decoder: EAGLE-3's chain over a preallocated KV cache, through the target's MTP layer.

Row t of a sequence is (the target's last state of token t, token t+1) and lives at position t. Draft rows
read the layer's own normed output in place of states that nobody has yet.

Weights count as an export stores them: where the target's files are in half precision, rounded to it.

Shape letters: B batch, R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftcore_eagle3.drafter import DraftState, Eagle3Drafter
from torch import Tensor

from draftcore.contracts.capture import FeatureRequest
from draftcore_mtp.model import MtpDraft


class MtpDrafter(Eagle3Drafter):
    """Decodes with a draft in its own dtype and on its own device; see `contracts.algorithm.Drafter`."""

    draft: Any  # an MtpDraft, which has what EAGLE-3's drafter asks a draft for

    def __init__(self, draft: MtpDraft, num_drafts: int, dtype: str) -> None:
        self.draft, self.num_drafts = draft, num_drafts
        self.request = FeatureRequest((), last_hidden=True, dtype=dtype)

    def mistakes(self) -> Iterator[Any]:
        """Yield nothing: no engine is known to compute an MTP layer otherwise."""
        yield from ()

    def run(self, state: DraftState, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Run rows [B, R] at their positions through the layer, writing their cache slots."""
        mtp, layer = self.draft.mtp, self.draft.layer
        rows = state.rows(self.draft.rotary, positions)
        with as_stored(self.draft):
            x = mtp.join(mtp.of_token(self.draft.embed(tokens), positions), hidden)
            query, key, value, gate = layer.project(x, *rows.angles)
            state.write(0, (key, value), positions)
            output: Tensor = mtp.norm(layer.finish(x, state.attend(0, query, rows), gate))
        return output


@contextmanager
def as_stored(draft: MtpDraft) -> Iterator[None]:
    """Round the layer's weights for as long as this lasts, to what an export holds of them."""
    half = {n: dtype for n, dtype in draft.stored.items() if dtype.itemsize < 4}
    held = {parameter: parameter.data for n, parameter in draft.mtp.named_parameters() if n in half}
    try:
        for parameter, dtype in zip(held, half.values(), strict=True):
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        yield
    finally:
        for parameter, data in held.items():
            parameter.data = data
