"""The reference decoder: all drafts of a round from one forward over pending rows and masks.

Rows are EAGLE-3's, see `draftcore_eagle3.drafter`. Behind the rows that the target verified stand masks, at
the next positions: the last known row and those write a token each, independently. Slots of masks hold
leftovers once the round is over.

Shape letters: B batch, P pending rows (num_drafts + 1), K drafts, R = 2K rows of a round, H hidden.
"""

from __future__ import annotations

import torch
from draftcore_eagle3.drafter import DraftState, Eagle3Drafter
from torch.nn import functional

from draftcore.contracts.algorithm import Proposal
from draftcore.errors import UsageError
from draftcore_peagle.model import PEagleDraft


class PEagleDrafter(Eagle3Drafter):
    """Decodes with a P-EAGLE draft; see `contracts.algorithm.Drafter`.

    Raises UsageError for more drafts per round than the draft has depths.
    """

    draft: PEagleDraft

    def __init__(self, draft: PEagleDraft, num_drafts: int | None, dtype: str) -> None:
        most = draft.options.num_depths
        super().__init__(draft, num_drafts or most, dtype)
        if self.num_drafts > most:
            raise UsageError(
                f"num_drafts {num_drafts} was asked for, and {most} depths were trained\n"
                f"  set num_drafts to at most {most}, or train with a larger num_depths"
            )

    @torch.inference_mode()
    def allocate(self, batch: int, max_len: int) -> DraftState:
        return super().allocate(batch, max_len + self.num_drafts - 1)

    @torch.inference_mode()
    def propose(
        self, state: DraftState, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        """Draft K tokens a row; with a temperature also their distributions over the target's V.

        These are zero outside the draft vocabulary. Proposing changes only leftovers.
        """
        more, device = self.num_drafts - 1, state.start_B.device
        row_R = torch.arange(2 * self.num_drafts, device=device)
        known_BR = row_R < state.counts_B[:, None]
        tokens_BR = functional.pad(state.tokens_BP, (0, more))
        tokens_BR = tokens_BR.where(known_BR, self.draft.config.mask_token_id)
        hidden_BRH = functional.pad(state.hidden_BPH, (0, 0, 0, more))
        hidden_BRH = hidden_BRH.where(known_BR[..., None], self.draft.masked())
        output_BRH = self.run(state, tokens_BR, hidden_BRH, state.start_B[:, None] + row_R)
        last_B1 = (state.counts_B - 1).clamp_min(0)[:, None]
        rows_BK = torch.arange(len(last_B1), device=device)[:, None], last_B1 + row_R[: more + 1]
        normed_BKH = self.draft.norm(output_BRH[rows_BK])
        return Proposal(*self.choose(normed_BKH, temperature, generator))
