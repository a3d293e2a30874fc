"""The causal decoder against one teacher-forced pass of training, and a real target's `generate`."""

from typing import Any

import pytest
import torch
from draftcore_dflash.blocks import Blocks
from draftcore_domino import plugin
from draftcore_domino.drafter import DominoDrafter
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from draftcore_sdk.algorithm_fixtures import MakeDraft
from torch import Tensor

from draftcore.config import EvalConfig
from draftcore.contracts.algorithm import Draft, Sample, SampleId
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore.errors import UsageError
from draftcore.evaluation.decode import EagerRunner, evaluate_prompts
from draftcore.target import TransformersModel

WIDTH, BLOCK = 32, 4
SHIFTS = pytest.mark.parametrize("shift", [True, False])


@pytest.fixture(scope="session")
def model(target: TargetSpec) -> TargetModel:
    return TransformersModel(target)


def make_drafter(draft: Draft, model: TargetModel, **options: Any) -> DominoDrafter:
    drafter = plugin.drafter(draft, model, DominoOptions(block_size=BLOCK, **options))
    assert isinstance(drafter, DominoDrafter)
    return drafter


def sequence(length: int, seed: int) -> tuple[list[int], Tensor]:
    """Tokens of a prompt and of the next, and the features of the prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(250, (length + 1,), generator=generator).tolist()
    return tokens, torch.randn(3, length, WIDTH, generator=generator, dtype=torch.float64)


def prefilled(drafter: DominoDrafter, rows: list[tuple[list[int], Tensor]]) -> Any:
    lengths = [len(tokens) - 1 for tokens, _ in rows]
    tokens_BT = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    features = torch.zeros(3, len(rows), max(lengths), WIDTH, dtype=torch.float64)
    for row, (tokens, known) in enumerate(rows):
        tokens_BT[row, : lengths[row]] = torch.tensor(tokens[:-1])
        features[:, row, : lengths[row]] = known
    state = drafter.allocate(len(rows), 40)
    named = dict(zip(drafter.request.names, features, strict=True))
    next_B = torch.tensor([tokens[-1] for tokens, _ in rows])
    drafter.prefill(state, tokens_BT, torch.tensor(lengths), named, next_B)
    return state


def teacher_forced(draft: Draft, tokens: list[int], features: Tensor, drafts: Tensor) -> Tensor:
    """Logits of all proposals [K, V] by training's forward, with the drafts as true tokens."""
    module, anchor = draft.module, len(tokens) - 1
    assert isinstance(module, DominoDraft)
    known = torch.cat([torch.tensor(tokens), drafts])
    named = {
        f"hidden.{layer}": torch.cat([x, torch.zeros(len(known) - anchor, WIDTH)])
        for layer, x in zip(module.config.layers, features, strict=True)
    }
    sample = Sample(SampleId("", 0), known, torch.ones(len(known), dtype=torch.bool), named)
    batch = plugin.collate([sample], DominoOptions())
    blocks = Blocks.of(torch.tensor([[anchor]]), torch.tensor([[True]]))
    with torch.no_grad():
        hidden = module.block_hidden(batch, blocks)
        correction = module.up(module.low_rank(hidden, module.prefix_states(batch, blocks)))
        correction[:, : module.domino.first_corrected_row] = 0.0
        first = module.domino.first_row
        return (hidden @ module.head.T + correction)[0, first : first + len(drafts)]


@SHIFTS
def test_proposals_equal_one_teacher_forced_pass(
    shift: bool, make_draft: MakeDraft, model: TargetModel
) -> None:
    draft = make_draft(shift_label=shift)
    drafter = make_drafter(draft, model)
    rows = [sequence(length, seed) for seed, length in enumerate((7, 1, 9))]
    state = prefilled(drafter, rows)
    drafts, nothing = drafter.propose(state)
    sampled, probs = drafter.propose(state, 0.5, torch.Generator().manual_seed(0))
    assert nothing is None
    assert probs is not None
    assert drafts.shape == (3, BLOCK - 1)
    for row, (tokens, features) in enumerate(rows):
        logits = teacher_forced(draft, tokens, features, drafts[row])
        assert drafts[row].tolist() == logits.argmax(-1).tolist()
        logits = teacher_forced(draft, tokens, features, sampled[row])
        torch.testing.assert_close(probs[row], (logits / 0.5).softmax(-1), rtol=1e-9, atol=1e-12)


@SHIFTS
def test_the_first_proposal_is_the_base_and_later_ones_are_corrected(
    shift: bool, make_draft: MakeDraft, model: TargetModel
) -> None:
    """Without a correction the other proposals change, and the first does not."""
    draft = make_draft(shift_label=shift)
    module = draft.module
    assert isinstance(module, DominoDraft)
    drafter, rows = make_drafter(draft, model), [sequence(6, seed) for seed in range(20)]
    with_head, _ = drafter.propose(prefilled(drafter, rows))
    module.up.weight.data.zero_()
    without, _ = drafter.propose(prefilled(drafter, rows))
    assert torch.equal(with_head[:, 0], without[:, 0])
    assert torch.all((with_head != without).any(0)[1:])


def test_fewer_drafts_are_the_first_of_the_block(make_draft: MakeDraft, model: TargetModel) -> None:
    draft, rows = make_draft(), [sequence(6, 0)]
    drafters = [make_drafter(draft, model), make_drafter(draft, model, num_drafts=2)]
    (all_three, _), (two, _) = (d.propose(prefilled(d, rows)) for d in drafters)
    assert torch.equal(two, all_three[:, :2])
    with pytest.raises(UsageError, match="a block of 4 drafts 3 tokens"):
        make_drafter(draft, model, num_drafts=4)


@SHIFTS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_with_a_real_target_is_lossless(
    temperature: float, shift: bool, make_draft: MakeDraft, model: TargetModel
) -> None:
    """The evaluator compares every greedy output with the target's own; it raises if one differs."""
    drafter = make_drafter(make_draft(dtype=torch.float32, shift_label=shift), model)
    config = EvalConfig(batch=2, max_new_tokens=12, temperature=temperature)
    report = evaluate_prompts(
        EagerRunner(model, drafter), [[5, 6, 7], [9], [1, 2, 3, 4, 5]], config
    )
    assert report.lossless is (True if temperature == 0 else None)
    assert report.num_drafts == 3
