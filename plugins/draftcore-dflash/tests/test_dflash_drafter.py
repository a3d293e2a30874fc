"""The cached decoder against training's own forward."""

from typing import Any

import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.model import Backbone
from draftcore_dflash.options import DFlashOptions
from draftcore_sdk.algorithm_checks import ragged_rounds
from draftcore_sdk.algorithm_fixtures import MakeDraft
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

VOCAB = 270


def trained(draft: Draft, tokens_T: Tensor, features: dict[str, Tensor]) -> Tensor:
    """Logits [S, V] of the block at the last token, by training's forward."""
    module, anchor = draft.module, len(tokens_T) - 1
    assert isinstance(module, Backbone)
    # The anchor's own features are never seen.
    read = {name: torch.cat([x, torch.full_like(x[:1], 1e3)]) for name, x in features.items()}
    sample = Sample(SampleId("", 1), tokens_T, torch.ones(anchor + 1).bool(), read)
    blocks = Blocks.of(torch.tensor([[anchor]]), torch.tensor([[True]]))
    with torch.no_grad():
        hidden = module.block_hidden(DFlash(DFlashOptions()).collate([sample]), blocks)[0]
        return hidden @ module.head.T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 3},
        {"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")},
        {"is_causal": True, "num_key_value_heads": 1, "head_dim": 12},
    ],
    ids=str,
)
def test_proposals_equal_training_over_ragged_rounds(
    options: dict[str, Any], make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft = make_draft(**options)
    drafter = DFlash(DFlashOptions(block_size=4)).drafter(draft, target.load_model())
    for tokens_T, features, greedy_K, _, probs_KV in ragged_rounds(drafter, VOCAB, 1.0):
        logits_KV = trained(draft, tokens_T, features)[1:]
        assert greedy_K.tolist() == logits_KV.argmax(-1).tolist()
        torch.testing.assert_close(probs_KV, logits_KV.softmax(-1), rtol=1e-9, atol=1e-12)


def test_a_block_drafts_no_more_than_it_holds(make_draft: MakeDraft, target: TargetSpec) -> None:
    with pytest.raises(UsageError, match="a block of 4 drafts 3 tokens"):
        DFlash(DFlashOptions(block_size=4, num_drafts=4)).drafter(make_draft(), target.load_model())
