"""The cached decoder against one without a cache, and against training."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from draftcore_eagle3 import plugin
from draftcore_eagle3.drafter import DraftState, Eagle3Drafter
from draftcore_eagle3.loss import Rows
from draftcore_eagle3.model import Eagle3Draft
from draftcore_eagle3.options import Eagle3Options
from draftcore_sdk.algorithm_fixtures import MakeDraft, MakeSamples
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Drafter
from draftcore.contracts.target import TargetSpec
from draftcore.target import TransformersModel

NUM_DRAFTS = 4
LENGTHS = (7, 4, 9)


def make_drafter(draft: Draft, target: TargetSpec) -> Drafter:
    options = Eagle3Options(num_drafts=NUM_DRAFTS)
    return plugin.drafter(draft, TransformersModel(target), options)


class Sequences:
    """What the target knows: tokens with their features, one ever longer row per sequence."""

    def __init__(self, lengths: tuple[int, ...], width: int, vocab: int) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.vocab, self.width = vocab, width
        self.tokens = [self.draw(length + 1) for length in lengths]
        self.features: list[Tensor] = [self.normal(length) for length in lengths]

    def draw(self, count: int) -> list[int]:
        return torch.randint(self.vocab, (count,), generator=self.generator).tolist()

    def normal(self, count: int) -> Tensor:
        shape = (3, count, self.width)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def prefill(self, drafter: Drafter) -> Any:
        lengths = torch.tensor([len(row) - 1 for row in self.tokens])
        rows = [torch.tensor(row[:-1]) for row in self.tokens]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
        features = torch.full((3, *tokens.shape, self.width), 9.0, dtype=torch.float64)
        for index, row in enumerate(self.features):
            features[:, index, : row.shape[1]] = row
        state = drafter.allocate(len(rows), 40)
        next_B = torch.tensor([row[-1] for row in self.tokens])
        drafter.prefill(state, tokens, lengths, self.named(drafter, features), next_B)
        return state

    def verify(self, drafter: Drafter, state: Any, drafts: Tensor, accepted: list[int]) -> None:
        """Accept some drafts of each row, add a token of the target's, and tell the drafter."""
        read = torch.stack([self.normal(drafts.shape[1] + 1) for _ in accepted], 1)
        tokens = torch.randint(self.vocab, (len(accepted), drafts.shape[1] + 1))
        for row, count in enumerate(accepted):
            new = [*drafts[row, :count].tolist(), *self.draw(1)]
            tokens[row, : count + 1] = torch.tensor(new)
            self.tokens[row] += new
            self.features[row] = torch.cat([self.features[row], read[:, row, : count + 1]], 1)
        counts = torch.tensor(accepted) + 1
        drafter.accept(state, tokens, self.named(drafter, read), counts)

    def named(self, drafter: Drafter, features: Tensor) -> Mapping[str, Tensor]:
        return dict(zip(drafter.request.names, features, strict=True))


def without_cache(draft: Draft, tokens: list[int], features: Tensor) -> tuple[list[int], Tensor]:
    """Draft for one sequence by running all its rows again for every token."""
    module = draft.module
    assert isinstance(module, Eagle3Draft)
    layers = [f"hidden.{layer}" for layer in module.config.layers]
    hidden = module.combine(dict(zip(layers, features, strict=True)))
    tokens, ids, first = tokens[1:], module.token_ids(), None
    for _ in range(NUM_DRAFTS):
        layer, length = module.midlayer, len(tokens)
        qkv = layer.project(module.embed(torch.tensor(tokens)), hidden)
        turns = module.rotary(torch.arange(length))
        query, key, value = layer.self_attn.heads_of(qkv, *turns)
        share = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        scores = torch.einsum("tad,sad->ats", query, key) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        attended = torch.einsum("ats,sad->tad", scores.softmax(-1), value)
        normed, output = module.head_and_feedback(layer.finish(hidden, attended))
        logits = module.lm_head(normed[-1])
        first = logits if first is None else first
        choice = int(logits.argmax())
        tokens = [*tokens, choice if ids is None else int(ids[choice])]
        hidden = torch.cat([hidden, output[-1:]])
    assert first is not None
    return tokens[-NUM_DRAFTS:], first


@pytest.mark.parametrize(
    "options",
    [{"draft_vocab_size": 24}, {"norm_output": True}, {"fc_norm": True, "num_key_value_heads": 1}],
    ids=str,
)
def test_proposals_equal_a_decoder_without_cache_over_ragged_rounds(
    options: dict[str, Any], make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft = make_draft(**options)
    drafter, known = make_drafter(draft, target), Sequences(LENGTHS, 32, 48)
    state = known.prefill(drafter)
    with torch.no_grad():
        for accepted in ([0, 2, 4], [4, 4, 0], [1, 0, 3], [4, 4, 4]):
            drafts, probs = drafter.propose(state)
            assert probs is None
            again, _ = drafter.propose(state)
            assert torch.equal(drafts, again)
            for row, proposed in enumerate(drafts.tolist()):
                expected, _ = without_cache(draft, known.tokens[row], known.features[row])
                assert proposed == expected
            known.verify(drafter, state, drafts, accepted)


def test_selected_rows_go_on_alone(make_draft: MakeDraft, target: TargetSpec) -> None:
    drafter, known = make_drafter(make_draft(), target), Sequences(LENGTHS, 32, 48)
    state = known.prefill(drafter)
    known.verify(drafter, state, drafter.propose(state)[0], [1, 3, 2])
    whole, _ = drafter.propose(state)
    part, _ = drafter.propose(drafter.select(state, torch.tensor([2, 0])))
    assert torch.equal(part, whole[[2, 0]])


def test_first_proposal_is_step_0_of_training(
    make_draft: MakeDraft, make_samples: MakeSamples, target: TargetSpec
) -> None:
    """One alignment: row P-1 of a prompt of P tokens, fed the first generated token."""
    draft, samples = make_draft(), make_samples(8, 6)
    module = draft.module
    assert isinstance(module, Eagle3Draft)
    batch = plugin.collate(samples, Eagle3Options())
    everything = dataclasses.replace(batch, loss_mask_BT=torch.ones_like(batch.loss_mask_BT))
    with torch.no_grad():
        normed = next(module.unroll(everything, Rows.of(everything.loss_mask_BT, 3)))
        trained = module.lm_head(normed).unflatten(0, batch.token_ids_BT.shape)
        drafter = make_drafter(draft, target)
        assert isinstance(drafter, Eagle3Drafter)
        for row, sample in enumerate(samples):
            for prompt in range(2, len(sample.token_ids_T)):
                features = {n: x[None, :prompt] for n, x in sample.features.items()}
                state = drafter.allocate(1, 20)
                tokens, last = sample.token_ids_T[None], torch.tensor([prompt])
                drafter.prefill(
                    state, tokens[:, :prompt], last, features, tokens[:, prompt]
                )  # fmt: skip
                _, probs = drafter.propose(state, temperature=1.0)
                assert probs is not None
                expected = trained[row, prompt - 1]
                torch.testing.assert_close(probs[0, 0], expected.softmax(-1), rtol=1e-9, atol=1e-12)
                assert int(drafter.propose(state)[0][0, 0]) == int(expected.argmax())


def test_sampling_follows_the_distribution_it_returns(
    make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft = make_draft(draft_vocab_size=24)
    drafter, known = make_drafter(draft, target), Sequences((6,) * 400, 32, 48)
    known.tokens = [known.tokens[0]] * 400
    known.features = [known.features[0]] * 400
    state: DraftState = known.prefill(drafter)
    seeds = [torch.Generator().manual_seed(seed) for seed in (7, 7, 8)]
    (one, probs), (same, _), (other, _) = (drafter.propose(state, 0.7, seed) for seed in seeds)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert probs is not None
    assert probs.shape == (400, NUM_DRAFTS, 48)
    torch.testing.assert_close(probs.sum(-1), torch.ones(400, NUM_DRAFTS, dtype=probs.dtype))
    ids = draft.module.get_buffer("d2t") + torch.arange(24)
    outside = torch.ones(48, dtype=torch.bool).index_fill(0, ids, False)
    assert not probs[..., outside].any()
    seen = torch.zeros(48, dtype=probs.dtype).index_add(0, one[:, 0], probs.new_ones(400)) / 400
    # Total variation of 400 draws over a few tokens: well below 0.2 if they follow `probs`.
    assert float((seen - probs[0, 0]).abs().sum()) / 2 < 0.2
    assert int((probs[0, 0] > 0.05).sum()) > 1
