"""The reference decoder: no cache, one hidden state per row.

When a round begins, the newest token has been chosen by the target but not read by it, so the last
state that is known is that of the token before the newest, at position t. The newest token is t+1:
what the target's own head says of that state. Head i says t+2+i, so the K heads draft the K tokens
after the newest, and training (see `model`) asks exactly that of them.

Shape letters: B batch, K heads and drafts, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from draftcore_nn.decoding import at, choose, select_rows
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore.contracts.capture import FeatureRequest
from draftcore_medusa.model import MedusaDraft


@dataclass
class DraftState:
    """The target's last hidden state of each row's newest token but one."""

    hidden_BH: Tensor


class MedusaDrafter:
    """Decodes with a draft in its own dtype and on its own device; see `contracts.algorithm.Drafter`."""

    def __init__(self, draft: MedusaDraft, request: FeatureRequest) -> None:
        self.draft, self.request = draft, request
        self.num_drafts = draft.config.num_heads

    @torch.inference_mode()
    def allocate(self, batch: int, max_len: int) -> DraftState:
        weight = next(self.draft.parameters())
        return DraftState(weight.new_zeros(batch, self.draft.config.hidden_size))

    @torch.inference_mode()
    def prefill(
        self,
        state: DraftState,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:
        """Keep the state of each prompt's last token; the next token is the newest."""
        state.hidden_BH.copy_(at(features["last_hidden"], lengths_B - 1))

    @torch.inference_mode()
    def propose(
        self, state: DraftState, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        """Draft K tokens a row; with a temperature also their distributions over the vocabulary.

        The tokens of a round are drawn independently. Proposing changes nothing in the state.
        """
        return Proposal(*choose(self.draft.logits(state.hidden_BH), temperature, generator))

    @torch.inference_mode()
    def accept(
        self,
        state: DraftState,
        tokens_BK: Tensor,
        features: Mapping[str, Tensor],
        counts_B: Tensor,
    ) -> None:
        """Keep the state of the last draft that was accepted; the target's own token is the newest.

        The target read the old newest token and then the drafts: of counts_B new tokens, the one
        before the last was read at index counts_B - 1.
        """
        state.hidden_BH.copy_(at(features["last_hidden"], counts_B - 1))

    select = staticmethod(select_rows)
