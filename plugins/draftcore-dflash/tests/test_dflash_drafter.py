"""The cached decoder against training's own forward."""

from typing import Any

import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.model import Backbone
from draftcore_dflash.options import DFlashOptions
from draftcore_sdk.algorithm_fixtures import MakeDraft
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

WIDTH, VOCAB, LAYERS, DRAFTS = 32, 270, (1, 3, 4), 3


def trained(draft: Draft, tokens_T: Tensor, features: dict[str, Tensor]) -> Tensor:
    """Logits [S, V] of the block at the last token, by training's forward."""
    module, anchor = draft.module, len(tokens_T) - 1
    assert isinstance(module, Backbone)
    sample = Sample(SampleId("", 1), tokens_T, torch.ones(anchor + 1).bool(), features)
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
    """Of rows of several lengths, of which some are accepted more often than others."""
    generator, draft = torch.Generator().manual_seed(5), make_draft(**options)
    tokens_BT = torch.randint(VOCAB, (3, 30), generator=generator)
    shape = (len(LAYERS), 3, 30, WIDTH)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64)
    features = {f"hidden.{layer}": x for layer, x in zip(LAYERS, hidden, strict=True)}
    rows_B, at_B = torch.arange(3), torch.tensor([7, 1, 9])

    drafter = DFlash(DFlashOptions(block_size=DRAFTS + 1)).drafter(draft, target.model)
    state = drafter.allocate(3, 40)
    known = {name: x[:, : int(at_B.max())] for name, x in features.items()}
    drafter.prefill(state, tokens_BT[:, : int(at_B.max())], at_B, known, tokens_BT[rows_B, at_B])
    for accepted in ([3, 0, 1], [1, 2, 3], [0, 3, 2]):
        drafts_BK = drafter.propose(state).tokens_BK
        probs = drafter.propose(state, temperature=1.0).probs_BKV
        assert probs is not None
        for row, at in enumerate(at_B.tolist()):
            # The anchor's own features are never seen.
            seen = {name: x[row, : at + 1] for name, x in features.items()}
            logits = trained(draft, tokens_BT[row, : at + 1], seen)[1:]
            assert drafts_BK[row].tolist() == logits.argmax(-1).tolist()
            torch.testing.assert_close(probs[row], logits.softmax(-1), rtol=1e-9, atol=1e-12)
        read = at_B[:, None] + torch.arange(DRAFTS + 1)
        new = {name: x[rows_B[:, None], read] for name, x in features.items()}
        drafter.accept(state, tokens_BT[rows_B[:, None], read + 1], new, torch.tensor(accepted) + 1)
        at_B = at_B + torch.tensor(accepted) + 1


def test_a_block_drafts_no_more_than_it_holds(make_draft: MakeDraft, target: TargetSpec) -> None:
    with pytest.raises(UsageError, match="a block of 4 drafts 3 tokens"):
        DFlash(DFlashOptions(block_size=4, num_drafts=4)).drafter(make_draft(), target.model)
