"""The causal decoder against one teacher-forced pass of training."""

import pytest
import torch
from draftcore_dflash.blocks import Blocks
from draftcore_domino.algorithm import Domino
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from draftcore_sdk.algorithm_fixtures import MakeDraft
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec

WIDTH, BLOCK, LAYERS = 32, 4, (1, 3, 4)


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
        correction[:, : module.domino.first_corrected_row] = 0.0
        first = module.domino.first_row
        return (hidden @ module.head.T + correction)[0, first : first + len(drafts_K)]


@pytest.mark.parametrize("shift", [True, False])
def test_proposals_equal_one_teacher_forced_pass(
    shift: bool, make_draft: MakeDraft, target: TargetSpec
) -> None:
    generator, draft = torch.Generator().manual_seed(0), make_draft(shift_label=shift)
    lengths_B = torch.tensor([7, 1, 9])
    tokens_BT = torch.randint(250, (3, 10), generator=generator)
    hidden = torch.randn(3, 3, 9, WIDTH, generator=generator, dtype=torch.float64)
    features = {f"hidden.{layer}": x for layer, x in zip(LAYERS, hidden, strict=True)}
    drafter = Domino(DominoOptions(block_size=BLOCK)).drafter(draft, target.model)
    state, next_B = drafter.allocate(3, 40), tokens_BT[torch.arange(3), lengths_B]
    drafter.prefill(state, tokens_BT[:, :9], lengths_B, features, next_B)
    drafts_BK = drafter.propose(state).tokens_BK
    sampled = drafter.propose(state, 0.5, torch.Generator().manual_seed(0))
    probs = sampled.probs_BKV
    assert probs is not None
    assert drafts_BK.shape == (3, BLOCK - 1)
    for row, length in enumerate(lengths_B.tolist()):
        known = tokens_BT[row, : length + 1], {n: x[row, :length] for n, x in features.items()}
        logits = teacher_forced(draft, *known, drafts_BK[row])
        assert drafts_BK[row].tolist() == logits.argmax(-1).tolist()
        logits = teacher_forced(draft, *known, sampled.tokens_BK[row])
        torch.testing.assert_close(probs[row], (logits / 0.5).softmax(-1), rtol=1e-9, atol=1e-12)
