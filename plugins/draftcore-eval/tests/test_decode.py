"""Speculative decoding with a real target: lossless when greedy, unbiased when sampling.

The drafter here guesses the token that followed the last token most recently (or a fixed one), so
it needs no training; what is tested is the target's cache, the verifier and the bookkeeping.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from draftcore_eval import decode
from draftcore_eval.decode import (
    EagerRunner,
    evaluate_prompts,
    resolve_ties,
    speculate,
)
from draftcore_eval.options import EvalOptions
from draftcore_eval.proposals import verify
from draftcore_eval.report import Decoded, Report
from draftcore_hf.target import TransformersModel, TransformersTarget
from draftcore_sdk.targets import tiny_target
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore.contracts.capture import FeatureRequest
from draftcore.errors import DraftcoreError, UsageError

State = dict[str, Tensor]


class BigramDrafter:
    """Proposes what followed each token before; with temperature, from a mixed distribution."""

    def __init__(self, vocabulary: int, num_drafts: int = 4) -> None:
        self.vocabulary, self.num_drafts = vocabulary, num_drafts
        self.request = FeatureRequest((1,), True, "float32")

    def allocate(self, batch: int, max_len: int) -> State:
        followed_BV = torch.zeros(batch, self.vocabulary, dtype=torch.long)
        return {"followed": followed_BV, "last": torch.zeros(batch, dtype=torch.long)}

    def prefill(
        self, state: State, tokens_BT: Tensor, lengths_B: Tensor,
        features: Mapping[str, Tensor], next_B: Tensor,
    ) -> None:  # fmt: skip
        assert features["hidden.1"].shape[:2] == tokens_BT.shape
        for row, length in enumerate(lengths_B.tolist()):
            self.learn(state, row, [*tokens_BT[row, :length].tolist(), int(next_B[row])])

    def learn(self, state: State, row: int, known: list[int]) -> None:
        for token, after in itertools.pairwise(known):
            state["followed"][row, token] = after
        state["last"][row] = known[-1]

    def propose(
        self, state: State, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        token_B, drafts, probs = state["last"], [], []
        rows = torch.arange(len(token_B))
        for _ in range(self.num_drafts):
            guess_B = state["followed"][rows, token_B]
            q_BV = torch.full((len(rows), self.vocabulary), 0.5 / self.vocabulary)
            q_BV[rows, guess_B] += 0.5
            drawn_B = torch.multinomial(q_BV, 1, generator=generator)[:, 0]
            token_B = drawn_B if temperature else guess_B
            drafts.append(token_B)
            probs.append(q_BV)
        return Proposal(torch.stack(drafts, 1), torch.stack(probs, 1) if temperature else None)

    def accept(
        self, state: State, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        assert features["hidden.1"].shape[1] == self.num_drafts + 1
        for row, count in enumerate(counts_B.tolist()):
            known = [int(state["last"][row]), *tokens_BK[row, :count].tolist()]
            self.learn(state, row, known)

    def select(self, state: State, rows_B: Tensor) -> State:
        return {name: value[rows_B] for name, value in state.items()}


class ForeseeingDrafter(BigramDrafter):
    """Proposes what the target will say, and errs at a place that differs by row and round."""

    def __init__(self, target: TransformersModel, prompts: Sequence[list[int]], count: int) -> None:
        super().__init__(target.spec.vocab_size)
        said = zip(prompts, target.generate(prompts, count + 9), strict=True)
        self.said = {len(prompt): [*prompt, *answer, *[0] * 9] for prompt, answer in said}

    def prefill(
        self, state: State, tokens_BT: Tensor, lengths_B: Tensor,
        features: Mapping[str, Tensor], next_B: Tensor,
    ) -> None:  # fmt: skip
        state["prompt"], state["at"] = lengths_B, lengths_B + 1

    def propose(
        self, state: State, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        drafts = []
        for prompt, at in zip(state["prompt"].tolist(), state["at"].tolist(), strict=True):
            drafts.append(self.said[prompt][at : at + self.num_drafts])
            if (wrong := (at * at // 3 + prompt) % (self.num_drafts + 1)) < self.num_drafts:
                drafts[-1][wrong] = (drafts[-1][wrong] + 1) % 256
        return Proposal(torch.tensor(drafts))

    def accept(
        self, state: State, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        state["at"] = state["at"] + counts_B


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TransformersModel:
    return TransformersModel(TransformersTarget(str(target_folder), device="cpu"))


def eager(target: TransformersModel, num_drafts: int = 4) -> EagerRunner:
    return EagerRunner(target, BigramDrafter(target.spec.vocab_size, num_drafts))


PROMPTS = [[5, 9, 5, 9, 5], list(range(40, 60)), [7], [11, 12, 13, 11, 12, 13, 11]]


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_greedy_output_is_the_targets_own_for_every_prompt_and_batch(
    target: TransformersModel, batch: int
) -> None:
    report = evaluate_prompts(eager(target), PROMPTS, EvalOptions(max_new_tokens=24, batch=batch))
    assert (report.lossless, report.prompts) == (True, 4)
    assert report.acceptance_length > 1.5


@pytest.mark.parametrize("family", ["exaone4", "llama4_text"])
def test_a_target_of_windows_or_chunks_decodes_losslessly(tmp_path: Path, family: str) -> None:
    """Of 8 tokens."""
    folder = tiny_target(tmp_path, family)
    target = TransformersModel(TransformersTarget(str(folder), device="cpu"))
    report = evaluate_prompts(eager(target), PROMPTS, EvalOptions(max_new_tokens=30, batch=4))
    assert report.lossless is True


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("batch", [1, 3])
def test_states_that_cannot_be_overwritten_go_back_to_what_each_row_accepted(
    tmp_path: Path, family: str, batch: int
) -> None:
    """Of linear attention, Mamba beside attention, and convolutions; prompts of 1 to 20 tokens."""
    target = TransformersModel(TransformersTarget(str(tiny_target(tmp_path, family)), device="cpu"))
    runner = EagerRunner(target, ForeseeingDrafter(target, PROMPTS, 24))
    report = evaluate_prompts(runner, PROMPTS, EvalOptions(max_new_tokens=24, batch=batch))
    assert (report.lossless, report.ties) == (True, ())
    assert 2 < report.acceptance_length < 4
    first, *_, last = report.acceptance_by_position
    assert 0.1 < last < first < 0.9


def test_recurrent_layers_read_no_tree(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, "qwen3_5_text")
    target = TransformersModel(TransformersTarget(str(folder), device="cpu"))
    tokens_BT, request = torch.zeros(1, 3, dtype=torch.long), FeatureRequest((), True, "float32")
    seen_BTT = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    with pytest.raises(UsageError, match=r"drafts trees, and target .* has recurrent layers"):
        target.forward(
            target.allocate(1, 8), tokens_BT, tokens_BT[:, 0], 3, request, seen_BTT=seen_BTT
        )


def test_a_verifier_that_accepts_everything_is_caught(
    target: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gullible(logits_BTV: Tensor, proposal: Proposal, *_: object) -> tuple[Tensor, ...]:
        tokens_BT = torch.cat([proposal.tokens_BK, logits_BTV[:, -1:].argmax(-1)], 1)
        counts_B = torch.full_like(tokens_BT[:, 0], tokens_BT.shape[1])
        return tokens_BT, counts_B, counts_B - 1

    monkeypatch.setattr(decode, "verify", gullible)
    with pytest.raises(DraftcoreError, match="not lossless"):
        evaluate_prompts(eager(target), PROMPTS, EvalOptions(max_new_tokens=16))


def test_in_half_precision_a_tie_is_settled_by_the_targets_own_token(target_folder: Path) -> None:
    """The draft's output is altered at one token; with a bound above the gap that is a tie."""
    spec = TransformersTarget(str(target_folder), dtype="bfloat16", device="cpu")
    runner, config = eager(TransformersModel(spec)), EvalOptions(max_new_tokens=12, tie_bound=100.0)
    (reference,) = runner.target.generate([PROMPTS[0]], 12)
    altered = [*reference[:5], (reference[5] + 1) % 256, *reference[6:]]
    wrong = Decoded(PROMPTS[0], altered, [2, 3, 4], [4, 4, 4])
    ties = resolve_ties(runner, wrong, reference, config)
    assert next(tie.position for tie in ties) == 5
    assert wrong.tokens == reference
    assert sum(wrong.accepted) + len(wrong.accepted) >= len(reference) - 2
    strict = config.model_copy(update={"tie_bound": 1e-9})
    with pytest.raises(DraftcoreError, match="not lossless"):
        resolve_ties(runner, Decoded(PROMPTS[0], altered[:6], [2, 2], [4, 4]), reference, strict)


def chi_square(observed: Tensor, expected: Tensor) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def test_rejection_sampling_keeps_the_targets_distribution() -> None:
    """Chi-square over 40,000 draws of the first token for a draft that is badly wrong."""
    generator = torch.Generator().manual_seed(1)
    draws, V = 40_000, 7
    logits_V, q_V = torch.randn(V, generator=generator), torch.rand(V, generator=generator)
    q_V /= q_V.sum()
    p_V = torch.softmax(logits_V / 0.7, -1)
    drafts_BK = torch.multinomial(q_V.expand(draws, V), 1, generator=generator)
    proposal = Proposal(drafts_BK, q_V.expand(draws, 1, V))
    tokens_BT, *_ = verify(logits_V.expand(draws, 2, V), proposal, 0.7, generator)
    observed_V = torch.bincount(tokens_BT[:, 0], minlength=V).double()
    assert chi_square(observed_V, draws * p_V) < 22.46  # 0.999 quantile, 6 degrees of freedom
    assert chi_square(draws * q_V, draws * p_V) > 1000  # what unverified drafts would give


def test_sampled_decoding_follows_the_target_end_to_end(target: TransformersModel) -> None:
    """Second tokens of many sampled runs against the exact distribution, chi-square."""
    config = EvalOptions(max_new_tokens=3, temperature=0.3, seed=3)
    prompt, draws = PROMPTS[1], 3000
    decoded = [one.tokens for one in speculate(eager(target, 2), [prompt] * draws, config)]
    first = int(torch.tensor([tokens[0] for tokens in decoded]).mode().values)
    seconds = torch.tensor([tokens[1] for tokens in decoded if tokens[0] == first and tokens[1:]])
    logits_V = target.model(input_ids=torch.tensor([[*prompt, first]])).logits[0, -1]
    p_V, many = torch.softmax(logits_V / 0.3, -1), len(seconds)
    likely = (p_V * many > 8).nonzero()[:, 0]
    expected = torch.cat([p_V[likely], 1 - p_V[likely].sum(0, keepdim=True)]).double() * many
    counts = torch.bincount(seconds, minlength=len(p_V))[likely].double()
    observed = torch.cat([counts, (many - counts.sum())[None]])
    degrees = len(likely)
    assert degrees >= 3
    # beyond the 0.9999 quantile
    assert chi_square(observed, expected.clamp(min=1)) < degrees + 4 * (2 * degrees) ** 0.5 + 8


def test_sampling_refuses_a_draft_without_probabilities(
    target: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts cannot be judged: they would be decoded greedily, and the report would be wrong."""
    runner = eager(target)
    propose = runner.drafter.propose
    without = lambda *given: Proposal(propose(*given).tokens_BK)  # noqa: E731
    monkeypatch.setattr(runner.drafter, "propose", without)
    with pytest.raises(UsageError, match=r"probabilities .*\n.*eval.temperature=0"):
        evaluate_prompts(runner, PROMPTS, EvalOptions(max_new_tokens=4, temperature=0.7))


def report_of(*decoded: tuple[Sequence[int], list[int], list[int]], num_drafts: int) -> Report:
    return Report.count(
        [Decoded([], list(tokens), accepted, room) for tokens, accepted, room in decoded],
        num_drafts, num_drafts, lossless=True, ties=(), draft_seconds=1, verify_seconds=2, plain_seconds=1.5,
    )  # fmt: skip


def test_acceptance_counts_only_tokens_that_are_kept() -> None:
    report = report_of((range(5), [2, 0], [3, 3]), (range(3), [1], [2]), num_drafts=3)
    assert report.acceptance_length == pytest.approx(6 / 3)
    assert report.acceptance_by_position == pytest.approx((2 / 3, 1 / 3, 0.0))
    assert report.break_even_length == pytest.approx(2.0)
    low, high = report.acceptance_length_95
    assert low <= report.acceptance_length <= high


def test_the_report_is_written_as_json_and_as_a_picture(tmp_path: Path) -> None:
    report_of((range(3), [1], [2]), num_drafts=2).write(tmp_path)
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((tmp_path / "report.json").read_text())
    assert (data["acceptance_length"], data["break_even_length"]) == (2.0, 2.0)
