"""Which head drafts which token: against training's own reading, and by decoding for real."""

from collections.abc import Callable

import pytest
import torch
from draftcore_medusa import plugin
from draftcore_medusa.drafter import DraftState, MedusaDrafter
from draftcore_medusa.options import MedusaOptions

from draftcore.config import EvalConfig
from draftcore.contracts.algorithm import Draft, Sample, SampleId, StepContext
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore.evaluation.decode import EagerRunner, evaluate_prompts
from draftcore.evaluation.report import Report
from draftcore.target import TransformersModel

MakeDraft = Callable[..., Draft]
NUM_HEADS, NEW_TOKENS = 4, 41
PROMPTS = [[5, 6, 7], [90, 200, 33, 61, 4], [12], [240, 3, 77, 77]]


@pytest.fixture(scope="session")
def model(target: TargetSpec) -> TargetModel:
    return TransformersModel(target)


def make_drafter(draft: Draft, model: TargetModel) -> MedusaDrafter:
    drafter = plugin.drafter(draft, model, MedusaOptions())
    assert isinstance(drafter, MedusaDrafter)
    return drafter


def proposals(drafter: MedusaDrafter, state: DraftState, *hidden: torch.Tensor) -> bool:
    """Whether the next proposals are what the heads say of these states, one per row."""
    with torch.no_grad():
        wanted_BK = drafter.draft.logits(torch.stack(hidden)).argmax(-1)
    return torch.equal(drafter.propose(state).tokens_BK, wanted_BK)


def test_the_state_before_the_newest_token_decides(
    make_draft: MakeDraft, model: TargetModel
) -> None:
    """Ragged prompts, ragged rounds, and rows that end: every row's state is its own."""
    drafter = make_drafter(make_draft(), model)
    read_BTH = torch.randn(3, 6, 48, dtype=torch.float64)  # the prompts; those of 4, 1 and 6 tokens
    state = drafter.allocate(3, 40)
    tokens_BT, newest_B = torch.ones(3, 6).long(), torch.ones(3).long()
    lengths_B = torch.tensor([4, 1, 6])
    drafter.prefill(state, tokens_BT, lengths_B, {"last_hidden": read_BTH}, newest_B)
    assert proposals(drafter, state, read_BTH[0, 3], read_BTH[1, 0], read_BTH[2, 5])
    assert proposals(drafter, state, read_BTH[0, 3], read_BTH[1, 0], read_BTH[2, 5])  # once more
    window_BTH = torch.randn(3, NUM_HEADS + 1, 48, dtype=torch.float64)
    counts_B = torch.tensor([1, 5, 3])  # no, all and two drafts were right
    drafter.accept(state, torch.ones(3, 5).long(), {"last_hidden": window_BTH}, counts_B)
    assert proposals(drafter, state, window_BTH[0, 0], window_BTH[1, 4], window_BTH[2, 2])
    state = drafter.select(state, torch.tensor([2, 0]))
    assert proposals(drafter, state, window_BTH[2, 2], window_BTH[0, 0])


def test_sampled_proposals_follow_the_probabilities_returned(
    make_draft: MakeDraft, model: TargetModel
) -> None:
    drafter, rows, temperature = make_drafter(make_draft(), model), 4000, 0.7
    state = drafter.allocate(rows, 40)
    hidden_H = torch.randn(48, dtype=torch.float64)
    features = {"last_hidden": hidden_H.expand(rows, 1, 48)}
    one_B = torch.ones(rows).long()
    drafter.prefill(state, one_B[:, None], one_B, features, one_B)
    generator = torch.Generator().manual_seed(1)
    drawn = drafter.propose(state, temperature, generator)
    probs_BKV = drawn.probs_BKV
    assert probs_BKV is not None
    with torch.no_grad():
        logits_KV = drafter.draft.logits(hidden_H[None])[0]
    probs_KV = (logits_KV / temperature).softmax(-1)
    torch.testing.assert_close(probs_BKV, probs_KV.expand_as(probs_BKV))
    for tokens_B, probs_V in zip(drawn.tokens_BK.T, probs_KV, strict=True):
        shares_V = torch.bincount(tokens_B, minlength=len(probs_V)) / rows
        spread_V = (probs_V * (1 - probs_V) / rows).sqrt()
        assert ((shares_V - probs_V).abs() < 5 * spread_V + 1 / rows).all()


def overfit(draft: Draft, model: TargetModel, answers: list[list[int]], steps: int = 300) -> None:
    """Train on the target's own answers to PROMPTS through the hooks, as the trainer does."""
    request = FeatureRequest((), last_hidden=True, dtype="float32")
    samples = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([*prompt, *answer])
        taken = model.features(tokens[None], torch.tensor([len(tokens)]), request)
        mask = torch.arange(len(tokens)) >= len(prompt)
        hidden_TH = taken["last_hidden"][0].clone()
        samples.append(Sample(SampleId("", 1), tokens, mask, {"last_hidden": hidden_TH}))
    batch = plugin.collate(samples, MedusaOptions())
    optimizer = torch.optim.AdamW(draft.module.parameters(), lr=0.02, weight_decay=0)
    for step in range(steps):
        output = plugin.forward_loss(draft, batch, StepContext(step + 1, steps, 0))
        (output.numerator / output.denominator).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(draft: Draft, model: TargetModel, **changes: float) -> Report:
    config = EvalConfig(batch=4, max_new_tokens=NEW_TOKENS).model_copy(update=changes)
    return evaluate_prompts(EagerRunner(model, make_drafter(draft, model)), PROMPTS, config)


def test_an_overfitted_draft_is_accepted_whole(make_draft: MakeDraft, model: TargetModel) -> None:
    """The answers were learned by heart, so each round yields K drafts and the target's own token.

    A head off by one position would be accepted about never; so is one that was not trained.
    """
    draft = make_draft(dtype=torch.float32, random=False, num_heads=NUM_HEADS, num_layers=2)
    fresh = evaluate(draft, model)
    overfit(draft, model, model.generate(PROMPTS, NEW_TOKENS))
    trained = evaluate(draft, model)
    assert fresh.lossless is trained.lossless is True
    assert fresh.acceptance_length < 2
    assert trained.acceptance_length > NUM_HEADS + 0.9


def test_sampled_decoding_runs_with_the_real_target(
    make_draft: MakeDraft, model: TargetModel
) -> None:
    report = evaluate(make_draft(dtype=torch.float32, random=False), model, temperature=1.0)
    assert report.lossless is None
    assert report.acceptance_length > 1
