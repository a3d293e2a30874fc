"""The reference decoder: a chain of greedy or sampled drafts over a preallocated KV cache.

Row t of a sequence is (features of token t, token t+1) and lives at position t, which is also its
cache slot. A round extends the cache by the rows that the target verified (`pending`) and drafts
from the last of them; draft rows write the slots after it, using the draft's own state for the
features nobody has yet. Those slots, and those of pending rows past a row's count, hold leftovers
until a later row overwrites them, see `draftcore_nn.cache`.

Shape letters: B batch, P pending rows (num_drafts + 1), K drafts, H hidden, U draft and V target
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from draftcore_nn.cache import CachedState, empty_slots
from draftcore_nn.decoding import Choice, at, chain, choose, select_rows
from draftcore_nn.vocabulary import over_target
from torch import Tensor
from torch.nn import functional

from draftcore.contracts.algorithm import Proposal
from draftcore.contracts.capture import FeatureRequest
from draftcore_eagle3.model import Backbone, FirstLayer


@dataclass
class DraftState(CachedState):
    """A batch being decoded.

    hidden_BPH, tokens_BP: pending rows, of which the first counts_B are valid; row 0 is at position
    start_B.
    """

    hidden_BPH: Tensor
    tokens_BP: Tensor
    start_B: Tensor
    counts_B: Tensor


class NormedResidual(FirstLayer):
    """The layer as other EAGLE-3 drafts have it, which is not how ours are trained."""

    def finish(self, hidden_H: Tensor, attended_AD: Tensor) -> Tensor:
        return super().finish(self.hidden_norm(hidden_H), attended_AD)


class Eagle3Drafter:
    """Decodes with a draft in its own dtype and on its own device; see `contracts.algorithm.Drafter`."""

    def __init__(self, draft: Backbone, num_drafts: int, dtype: str) -> None:
        self.draft, self.num_drafts = draft, num_drafts
        self.request = FeatureRequest(draft.config.layers, last_hidden=False, dtype=dtype)

    @torch.inference_mode()
    def allocate(self, batch: int, max_len: int) -> DraftState:
        config, weight = self.draft.config, next(self.draft.parameters())
        rows, slots = self.num_drafts + 1, max_len + self.num_drafts + 1
        numbers = torch.zeros(batch, rows, dtype=torch.long, device=weight.device)
        return DraftState(
            *empty_slots(config, config.num_layers, batch, slots, weight),
            hidden_BPH=weight.new_zeros(batch, rows, config.hidden_size),
            tokens_BP=numbers,
            start_B=numbers[:, 0].clone(),
            counts_B=numbers[:, 0].clone(),
        )

    @torch.inference_mode()
    def prefill(
        self, state: DraftState, tokens_BT: Tensor, lengths_B: Tensor, features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:  # fmt: skip
        """Fill the cache from right-padded prompts; the last row stays pending."""
        last_B = lengths_B - 1
        next_B1, last_B1 = next_B[:, None], last_B[:, None]
        tokens_BT = functional.pad(tokens_BT[:, 1:], (0, 1)).scatter(1, last_B1, next_B1)
        hidden_BTH = self.draft.combine(features)
        positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        self.run(state, tokens_BT, hidden_BTH, positions_BT.expand_as(tokens_BT))
        state.tokens_BP[:, 0] = next_B
        state.hidden_BPH[:, 0] = at(hidden_BTH, last_B)
        state.start_B.copy_(last_B)
        state.counts_B.fill_(1)

    @torch.inference_mode()
    def propose(
        self, state: DraftState, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        """Draft K tokens a row; with a temperature also their distributions over the target's V.

        The distributions are zero outside the draft vocabulary. Proposing changes only leftovers,
        so it may be repeated.
        """
        offsets_P = torch.arange(self.num_drafts + 1, device=state.start_B.device)
        positions_BP = state.start_B[:, None] + offsets_P
        output_BPH = self.run(state, state.tokens_BP, state.hidden_BPH, positions_BP)
        last_B = (state.counts_B - 1).clamp_min(0)
        position_B1 = (state.start_B + last_B)[:, None]
        normed_BH, hidden_BH = self.draft.head_and_feedback(at(output_BPH, last_B))
        choices = [self.choose(normed_BH, temperature, generator)]
        for step in range(1, self.num_drafts):
            token_B, _ = choices[-1]
            rows_B1 = token_B[:, None], hidden_BH[:, None], position_B1 + step
            normed_BH, hidden_BH = self.draft.head_and_feedback(self.run(state, *rows_B1)[:, 0])
            choices.append(self.choose(normed_BH, temperature, generator))
        return chain(choices)

    @torch.inference_mode()
    def accept(
        self, state: DraftState, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        """Make the verified round pending, in place of the last."""
        state.start_B.add_(state.counts_B)
        state.tokens_BP.copy_(tokens_BK)
        state.hidden_BPH.copy_(self.draft.combine(features))
        state.counts_B.copy_(counts_B)

    select = staticmethod(select_rows)

    def mistakes(self) -> Iterator[tuple[str, str, Eagle3Drafter]]:
        """Yield what engines are known to compute otherwise, for `draftcore served`."""
        other = copy.deepcopy(self.draft)
        other.midlayer.__class__ = NormedResidual
        yield (
            "norm_before_residual: the residual takes the state after hidden_norm",
            "set norm_before_residual to false in what the engine reads",
            type(self)(other, self.num_drafts, self.request.dtype),
        )

    def run(self, state: DraftState, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Run rows [B, R] at their positions through the layers, writing their cache slots."""
        rows, embedding = state.rows(self.draft.rotary, positions), self.draft.embed(tokens)
        for index, layer in enumerate(self.draft.stack()):

            def attend(query: Tensor, *key_value: Tensor, index: int = index) -> Tensor:
                state.write(index, key_value, positions)
                return state.attend(index, query, rows)

            hidden = layer(embedding, hidden, rows.angles, attend)
        return hidden

    def choose(
        self, normed_H: Tensor, temperature: float, generator: torch.Generator | None
    ) -> Choice:
        """Pick target tokens [...] from final states [..., H], and their distributions [..., V]."""
        ids_U = self.draft.token_ids()
        choice, probs_U = choose(self.draft.lm_head(normed_H), temperature, generator)
        if ids_U is None:
            return choice, probs_U
        if probs_U is not None:
            probs_U = over_target(probs_U, ids_U, self.draft.config.vocab_size)
        return ids_U[choice], probs_U
