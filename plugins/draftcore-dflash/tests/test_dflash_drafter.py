"""The cached decoder against training's own forward, and against the target's own `generate`."""

from typing import Any

import pytest
import torch
from draftcore_dflash import plugin
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.drafter import DFlashDrafter
from draftcore_dflash.model import Backbone
from draftcore_dflash.options import DFlashOptions
from draftcore_sdk.algorithm_fixtures import MakeDraft
from torch import Tensor

from draftcore.config import EvalConfig
from draftcore.contracts.algorithm import Draft, Sample, SampleId
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore.errors import UsageError
from draftcore.evaluation.decode import EagerRunner, evaluate_prompts
from draftcore.target import TransformersModel

LENGTHS = (7, 1, 9)
WIDTH, VOCAB = 32, 270


@pytest.fixture(scope="session")
def model(target: TargetSpec) -> TargetModel:
    return TransformersModel(target)


def make_drafter(draft: Draft, model: TargetModel, **options: Any) -> DFlashDrafter:
    drafter = plugin.drafter(draft, model, DFlashOptions(block_size=4, **options))
    assert isinstance(drafter, DFlashDrafter)
    return drafter


class Sequences:
    """What the target knows: tokens with their features, one ever longer row per sequence."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.tokens = [self.draw(length + 1) for length in lengths]
        self.features = [self.normal(length) for length in lengths]

    def draw(self, count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=self.generator).tolist()

    def normal(self, count: int) -> Tensor:
        shape = (3, count, WIDTH)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def prefill(self, drafter: DFlashDrafter) -> Any:
        lengths = torch.tensor([len(row) - 1 for row in self.tokens])
        rows = [torch.tensor(row[:-1]) for row in self.tokens]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
        features = torch.full((3, *tokens.shape, WIDTH), 9.0, dtype=torch.float64)
        for index, row in enumerate(self.features):
            features[:, index, : row.shape[1]] = row
        state = drafter.allocate(len(rows), 40)
        next_B = torch.tensor([row[-1] for row in self.tokens])
        named = dict(zip(drafter.request.names, features, strict=True))
        drafter.prefill(state, tokens, lengths, named, next_B)
        return state

    def verify(
        self, drafter: DFlashDrafter, state: Any, drafts: Tensor, accepted: list[int]
    ) -> None:
        """Accept some drafts of each row, add a token of the target's, and tell the drafter."""
        read = torch.stack([self.normal(drafts.shape[1] + 1) for _ in accepted], 1)
        tokens = torch.randint(VOCAB, (len(accepted), drafts.shape[1] + 1))
        for row, count in enumerate(accepted):
            new = [*drafts[row, :count].tolist(), *self.draw(1)]
            tokens[row, : count + 1] = torch.tensor(new)
            self.tokens[row] += new
            self.features[row] = torch.cat([self.features[row], read[:, row, : count + 1]], 1)
        named = dict(zip(drafter.request.names, read, strict=True))
        drafter.accept(state, tokens, named, torch.tensor(accepted) + 1)


def trained(draft: Draft, tokens: list[int], features: Tensor) -> Tensor:
    """Logits [S, V] of the block at the last token, by training's forward."""
    module, anchor = draft.module, len(tokens) - 1
    assert isinstance(module, Backbone)
    named = {
        f"hidden.{layer}": torch.cat([x, torch.zeros(1, WIDTH)])  # the anchor's own: never seen
        for layer, x in zip(module.config.layers, features, strict=True)
    }
    sample = Sample(SampleId("", 0), torch.tensor(tokens), torch.ones(anchor + 1).bool(), named)
    blocks = Blocks.of(torch.tensor([[anchor]]), torch.tensor([[True]]))
    with torch.no_grad():
        hidden = module.block_hidden(plugin.collate([sample], DFlashOptions()), blocks)[0]
        return hidden @ module.head.T


VARIANTS = [
    {},
    {"sliding_window": 3},
    {"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")},
    {"is_causal": True, "num_key_value_heads": 1, "head_dim": 12},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_proposals_equal_training_over_ragged_rounds(
    options: dict[str, Any], make_draft: MakeDraft, model: TargetModel
) -> None:
    draft, known = make_draft(**options), Sequences(LENGTHS)
    drafter = make_drafter(draft, model)
    state = known.prefill(drafter)
    for accepted in ([3, 0, 1], [1, 2, 3], [0, 3, 2]):
        drafts, nothing = drafter.propose(state)
        _, probs = drafter.propose(state, temperature=1.0)
        assert nothing is None
        assert probs is not None
        for row, tokens in enumerate(known.tokens):
            logits = trained(draft, tokens, known.features[row])[1:]
            assert drafts[row].tolist() == logits.argmax(-1).tolist()
            torch.testing.assert_close(probs[row], logits.softmax(-1), rtol=1e-9, atol=1e-12)
        known.verify(drafter, state, drafts, accepted)


def test_selected_rows_go_on_alone(make_draft: MakeDraft, model: TargetModel) -> None:
    drafter, known = make_drafter(make_draft(), model), Sequences(LENGTHS)
    state = known.prefill(drafter)
    known.verify(drafter, state, drafter.propose(state)[0], [1, 3, 2])
    whole, _ = drafter.propose(state)
    part, _ = drafter.propose(drafter.select(state, torch.tensor([2, 0])))
    assert torch.equal(part, whole[[2, 0]])


def test_fewer_drafts_are_the_first_of_the_block(make_draft: MakeDraft, model: TargetModel) -> None:
    draft = make_draft()
    drafters = [make_drafter(draft, model), make_drafter(draft, model, num_drafts=2)]
    (all_three, _), (two, _) = (d.propose(Sequences(LENGTHS).prefill(d)) for d in drafters)
    assert (drafters[0].num_drafts, drafters[1].num_drafts) == (3, 2)
    assert torch.equal(two, all_three[:, :2])
    with pytest.raises(UsageError, match="a block of 4 drafts 3 tokens"):
        make_drafter(draft, model, num_drafts=4)


def test_sampling_follows_the_distribution_it_returns(
    make_draft: MakeDraft, model: TargetModel
) -> None:
    drafter, known = make_drafter(make_draft(), model), Sequences((6,) * 400)
    known.tokens = [known.tokens[0]] * 400
    known.features = [known.features[0]] * 400
    state = known.prefill(drafter)
    seeds = [torch.Generator().manual_seed(seed) for seed in (7, 7, 8)]
    (one, probs), (same, _), (other, _) = (drafter.propose(state, 0.1, seed) for seed in seeds)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert probs is not None
    assert probs.shape == (400, 3, VOCAB)
    for k in range(3):
        seen = torch.zeros(VOCAB, dtype=probs.dtype)
        seen = seen.index_add(0, one[:, k], probs.new_ones(400)) / 400
        # Total variation of 400 draws over a few tokens: well below 0.2 if they follow `probs`.
        assert float((seen - probs[0, k]).abs().sum()) / 2 < 0.2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_with_a_real_target_is_lossless(
    temperature: float, make_draft: MakeDraft, model: TargetModel
) -> None:
    """The evaluator compares every greedy output with the target's own; it raises if one differs."""
    drafter = make_drafter(make_draft(dtype=torch.float32), model)
    assert drafter.request.names == ("hidden.1", "hidden.3", "hidden.4")
    config = EvalConfig(batch=2, max_new_tokens=12, temperature=temperature)
    report = evaluate_prompts(
        EagerRunner(model, drafter), [[5, 6, 7], [9], [1, 2, 3, 4, 5]], config
    )
    assert report.lossless is (True if temperature == 0 else None)
    assert report.num_drafts == 3
