"""The reference decoder. The draft's whole memory is one state and one token per row: no KV cache.

After a round the target's own state takes the place of the draft's, so errors do not add up.

Shape letters: B batch, T tokens, H hidden, V vocabulary, K drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from draftcore.records import FeatureRequest
from torch import Tensor
from torch.nn import functional

from draftcore_echo.model import ChainDraft


@dataclass
class DraftState:
    """The last token of each row, and the target's state that wrote it."""

    state_BH: Tensor
    token_B: Tensor


class ChainDrafter:
    """Decodes with a draft in its own dtype and on its own device; see `records.Drafter`."""

    def __init__(self, draft: ChainDraft, num_drafts: int, dtype: str) -> None:
        self.draft, self.num_drafts = draft, num_drafts
        self.request = FeatureRequest(layers=(), last_hidden=True, dtype=dtype)

    @torch.inference_mode()
    def allocate(self, batch: int, max_len: int) -> DraftState:
        """Return buffers of fixed shape, which prefill and accept write in place."""
        weight = self.draft.cell.down.weight
        token_B = torch.zeros(batch, dtype=torch.long, device=weight.device)
        return DraftState(weight.new_zeros(batch, weight.shape[0]), token_B)

    @torch.inference_mode()
    def prefill(
        self,
        state: DraftState,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:
        """Start from right-padded prompts: the last state of each, and the token that it wrote."""
        state.state_BH.copy_(_row(self.draft.enter(features), lengths_B - 1))
        state.token_B.copy_(next_B)

    @torch.inference_mode()
    def propose(
        self, state: DraftState, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Draft K tokens a row; with a temperature also their distributions [B, K, V].

        Nothing here waits for the device, and the state is left as it is.
        """
        state_BH, token_B, head_VH = state.state_BH, state.token_B, self.draft.head_weight()
        tokens, probs = [], []
        for _ in range(self.num_drafts):
            state_BH = self.draft.cell(state_BH, self.draft.embed(token_B))
            logits_BV = functional.linear(state_BH, head_VH)
            token_B, probs_BV = choose(logits_BV, temperature, generator)
            tokens.append(token_B)
            probs += [] if probs_BV is None else [probs_BV]
        return torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None

    @torch.inference_mode()
    def accept(
        self,
        state: DraftState,
        tokens_BK: Tensor,
        features: Mapping[str, Tensor],
        counts_B: Tensor,
    ) -> None:
        """Go on from the last token that counts: features at a place are those that wrote it."""
        state.state_BH.copy_(_row(self.draft.enter(features), counts_B - 1))
        state.token_B.copy_(tokens_BK.gather(1, counts_B[:, None] - 1)[:, 0])

    @torch.inference_mode()
    def select(self, state: DraftState, rows_B: Tensor) -> DraftState:
        return DraftState(state.state_BH[rows_B], state.token_B[rows_B])


def choose(
    logits_BV: Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None]:
    """Pick a token per row; when sampling, also return the distributions it was drawn from."""
    if temperature <= 0:
        return logits_BV.argmax(-1), None
    exact = torch.promote_types(logits_BV.dtype, torch.float32)
    probs_BV = (logits_BV / temperature).softmax(-1, dtype=exact)
    # The first arrival of exponential clocks; torch.multinomial checks its input on the host.
    clocks_BV = torch.empty_like(probs_BV).exponential_(generator=generator)
    return (probs_BV / clocks_BV.clamp_min(torch.finfo(exact).tiny)).argmax(-1), probs_BV


def _row(hidden_BTH: Tensor, index_B: Tensor) -> Tensor:
    """Take one position of each row, [B, H]."""
    index_B1H = index_B[:, None, None].expand(-1, 1, hidden_BTH.shape[-1])
    return hidden_BTH.gather(1, index_B1H)[:, 0]
