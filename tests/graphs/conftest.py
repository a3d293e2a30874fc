"""A tiny target, and a drafter that needs no training and keeps to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetModel
from draftcore.target import TransformersModel, TransformersTarget

PROMPTS = [[5, 9, 5, 9, 5], list(range(40, 60)), [7], [11, 12, 13, 11, 12, 13, 11]]


@dataclass
class Followed:
    """Per row what followed each token, and the last token."""

    table_BV: Tensor
    last_B: Tensor


class FollowDrafter:
    """Proposes what followed a token before, plus the weight of `shift`, by which it can be moved."""

    def __init__(self, vocabulary: int, num_drafts: int = 4) -> None:
        self.vocabulary, self.num_drafts = vocabulary, num_drafts
        self.request = FeatureRequest((1,), True, "float32")
        self.module = nn.Module()
        self.module.shift = nn.Parameter(torch.zeros(1))

    def allocate(self, batch: int, max_len: int) -> Followed:
        table_BV = torch.zeros(batch, self.vocabulary, dtype=torch.long)
        return Followed(table_BV, torch.zeros(batch, dtype=torch.long))

    def prefill(
        self,
        state: Followed,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:
        for at in range(tokens_BT.shape[1]):
            inside_B = at < lengths_B
            last_B = at == lengths_B - 1
            follows_B = tokens_BT[:, min(at + 1, tokens_BT.shape[1] - 1)]
            self._note(state, tokens_BT[:, at], torch.where(last_B, next_B, follows_B), inside_B)
        state.last_B = next_B.clone()

    def propose(
        self, state: Followed, temperature: float = 0.0, generator: Any = None
    ) -> tuple[Tensor, None]:
        token_B, drafts = state.last_B, []
        for _ in range(self.num_drafts):
            token_B = state.table_BV.gather(1, token_B[:, None])[:, 0]
            drafts.append((token_B + self.module.shift.long()) % self.vocabulary)
        return torch.stack(drafts, 1), None

    def accept(
        self, state: Followed, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        before_B = state.last_B
        for at in range(tokens_BK.shape[1]):
            new_B = at < counts_B
            self._note(state, before_B, tokens_BK[:, at], new_B)
            before_B = torch.where(new_B, tokens_BK[:, at], before_B)
        state.last_B = before_B

    def select(self, state: Followed, rows_B: Tensor) -> Followed:
        return Followed(state.table_BV[rows_B], state.last_B[rows_B])

    def _note(self, state: Followed, a_B: Tensor, b_B: Tensor, valid_B: Tensor) -> None:
        old_B = state.table_BV.gather(1, a_B[:, None])[:, 0]
        state.table_BV.scatter_(1, a_B[:, None], torch.where(valid_B, b_B, old_B)[:, None])


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetModel:
    return TransformersModel(TransformersTarget(str(target_folder), device="cpu"))


@pytest.fixture
def drafter(target: TargetModel) -> FollowDrafter:
    return FollowDrafter(target.spec.vocab_size)


@pytest.fixture
def prompts() -> list[list[int]]:
    return PROMPTS
