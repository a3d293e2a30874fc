"""The reference decoder: DFlash's block forward, then token by token through the causal head.

The first proposal is the base logits' own; from the second on, the GRU has read the last known
token and all proposals so far, and its correction is added. Only the head is sequential.

Shape letters: B batch, K drafts, S rows of a block, V vocabulary.
"""

from __future__ import annotations

import torch
from draftcore_dflash.drafter import DFlashDrafter, DraftState
from draftcore_nn.decoding import Choice, chain, choose
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore_domino.model import DominoDraft


class DominoDrafter(DFlashDrafter):
    """Decodes with a Domino draft; see `contracts.algorithm.Drafter`."""

    draft: DominoDraft

    @torch.inference_mode()
    def propose(
        self, state: DraftState, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        """Draft K tokens a row; with a temperature also the distribution each was drawn from."""
        draft, config = self.draft, self.draft.config
        hidden_BKH = self.block_hidden(state)[:, config.first_row :][:, : self.num_drafts]
        logits_BKV = hidden_BKH @ draft.head.T
        token_B, choices = state.last_B, list[Choice]()
        memory: Tensor | None = None
        for k in range(self.num_drafts):
            states_B1G, memory = draft.read(token_B[:, None], memory)
            logits_BV = logits_BKV[:, k]
            if k >= config.pure_draft_prefix_len:
                low_BE = draft.low_rank(hidden_BKH[:, k], states_B1G[:, 0])
                logits_BV = logits_BV + draft.up(low_BE)
            choices.append(choose(logits_BV, temperature, generator))
            token_B, _ = choices[-1]
        return chain(choices)
