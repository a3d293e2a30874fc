"""The reference decoder: DFlash's block forward, then token by token through the Markov head.

Shape letters: B batch, K drafts, H hidden, E rank of the correction, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from draftcore_dflash.drafter import DFlashDrafter, DraftState
from draftcore_nn.decoding import Choice, chain, choose
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore.errors import UsageError
from draftcore_dspark.model import DSparkDraft


class DSparkDrafter(DFlashDrafter):
    """Decodes with a DSpark draft; see `contracts.algorithm.Drafter`.

    With a `threshold`, drafts that are reached less probably do not count. Whether one does depends
    on the tokens before it, so that sampling stays exact. Raises UsageError for more drafts per
    round than a block has rows.
    """

    draft: DSparkDraft
    threshold = 0.0

    def __init__(self, draft: DSparkDraft, num_drafts: int | None, dtype: str) -> None:
        super().__init__(draft, None, dtype)
        most = draft.config.block_size
        self.num_drafts = num_drafts or most
        if self.num_drafts > most:
            raise UsageError(
                f"num_drafts {num_drafts} was asked for, a block of {most} rows drafts {most} tokens\n"
                f"  set num_drafts to at most {most}"
            )

    @torch.inference_mode()
    def propose(
        self, state: DraftState, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        """Draft K tokens a row; with a temperature also the distribution each was drawn from."""
        head, hidden_BKH = self.draft.markov_head, self.block_hidden(state)[:, : self.num_drafts]
        logits_BKV = hidden_BKH @ self.draft.head.T
        token_B, choices, read = state.last_B, list[Choice](), list[Tensor]()
        memory_BE = hidden_BKH.new_zeros(len(token_B), self.draft.config.markov_rank)
        for k, hidden_BH in enumerate(hidden_BKH.unbind(1)):
            read.append(head.embed(token_B, hidden_BH.dtype))
            factor_BE, memory_BE = head.step(read[-1], hidden_BH, memory_BE)
            logits_BV = logits_BKV[:, k] + head.markov_w2(factor_BE)
            choices.append(choose(logits_BV, temperature, generator))
            token_B, _ = choices[-1]
        proposal = chain(choices)
        if not self.threshold:
            return proposal
        assert self.draft.confidence_head is not None
        chance_BK = self.draft.confidence_head(hidden_BKH, torch.stack(read, 1)).sigmoid()
        counts_B = (chance_BK.cumprod(1) >= self.threshold).sum(1)
        return replace(proposal, counts_B=counts_B)
