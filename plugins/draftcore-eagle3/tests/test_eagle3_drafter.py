"""The cached decoder against training's own unrolled steps, fed the decoder's drafts."""

from typing import Any

import pytest
import torch
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.loss import Rows
from draftcore_eagle3.model import Eagle3Draft
from draftcore_eagle3.options import Eagle3Options
from draftcore_sdk.algorithm_fixtures import MakeDraft
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec

WIDTH, VOCAB, LAYERS, DRAFTS = 32, 48, (1, 3, 4), 4


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
    """Of rows of several lengths, of which some are accepted more often than others."""
    generator, draft = torch.Generator().manual_seed(5), make_draft(ttt_length=DRAFTS, **options)
    tokens_BT = torch.randint(VOCAB, (3, 40), generator=generator)
    hidden = torch.randn(3, 3, 40, WIDTH, generator=generator, dtype=torch.float64)
    features = {f"hidden.{layer}": x for layer, x in zip(LAYERS, hidden, strict=True)}
    rows_B, at_B = torch.arange(3), torch.tensor([7, 4, 9])

    drafter = Eagle3(Eagle3Options(num_drafts=DRAFTS)).drafter(draft, target.model)
    state = drafter.allocate(3, 50)
    known = {name: x[:, : int(at_B.max())] for name, x in features.items()}
    drafter.prefill(state, tokens_BT[:, : int(at_B.max())], at_B, known, tokens_BT[rows_B, at_B])
    for accepted in ([0, 2, 4], [4, 4, 0], [1, 0, 3], [4, 4, 4]):
        drafts_BK = drafter.propose(state).tokens_BK
        sampled = drafter.propose(state, 0.7, torch.Generator().manual_seed(0))
        assert sampled.probs_BKV is not None
        for row, at in enumerate(at_B.tolist()):
            seen = tokens_BT[row, : at + 1], {name: x[row, :at] for name, x in features.items()}
            greedy = teacher_forced(draft, *seen, drafts_BK[row])
            assert drafts_BK[row].tolist() == greedy.argmax(-1).tolist()
            sharp = teacher_forced(draft, *seen, sampled.tokens_BK[row]) ** (1 / 0.7)
            expected = sharp / sharp.sum(-1, keepdim=True)
            torch.testing.assert_close(sampled.probs_BKV[row], expected, rtol=1e-9, atol=1e-12)
        read = at_B[:, None] + torch.arange(DRAFTS + 1)
        new = {name: x[rows_B[:, None], read] for name, x in features.items()}
        drafter.accept(state, tokens_BT[rows_B[:, None], read + 1], new, torch.tensor(accepted) + 1)
        at_B = at_B + torch.tensor(accepted) + 1
