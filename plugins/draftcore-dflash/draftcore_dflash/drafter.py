"""The reference decoder: one forward over a masked block per round, over a preallocated KV cache.

The cache holds keys and values of the *context*, one slot per position and layer, made from the
target's features as soon as a round is verified; the last known token is not in it, its block is.
Slots at and after a row's anchor hold leftovers, see `draftcore_nn.cache`.

Shape letters: B batch, K drafts, S rows of a block, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from draftcore_nn.cache import CachedState, KeysValues, Rows, empty_slots
from draftcore_nn.decoding import at, choose, select_rows
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore.contracts.capture import FeatureRequest
from draftcore.errors import UsageError
from draftcore_dflash.model import Backbone


@dataclass
class DraftState(CachedState):
    """A batch being decoded: the context's slots, each row's last token and its position."""

    last_B: Tensor
    anchor_B: Tensor


class DFlashDrafter:
    """Decodes with a draft in its own dtype and on its own device; see `contracts.algorithm.Drafter`.

    Raises UsageError for more drafts per round than a block has masked rows.
    """

    def __init__(self, draft: Backbone, num_drafts: int | None, dtype: str) -> None:
        self.draft, most = draft, draft.config.block_size - 1
        self.num_drafts = num_drafts or most
        if self.num_drafts > most:
            raise UsageError(
                f"num_drafts {num_drafts} was asked for, a block of {most + 1} drafts {most} tokens\n"
                f"  set num_drafts to at most {most}"
            )
        self.request = FeatureRequest(draft.config.layers, last_hidden=False, dtype=dtype)

    @torch.inference_mode()
    def allocate(self, batch: int, max_len: int) -> DraftState:
        config, weight = self.draft.config, self.draft.fc.weight
        slots = max_len + self.num_drafts + 1
        numbers = torch.zeros(batch, dtype=torch.long, device=weight.device)
        cache = empty_slots(config, len(config.layer_types), batch, slots, weight)
        return DraftState(*cache, numbers, numbers.clone())

    @torch.inference_mode()
    def prefill(
        self, state: DraftState, tokens_BT: Tensor, lengths_B: Tensor, features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:  # fmt: skip
        """Fill the cache from right-padded prompts; the next token is the first anchor."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        self._extend(state, features, positions_T.expand_as(tokens_BT))
        state.last_B.copy_(next_B)
        state.anchor_B.copy_(lengths_B)

    @torch.inference_mode()
    def propose(
        self, state: DraftState, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        """Draft K tokens a row; with a temperature also their distributions over the vocabulary.

        The tokens of a round are drawn independently. Proposing changes nothing in the state.
        """
        hidden_BSH = self.block_hidden(state)
        logits_BKV = hidden_BSH[:, 1 : self.num_drafts + 1] @ self.draft.head.T
        return Proposal(*choose(logits_BKV, temperature, generator))

    @torch.inference_mode()
    def accept(
        self, state: DraftState, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        """Add the verified round to the context; its last token is the next anchor."""
        offsets_K = torch.arange(tokens_BK.shape[1], device=tokens_BK.device)
        self._extend(state, features, state.anchor_B[:, None] + offsets_K)
        state.last_B.copy_(at(tokens_BK, counts_B - 1))
        state.anchor_B.add_(counts_B)

    select = staticmethod(select_rows)

    def block_hidden(self, state: DraftState) -> Tensor:
        """Run every row's masked block over its context; returns normed states [B, S, H]."""
        draft, config = self.draft, self.draft.config
        hidden_BSH = draft.embed(draft.masked_block(state.last_B))
        offsets_S = torch.arange(config.block_size, device=state.anchor_B.device)
        positions_BS = state.anchor_B[:, None] + offsets_S
        rows = {
            kind: state.rows(
                draft.rotary, positions_BS, block=True, window=config.window(kind),
                causal=config.causal(kind),
            )
            for kind in set(config.layer_types)
        }  # fmt: skip
        for index, (layer, kind) in enumerate(draft.typed_layers()):

            def attend(
                query: Tensor, own: KeysValues, index: int = index, seen: Rows = rows[kind]
            ) -> Tensor:
                return state.attend(index, query, seen, own)

            hidden_BSH = layer.run(hidden_BSH, rows[kind].angles, attend)
        return draft.norm(hidden_BSH)  # type: ignore[no-any-return]

    def _extend(
        self, state: DraftState, features: Mapping[str, Tensor], positions_BT: Tensor
    ) -> None:
        """Write the context's keys and values at their positions, in every layer."""
        context_BTH = self.draft.context(features)
        angles = self.draft.rotary(positions_BT)
        for index, (layer, _) in enumerate(self.draft.typed_layers()):
            key_values = layer.self_attn.keys_values(context_BTH, angles)
            state.write(index, key_values, positions_BT)
