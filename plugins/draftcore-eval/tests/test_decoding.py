"""Speculative decoding with a real target: lossless when greedy, unbiased when sampling, checked.

The drafter here knows what the target will write, and proposes it with as many wrong tokens as a test asks
for. So what is tested is the target's cache, the verifier and the bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_eval import decode
from draftcore_eval.decode import EagerRunner, evaluate_prompts, resolve_ties, speculate
from draftcore_eval.options import EvalOptions
from draftcore_eval.proposals import lineage, verify, verify_tree
from draftcore_eval.report import Decoded, Report
from draftcore_graphs.recording import RecordingBackend
from draftcore_hf.target import TransformersModel, TransformersTarget
from draftcore_sdk.targets import tiny_target
from torch import Tensor

from draftcore.contracts.algorithm import Proposal
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import ShapeKey
from draftcore.errors import DraftcoreError, UsageError

PROMPTS = [[5, 9, 5, 9, 5], list(range(40, 60)), [7], [11, 12, 13, 11, 12, 13, 11]]
K, DEPTH, NEW = 9, 4, 24
State = dict[str, Tensor]


class Knowing:
    """Proposes what the target writes, each token right with a probability; `change` alters it.

    A state is which prompt a row is of, and how many of its tokens were read. Every round checks that
    the features that come with it are the target's own of these tokens.
    """

    num_drafts, request = K, FeatureRequest((1,), True, "float32")

    def __init__(
        self, target: TransformersModel, right: float, chain: bool = False, **change: Any
    ) -> None:
        self.target, self.right, self.chain, self.change = target, right, chain, change
        if not chain:
            self.depth = DEPTH
        answers = target.generate(PROMPTS, NEW)
        self.texts = [[*p, *answer] for p, answer in zip(PROMPTS, answers, strict=True)]
        self.features = [
            target.features(torch.tensor([text]), torch.tensor([len(text)]), self.request)
            for text in self.texts
        ]
        self.random, self.widths = torch.Generator().manual_seed(3), set[int]()

    def allocate(self, batch: int, max_len: int) -> State:
        return {name: torch.zeros(batch, dtype=torch.long) for name in ("prompt", "read")}

    def prefill(self, state: State, tokens_BT: Tensor, lengths_B: Tensor, *_: Any) -> None:
        for row, length in enumerate(lengths_B.tolist()):
            known = tokens_BT[row, :length].tolist()
            begun = [known[: len(prompt)] == prompt for prompt in PROMPTS]
            state["prompt"][row] = begun.index(True)
        state["read"].copy_(lengths_B)

    def propose(self, state: State, temperature: float = 0, generator: Any = None) -> Proposal:
        where = zip(state["prompt"].tolist(), state["read"].tolist(), strict=True)
        drafts = [self.draft(self.texts[prompt][read + 1 :]) for prompt, read in where]
        tokens_BK, parents_BK = (torch.tensor(rows) for rows in zip(*drafts, strict=True))
        return replace(Proposal(tokens_BK, None, None if self.chain else parents_BK), **self.change)

    def draft(self, coming: list[int]) -> tuple[list[int], list[int]]:
        """Let each node follow the one before, or a random one of those that are not too deep."""
        tokens, parents, depths = list[int](), list[int](), [0]
        for node in range(K):
            above = [node] if self.chain else [at for at in range(node + 1) if depths[at] < DEPTH]
            at = above[self.number(len(above))]
            wrong = depths[at] >= len(coming) or self.number(100) >= 100 * self.right
            tokens.append(self.number(256) if wrong else coming[depths[at]])
            parents.append(at - 1)
            depths.append(depths[at] + 1)
        return tokens, parents

    def number(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self.random))

    def accept(
        self, state: State, tokens_BP: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        self.widths |= {tokens_BP.shape[1], features["hidden.1"].shape[1]}
        for row, count in enumerate(counts_B.tolist()):
            prompt, read = int(state["prompt"][row]), int(state["read"][row])
            for name, own in self.features[prompt].items():
                expected = own[0, read : read + count]  # shorter where the text ends
                found = features[name][row, : len(expected)]
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        state["read"] += counts_B

    def select(self, state: State, rows_B: Tensor) -> State:
        return {name: value[rows_B] for name, value in state.items()}


def opened(folder: Path, dtype: str = "float32") -> TransformersModel:
    return TransformersModel(TransformersTarget(str(folder), dtype=dtype, device="cpu"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TransformersModel:
    return opened(target_folder)


def evaluated(
    target: TransformersModel, right: float, chain: bool, batch: int, **change: Any
) -> Report:
    """Decode all prompts; the report has the drafter, too."""
    runner = EagerRunner(target, Knowing(target, right, chain, **change))
    report = evaluate_prompts(runner, PROMPTS, EvalOptions(max_new_tokens=NEW, batch=batch))
    return replace(report, about={"drafter": runner.drafter})


# ---------------------------------------------------------------- greedy


TREES = [(0.1, False, 4, 1, 1.6), (0.5, False, 4, 1.6, 3), (1.0, False, 4, 3, 5)]
CHAINS = [(0.7, True, 1, 1.6, 5), (0.7, True, 3, 1.6, 5)]


@pytest.mark.parametrize(("right", "chain", "batch", "low", "high"), [*TREES, *CHAINS])
def test_greedy_drafts_write_the_targets_own_text(
    target: TransformersModel, right: float, chain: bool, batch: int, low: float, high: float
) -> None:
    """Mostly wrong and mostly right ones; every row has a tree of its own and ends when it likes."""
    report, depth = evaluated(target, right, chain, batch), K if chain else DEPTH
    assert (report.lossless, report.prompts) == (True, 4)
    assert low < report.acceptance_length < high
    assert report.about["drafter"].widths == {depth + 1}
    assert (report.num_drafts, len(report.acceptance_by_position)) == (K, depth)
    falling = sorted(report.acceptance_by_position, reverse=True)
    assert chain or list(report.acceptance_by_position) == falling


WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 3, "use_sliding_window": True}
WINDOWED |= {"std": 0.3}


@pytest.mark.parametrize(
    ("family", "chain", "shape"),
    [
        ("exaone4", True, {}),  # windows of 8 tokens
        ("llama4_text", True, {}),  # chunks of 8
        ("qwen3", False, {**WINDOWED, "sliding_window": 3}),
        ("qwen3", False, {**WINDOWED, "sliding_window": 8}),
    ],
)
def test_a_token_sees_the_window_or_chunk_of_its_own_path(
    tmp_path: Path, family: str, chain: bool, shape: dict[str, Any]
) -> None:
    report = evaluated(opened(tiny_target(tmp_path, family, **shape)), 0.7, chain, batch=4)
    assert report.lossless
    assert report.acceptance_length > 1.5


@pytest.mark.parametrize(
    ("family", "batch"), [("qwen3_next", 3), ("qwen3_5_text", 1), ("falcon_h1", 3), ("lfm2", 3)]
)
def test_states_that_cannot_be_overwritten_go_back_to_what_each_row_accepted(
    tmp_path: Path, family: str, batch: int
) -> None:
    """Of linear attention, Mamba beside attention, and convolutions; prompts of 1 to 20 tokens."""
    report = evaluated(opened(tiny_target(tmp_path, family)), 0.7, chain=True, batch=batch)
    assert (report.lossless, report.ties) == (True, ())
    assert 2 < report.acceptance_length < 4.5
    first, *_, last = report.acceptance_by_position
    assert last < first < 0.9


def test_recurrent_layers_read_no_tree(tmp_path: Path) -> None:
    target = opened(tiny_target(tmp_path, "qwen3_5_text"))
    tokens_BT, request = torch.zeros(1, 3, dtype=torch.long), FeatureRequest((), True, "float32")
    seen_BTT = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    given = target.allocate(1, 8), tokens_BT, tokens_BT[:, 0], 3, request, seen_BTT
    with pytest.raises(UsageError, match=r"drafts trees, and target .* has recurrent layers"):
        target.forward(*given)


def test_a_verifier_that_accepts_everything_is_caught(
    target: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gullible(logits_BTV: Tensor, proposal: Proposal, *_: object) -> tuple[Tensor, ...]:
        tokens_BT = torch.cat([proposal.tokens_BK, logits_BTV[:, -1:].argmax(-1)], 1)
        counts_B = torch.full_like(tokens_BT[:, 0], tokens_BT.shape[1])
        return tokens_BT, counts_B, counts_B - 1

    monkeypatch.setattr(decode, "verify", gullible)
    runner = EagerRunner(target, drafter := Knowing(target, 0.5, chain=True))
    drafter.features = [{}] * len(PROMPTS)  # of other tokens than the target's own
    with pytest.raises(DraftcoreError, match="not lossless"):
        evaluate_prompts(runner, PROMPTS, EvalOptions(max_new_tokens=16))


def test_in_half_precision_a_tie_is_settled_by_the_targets_own_token(target_folder: Path) -> None:
    """The draft's output is altered at one token; with a bound above the gap that is a tie."""
    target = opened(target_folder, "bfloat16")
    runner = EagerRunner(target, drafter := Knowing(target, 0.5, chain=True))
    drafter.features = [{}] * len(PROMPTS)  # rounded otherwise
    config = EvalOptions(max_new_tokens=12, tie_bound=100.0)
    (reference,) = target.generate([PROMPTS[0]], 12)
    altered = [*reference[:5], (reference[5] + 1) % 256, *reference[6:]]
    wrong = Decoded(PROMPTS[0], altered, [2, 3, 4], [4, 4, 4])
    ties = resolve_ties(runner, wrong, reference, config)
    assert next(tie.position for tie in ties) == 5
    assert wrong.tokens == reference
    assert sum(wrong.accepted) + len(wrong.accepted) >= len(reference) - 2
    strict = config.model_copy(update={"tie_bound": 1e-9})
    with pytest.raises(DraftcoreError, match="not lossless"):
        resolve_ties(runner, Decoded(PROMPTS[0], altered[:6], [2, 2], [4, 4]), reference, strict)


def random_chain(rows: int, V: int = 7) -> tuple[Tensor, Proposal]:
    """Logits, and a chain whose distributions are not far from the target's."""
    random = torch.Generator().manual_seed(0)
    logits_BTV = 2 * torch.randn(rows, K + 1, V, generator=random)
    noise_BKV = torch.randn(rows, K, V, generator=random)
    probs_BKV = torch.softmax(logits_BTV[:, :K] + 0.5 * noise_BKV, -1)
    drafts = torch.multinomial(probs_BKV.flatten(0, 1), 1, generator=random).view(rows, K)
    return logits_BTV, Proposal(drafts, probs_BKV)


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("counted", [False, True])
def test_a_chain_given_as_a_tree_is_judged_as_the_chain(temperature: float, counted: bool) -> None:
    logits_BTV, chain = random_chain(500)
    if counted:
        chain = replace(chain, counts_B=torch.arange(500) % (K + 1))
    parents_BK = (torch.arange(K) - 1).expand(500, K)
    tree, seen_BTT = replace(chain, parents_BK=parents_BK), lineage(parents_BK)
    generators = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    tokens_BT, counts_B, room_B = verify(logits_BTV, chain, temperature, generators[0])
    *found, path_BP = verify_tree(logits_BTV, tree, temperature, generators[1], seen_BTT, depth=K)
    assert torch.equal(found[1], counts_B)
    assert torch.equal(found[2], room_B)
    assert len(set(counts_B.tolist())) > 5
    for ours, theirs, count in zip(found[0], tokens_BT, counts_B, strict=True):
        assert torch.equal(ours[:count], theirs[:count])
    assert torch.equal(path_BP, torch.arange(K + 1).expand(500, -1))


def test_verifying_a_tree_waits_for_nothing(target: TransformersModel) -> None:
    parents_BK = torch.tensor([[-1, -1, 0], [-1, 0, 1]])
    tree = Proposal(torch.zeros_like(parents_BK), None, parents_BK)
    logits_BTV = torch.zeros(2, 4, 5)

    def work() -> Tensor:
        seen_BTT = lineage(parents_BK)
        target.masks(seen_BTT.sum(-1), 9, seen_BTT)
        return verify_tree(logits_BTV, tree, 0, torch.Generator(), seen_BTT, depth=2)[1]

    RecordingBackend().capture_one(ShapeKey(2), work)
    assert work().tolist() == [3, 3]


# ---------------------------------------------------------------- sampling


def chi_square(observed: Tensor, expected: Tensor) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def test_sampling_refuses_a_draft_without_probabilities(target: TransformersModel) -> None:
    """Its drafts cannot be judged: they would be decoded greedily, and the report would be wrong."""
    runner = EagerRunner(target, Knowing(target, 1.0, chain=True))
    with pytest.raises(UsageError, match=r"probabilities .*\n.*eval.temperature=0"):
        evaluate_prompts(runner, PROMPTS, EvalOptions(max_new_tokens=4, temperature=0.7))


V, DRAWS = 5, 60_000
PARENTS = [-1, -1, 0, 0, 1, -1, 4]


def drawn(q_CV: Tensor, way: str, random: torch.Generator) -> Proposal:
    """Draw a tree a row; q_CV[c] is the draft's distribution after token c, and V is the root."""
    tokens, probs = list[Tensor](), list[Tensor]()
    for node, parent in enumerate(PARENTS):
        after_B = torch.full((DRAWS,), V) if parent < 0 else tokens[parent]
        q_BV = q_CV[after_B].clone()
        for sibling in range(node):
            if PARENTS[sibling] == parent and way != "independently":
                q_BV.scatter_(1, tokens[sibling][:, None], 0)
        if way == "chosen":  # the most probable one, without a draw
            q_BV = torch.nn.functional.one_hot(q_BV.argmax(-1), V).float()
        q_BV /= q_BV.sum(-1, keepdim=True)
        probs.append(q_BV)
        tokens.append(torch.multinomial(q_BV, 1, generator=random)[:, 0])
    parents_BK = torch.tensor(PARENTS).expand(DRAWS, -1)
    return Proposal(torch.stack(tokens, 1), torch.stack(probs, 1), parents_BK)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("way", ["independently", "without replacement", "chosen"])
def test_sampled_trees_keep_the_targets_distribution(way: str, adaptive: bool) -> None:
    """Chi-square over the first two tokens of 60,000 rounds of a draft that is badly wrong."""
    random = torch.Generator().manual_seed(2)
    logits_CV = 1.5 * torch.randn(V + 1, V, generator=random)
    q_CV = torch.rand(V + 1, V, generator=random) + 0.1
    tree = drawn(q_CV, way, random)
    if adaptive:
        tree = replace(tree, counts_B=torch.arange(DRAWS) % (len(PARENTS) + 1))
    read_BT = torch.nn.functional.pad(tree.tokens_BK, (1, 0), value=V)
    seen_BTT = lineage(torch.tensor(PARENTS).expand(DRAWS, -1))
    tokens_BP, counts_B, *_ = verify_tree(logits_CV[read_BT], tree, 0.7, random, seen_BTT, depth=3)
    p_CV = (logits_CV / 0.7).softmax(-1)
    assert counts_B.max() == 4
    # Where a round gave one token, the next would be the target's.
    later_B = torch.multinomial(p_CV[tokens_BP[:, 0]], 1, generator=random)[:, 0]
    second_B = torch.where(counts_B > 1, tokens_BP[:, 1], later_B)
    observed = torch.bincount(tokens_BP[:, 0] * V + second_B, minlength=V * V).double()
    expected = (p_CV[V][:, None] * p_CV[:V]).flatten().double() * DRAWS
    assert chi_square(observed, expected) < 51.2  # 0.999, 24 degrees
    rivals = (q_CV[V] / q_CV[V].sum())[:, None] * p_CV[:V]  # as if drafts were taken unverified
    assert chi_square(rivals.flatten() * DRAWS, expected) > 1000


# ---------------------------------------------------------------- fewer tokens than it might


@pytest.mark.parametrize("chain", [True, False])
def test_what_does_not_count_is_no_chance_either(target: TransformersModel, chain: bool) -> None:
    """All drafts are right, and the first two of a row count."""
    drafter = Knowing(target, 1.0, chain=chain, counts_B=torch.full((4,), 2))
    decoded = speculate(EagerRunner(target, drafter), PROMPTS, EvalOptions(max_new_tokens=13))
    for one, text, prompt in zip(decoded, drafter.texts, PROMPTS, strict=True):
        assert [*prompt, *one.tokens] == text[: len(prompt) + 13]
        assert one.accepted == one.room  # of a tree, as deep as its first two nodes
        assert set(one.room[:-1]) <= ({2} if chain else {1, 2})


def test_the_report_counts_chances_by_what_counted(target: TransformersModel) -> None:
    drafter = Knowing(target, 1.0, chain=True, counts_B=torch.tensor([2]))
    config = EvalOptions(max_new_tokens=13, batch=1)
    report = evaluate_prompts(EagerRunner(target, drafter), PROMPTS, config)
    assert report.acceptance_by_position == (1, 1, *[0] * (K - 2))
    assert report.acceptance_length == 3


# ---------------------------------------------------------------- checked when it comes


ROWS = len(PROMPTS)
WRONG: dict[str, tuple[bool, dict[str, Any], str]] = {
    "tokens of another width": (
        True, {"tokens_BK": torch.zeros(ROWS, K + 1).long()},
        r"tokens_BK of shape \(4, 10\) in torch.int64\n  tokens_BK are int64, .* \(4, 9\)",
    ),
    "tokens of another type": (True, {"tokens_BK": torch.zeros(ROWS, K).int()}, "in torch.int32"),
    "tokens in a list": (True, {"tokens_BK": [[1] * K] * ROWS}, "tokens_BK as a list"),
    "counts of a column": (
        True, {"counts_B": torch.ones(ROWS, 1).long()},
        r"counts_B of shape \(4, 1\) .*\n.* of shape \(4,\)",
    ),
    "a token outside": (
        True, {"tokens_BK": torch.full((ROWS, K), 5000)},
        r"tokens_BK\[0, 0\] = 5000\n  tokens_BK are int64, ids from 0 to",
    ),
    "a count too large": (True, {"counts_B": torch.tensor([1, 2, K + 1, 0])}, r"counts_B\[2\] = 10"),
    "a parent behind its child": (
        False, {"parents_BK": torch.tensor([[-1, 2, 1, 0, 0, 0, 0, 0, 0]] * ROWS)},
        r"parents_BK\[0, 1\] = 2\n  .* earlier nodes or -1",
    ),
    "a path that is too long": (
        False, {"parents_BK": (torch.arange(K) - 1).expand(ROWS, K)},
        r"a path of 9 nodes\n  its depth is 4",
    ),
    "no parents": (False, {"parents_BK": None}, r"no parents_BK\n  a drafter of trees has a depth"),
    "a tree of a drafter of chains": (
        True, {"parents_BK": torch.full((ROWS, K), -1)}, r"parents_BK\n  a drafter of trees has a depth",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_proposal_is_refused_by_its_name(target: TransformersModel, name: str) -> None:
    chain, change, said = WRONG[name]
    runner = EagerRunner(target, Knowing(target, 1.0, chain=chain, **change))
    with pytest.raises(DraftcoreError, match=rf"^Knowing.propose returned (.|\n)*{said}"):
        speculate(runner, PROMPTS, EvalOptions(max_new_tokens=NEW))


def test_the_draft_of_another_type_is_answered_with_what_to_return(
    target: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Knowing, "propose", lambda self, *given: (None, None))
    with pytest.raises(DraftcoreError, match=r"returned a tuple\n  it returns Proposal\("):
        speculate(EagerRunner(target, Knowing(target, 1.0)), PROMPTS, EvalOptions(max_new_tokens=4))


# ---------------------------------------------------------------- the report


def report_of(*decoded: tuple[Sequence[int], list[int], list[int]], num_drafts: int) -> Report:
    return Report.count(
        [Decoded([], list(tokens), accepted, room) for tokens, accepted, room in decoded],
        num_drafts, num_drafts, lossless=True, ties=(), draft_seconds=1, verify_seconds=2, plain_seconds=1.5,
    )  # fmt: skip


def test_acceptance_counts_only_tokens_that_are_kept() -> None:
    report = report_of((range(5), [2, 0], [3, 3]), (range(3), [1], [2]), num_drafts=3)
    assert report.acceptance_length == pytest.approx(6 / 3)
    assert report.acceptance_by_position == pytest.approx((2 / 3, 1 / 3, 0.0))
    assert report.acceptance_given_before == pytest.approx((2 / 3, 1 / 2, 0.0))
    assert report.speed_here == pytest.approx(2 * 1.5 / (1 + 2))
    low, high = report.acceptance_length_95
    assert low <= report.acceptance_length <= high
