"""The reference decoder: DFlash's block forward, then a walk over the best tokens of its rows.

A row's candidates are scored given the token that was chosen in the row before, the first by the last
known token. Greedily the best score is taken, of equal ones the candidate with the larger logit; with a
temperature a candidate is drawn, and the distribution it was drawn from is 0 elsewhere.

Shape letters: B batch, D drafts, K candidates, H hidden, E rank, V vocabulary.
"""

from __future__ import annotations

import torch
from draftcore_dflash.drafter import DFlashDrafter, DraftState
from draftcore_nn.decoding import Choice, chain, choose
from torch import Tensor
from torch.nn import functional

from draftcore.contracts.algorithm import Proposal
from draftcore_dflash2.model import DFlash2Draft
from draftcore_dflash2.selector import score


class DFlash2Drafter(DFlashDrafter):
    """Decodes with a DFlash2 draft; see `contracts.algorithm.Drafter`."""

    draft: DFlash2Draft

    @torch.inference_mode()
    def propose(
        self, state: DraftState, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        """Draft D tokens a row; with a temperature also the distribution each was drawn from."""
        selector = self.draft.candidate_selector
        hidden_BDH = self.block_hidden(state)[:, 1 : self.num_drafts + 1]
        logits_BDV = hidden_BDH @ self.draft.head.T
        unary_BDK, ids_BDK = logits_BDV.topk(self.draft.config.selector_top_k)
        next_BDKE = functional.embedding(ids_BDK, selector.successor_codebook)
        token_B, choices = state.last_B, list[Choice]()
        for k in range(self.num_drafts):
            query_BE = selector.query(hidden_BDH[:, k], token_B)
            scores_BK = score(unary_BDK[:, k], query_BE, next_BDKE[:, k])
            place_B, probs_BK = choose(scores_BK, temperature, generator)
            token_B = ids_BDK[:, k].gather(1, place_B[:, None])[:, 0]
            choices.append((token_B, _among_all(probs_BK, ids_BDK[:, k], logits_BDV[:, k])))
        return chain(choices)


def _among_all(probs_BK: Tensor | None, ids_BK: Tensor, like_BV: Tensor) -> Tensor | None:
    """Lay the probabilities of candidates out over the vocabulary."""
    if probs_BK is None:
        return None
    return torch.zeros_like(like_BV, dtype=probs_BK.dtype).scatter(1, ids_BK, probs_BK)
