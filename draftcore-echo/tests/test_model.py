"""What is this draft's own; what every algorithm must do is in test_conformance.py."""

import pytest
import torch
from draftcore.records import DraftBatch
from torch import Tensor
from torch.nn import functional

from draftcore_echo import model
from draftcore_echo.model import ChainDraft

ROWS, TOKENS, WIDTH, VOCABULARY = 2, 9, 8, 20


@pytest.fixture
def draft() -> ChainDraft:
    torch.manual_seed(1)
    embedding, head = torch.randn(2, VOCABULARY, WIDTH, dtype=torch.float64)
    return ChainDraft(12, 3, 0.5, embedding, head).double()


@pytest.fixture
def batch() -> DraftBatch:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
    mask = torch.rand(ROWS, TOKENS, generator=generator) < 0.6
    hidden = torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return DraftBatch((), tokens, mask, torch.ones_like(mask), {"last_hidden": hidden})


def test_the_loss_is_its_definition_written_out(draft: ChainDraft, batch: DraftBatch) -> None:
    assert draft.head is not None
    numerator, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for row, tokens in enumerate(batch.token_ids_BT):
        for start in range(TOKENS):
            state: Tensor = batch.features["last_hidden"][row, start]
            for k in range(1, draft.steps + 1):
                if start + k + 1 >= TOKENS:
                    break
                state = draft.cell(state, draft.embedding[tokens[start + k]])
                label = tokens[start + k + 1]
                weight = 0.5 ** (k - 1) * bool(batch.loss_mask_BT[row, start + k + 1])
                numerator += weight * functional.cross_entropy(draft.head @ state, label)
                denominator += weight
    output = draft(batch)
    torch.testing.assert_close(output.numerator, numerator)  # fp64: 1e-7 relative
    assert float(output.denominator) == pytest.approx(denominator)


def test_slices_change_nothing_but_memory(
    draft: ChainDraft, batch: DraftBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = draft(batch).numerator
    monkeypatch.setattr(model, "SLICE", 3)
    torch.testing.assert_close(draft(batch).numerator, whole)
