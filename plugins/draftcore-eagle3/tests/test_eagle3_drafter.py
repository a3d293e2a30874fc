"""The cached decoder against training's own unrolled steps, fed the decoder's drafts."""

from typing import Any

import pytest
import torch
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.loss import Rows
from draftcore_eagle3.model import Eagle3Draft
from draftcore_eagle3.options import Eagle3Options
from draftcore_sdk.algorithm_checks import ragged_rounds
from draftcore_sdk.algorithm_fixtures import WIDTH, MakeDraft
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec

VOCAB, DRAFTS = 48, 4


def teacher_forced(
    draft: Draft, tokens_T: Tensor, features: dict[str, Tensor], drafts_K: Tensor
) -> Tensor:
    """Probabilities of all drafts [K, V] by training: the row of the last features at each step."""
    module, row = draft.module, len(tokens_T) - 2  # the first draft's row reads the last token
    assert isinstance(module, Eagle3Draft)
    known = torch.cat([tokens_T, drafts_K])
    unseen = torch.zeros(len(known) - row - 1, WIDTH)
    named = {name: torch.cat([x, unseen]) for name, x in features.items()}
    sample = Sample(SampleId("", 1), known, torch.ones(len(known), dtype=torch.bool), named)
    batch = Eagle3(Eagle3Options()).collate([sample])
    every = Rows.of(torch.ones_like(batch.loss_mask_BT), DRAFTS)
    probs_KV = torch.zeros(len(drafts_K), VOCAB, dtype=torch.float64)
    ids = module.token_ids()
    for step, normed_NH in enumerate(module.unroll(batch, every)):
        found = module.lm_head(normed_NH[row]).softmax(-1)
        probs_KV[step, slice(None) if ids is None else ids] = found
    return probs_KV


@pytest.mark.parametrize(
    "options",
    [{"draft_vocab_size": 24}, {"norm_output": True}, {"fc_norm": True, "num_key_value_heads": 1}],
    ids=str,
)
@torch.no_grad()
def test_proposals_equal_training_over_ragged_rounds(
    options: dict[str, Any], make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft = make_draft(ttt_length=DRAFTS, **options)
    drafter = Eagle3(Eagle3Options(num_drafts=DRAFTS)).drafter(draft, target.load_model())
    for tokens_T, features, greedy_K, drawn_K, probs_KV in ragged_rounds(drafter, VOCAB, 0.7):
        greedy_KV = teacher_forced(draft, tokens_T, features, greedy_K)
        assert greedy_K.tolist() == greedy_KV.argmax(-1).tolist()
        sharp_KV = teacher_forced(draft, tokens_T, features, drawn_K) ** (1 / 0.7)
        expected_KV = sharp_KV / sharp_KV.sum(-1, keepdim=True)
        torch.testing.assert_close(probs_KV, expected_KV, rtol=1e-9, atol=1e-12)
