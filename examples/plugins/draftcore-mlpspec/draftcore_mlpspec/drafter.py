"""The reference decoders. A row's whole memory is one state and one token: there is no KV cache.

When a round begins, the target has chosen the newest token x from its state h, and has not read it:
head 0 goes on from h and x. After the round the target's own state takes the place of the draft's.

Shape letters: B batch, T tokens, K drafted nodes, N nodes of a level, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from draftcore_nn.decoding import Choice, at, chain, choose, select_rows
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore.contracts.capture import FeatureRequest
from draftcore_mlpspec.model import MlpSpecDraft


@dataclass
class State:
    """The newest token of each row, and the target's state that chose it."""

    hidden_BH: Tensor
    token_B: Tensor


class ChainDrafter:
    """Drafts one token per head; see `contracts.algorithm.Drafter`."""

    def __init__(self, draft: MlpSpecDraft, request: FeatureRequest) -> None:
        self.draft, self.request = draft, request
        self.num_drafts = draft.shape.num_heads

    @torch.inference_mode()
    def allocate(self, batch: int, max_len: int) -> State:
        first_DH = self.draft.first
        token_B = torch.zeros(batch, dtype=torch.long, device=first_DH.device)
        return State(first_DH.new_zeros(batch, first_DH.shape[1]), token_B)

    @torch.inference_mode()
    def prefill(
        self, state: State, tokens_BT: Tensor, lengths_B: Tensor, features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:  # fmt: skip
        """Keep each prompt's last state, and the token that the target chose from it."""
        state.hidden_BH.copy_(at(features["last_hidden"], lengths_B - 1))
        state.token_B.copy_(next_B)

    @torch.inference_mode()
    def propose(
        self, state: State, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        hidden_BD, token_B = self.draft.enter(state.hidden_BH), state.token_B
        choices: list[Choice] = []
        for head in range(self.num_drafts):
            hidden_BD = self.draft.step(head, hidden_BD, token_B)
            choices.append(choose(self.draft.logits(head, hidden_BD), temperature, generator))
            token_B, _ = choices[-1]
        return chain(choices)

    @torch.inference_mode()
    def accept(
        self, state: State, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        """Keep the last token that counts; the features at its place are those that chose it."""
        state.hidden_BH.copy_(at(features["last_hidden"], counts_B - 1))
        state.token_B.copy_(at(tokens_BK, counts_B - 1))

    select = staticmethod(select_rows)


class TreeDrafter(ChainDrafter):
    """Drafts a tree: head i gives each node of its level `branches[i]` children, the best ones.

    With a temperature, children are drawn without replacement: a child's distribution is the head's
    without the children before it.
    """

    def __init__(self, draft: MlpSpecDraft, request: FeatureRequest, branches: list[int]) -> None:
        super().__init__(draft, request)
        self.branches, self.depth = branches, len(branches)
        parents, level = list[int](), [-1]
        for count in branches:  # first children of a level, then second ones, ...
            first = len(parents)
            parents += level * count
            level = list(range(first, len(parents)))
        self.num_drafts = len(parents)
        self.parents_K = torch.tensor(parents, device=draft.first.device)

    @torch.inference_mode()
    def propose(
        self, state: State, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        hidden_BND = self.draft.enter(state.hidden_BH)[:, None]
        token_BN, nodes = state.token_B[:, None], list[Choice]()
        for head, count in enumerate(self.branches):
            hidden_BND = self.draft.step(head, hidden_BND, token_BN)
            logits_BNV = self.draft.logits(head, hidden_BND)
            for _ in range(count):
                nodes.append(choose(logits_BNV, temperature, generator))
                logits_BNV = logits_BNV.scatter(-1, nodes[-1][0][..., None], -torch.inf)
            token_BN = torch.cat([token_BN for token_BN, _ in nodes[-count:]], 1)
            hidden_BND = hidden_BND.repeat(1, count, 1)
        tokens_BK = torch.cat([token_BN for token_BN, _ in nodes], 1)
        probs = [probs_BNV for _, probs_BNV in nodes if probs_BNV is not None]
        probs_BKV = torch.cat(probs, 1) if probs else None
        return Proposal(tokens_BK, probs_BKV, self.parents_K.expand_as(tokens_BK))
