"""The causal decoder against one teacher-forced pass of training."""

import pytest
import torch
from draftcore_dflash.blocks import Blocks
from draftcore_domino.algorithm import Domino
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from draftcore_sdk.algorithm_checks import ragged_rounds
from draftcore_sdk.algorithm_fixtures import WIDTH, MakeDraft
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec


def teacher_forced(
    draft: Draft, tokens_T: Tensor, features: dict[str, Tensor], drafts_K: Tensor
) -> Tensor:
    """Logits of all proposals [K, V] by training's forward, with the drafts as true tokens."""
    module, anchor = draft.module, len(tokens_T) - 1
    assert isinstance(module, DominoDraft)
    known = torch.cat([tokens_T, drafts_K])
    unseen = torch.zeros(len(known) - anchor, WIDTH)
    named = {name: torch.cat([x, unseen]) for name, x in features.items()}
    sample = Sample(SampleId("", 1), known, torch.ones(len(known), dtype=torch.bool), named)
    batch = Domino(DominoOptions()).collate([sample])
    blocks = Blocks.of(torch.tensor([[anchor]]), torch.tensor([[True]]))
    with torch.no_grad():
        hidden = module.block_hidden(batch, blocks)
        correction = module.up(module.low_rank(hidden, module.prefix_states(batch, blocks)))
        correction[:, : module.config.first_corrected_row] = 0.0
        first = module.config.first_row
        return (hidden @ module.head.T + correction)[0, first : first + len(drafts_K)]


@pytest.mark.parametrize("shift", [True, False])
def test_proposals_equal_one_teacher_forced_pass_over_ragged_rounds(
    shift: bool, make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft = make_draft(shift_label=shift)
    drafter = Domino(DominoOptions(block_size=4)).drafter(draft, target.load_model())
    assert drafter.num_drafts == 3
    for tokens_T, features, greedy_K, drawn_K, probs_KV in ragged_rounds(drafter, 250, 0.5):
        logits_KV = teacher_forced(draft, tokens_T, features, greedy_K)
        assert greedy_K.tolist() == logits_KV.argmax(-1).tolist()
        expected_KV = (teacher_forced(draft, tokens_T, features, drawn_K) / 0.5).softmax(-1)
        torch.testing.assert_close(probs_KV, expected_KV, rtol=1e-9, atol=1e-12)
