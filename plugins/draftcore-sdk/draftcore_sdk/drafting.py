"""What every drafter must make of what it is told, and how it must draw.

The texts are the learned ones, cut at unequal lengths, with the features that training saw: a drafter
is asked by its contract alone, without a target that decodes.

Shape letters: B batch, T tokens, K drafts, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from draftcore_eval.proposals import checked_proposal, depth_of
from draftcore_graphs.states import fault
from torch import Tensor
from torch.utils._pytree import tree_leaves

from draftcore.contracts.algorithm import Drafter, Proposal, Sample
from draftcore.errors import UsageError
from draftcore_sdk.plain import open_target
from draftcore_sdk.suite import Suite, once
from draftcore_sdk.workbench import VOCABULARY, Bench, global_seed, require_same_bits, snapshot

NATS = 1e-3  # between log-probabilities; orders of summation make 1e-5, what is wrong 1e-2 and more
FLOOR = 1e-6  # probabilities below it are not told apart
EARLY, FAR = 24, 300  # tokens of a text that a drafter was told
LENGTHS, LONGEST = (19, 7, 24), 30  # of the prompts, of a round
SLOTS = 255  # positions of a text with its drafts: no multiple of what memory is rounded to
RARE, DRAWS = 0.012, 4096  # what rare tokens have together; how often is drawn
FREQUENT = 0.9  # of a draft vocabulary; some tokens may be in it whatever the counts are
ROUNDS = ((1, 99, 2), (99, 2, 1))  # tokens that are accepted of three rows; 99 is as many as can be


class Drafting(Suite):
    """The part of `algorithms.AlgorithmSuite` that tells a drafter texts and looks at its drafts."""

    def test_a_state_is_tensors_with_the_batch_first(self, bench: Bench) -> None:
        """Graphs narrow a state to its first rows, and would freeze anything else in it."""
        why = fault(bench.drafter(bench.noisy).allocate(3, 16), 3)
        assert why is None, why

    def test_proposals_have_shapes_and_probabilities_as_they_must(self, bench: Bench) -> None:
        if hasattr(bench.options, "num_drafts"):
            with suppress(UsageError):
                alone = bench.chosen(num_drafts=1).drafter(bench.noisy)
                Told(alone, bench.texts, LENGTHS).drafts()
        told = Told(bench.drafter(bench.noisy), bench.texts, LENGTHS)
        assert told.propose().probs_BKV is None, "greedy proposals have no probabilities"
        drawn = told.propose(0.8)
        assert drawn.probs_BKV is not None
        # Rejection sampling is exact for what sums to one; a softmax in fp32 is off by 1e-6.
        off = float((drawn.probs_BKV.sum(-1) - 1).abs().max())
        assert off < 5e-6, f"probabilities add up to 1 up to {off:.2g}"

    @once
    def test_proposing_changes_nothing(self, bench: Bench) -> None:
        told = Told(bench.drafter(bench.noisy), bench.texts, LENGTHS)
        first = told.drafts()
        for _ in range(3):
            told.drafts().require(first, "it proposes again, and nothing was accepted in between")

    @once
    def test_drafting_for_a_target_in_bf16_leaves_the_weights_in_fp32(self, bench: Bench) -> None:
        """They are those that are trained: an evaluation on the way must not round them."""
        spec = open_target(bench.example.spec.path, device="cpu", dtype="bfloat16")
        draft = bench.build()
        before, weights = snapshot(draft), [*map(id, draft.module.parameters())]
        drafter = bench.drafter(draft, spec.load_model())
        require_same_bits(snapshot(draft), before, "making a drafter changes the draft: ")
        half = {n: x.to(torch.bfloat16) for n, x in bench.texts[0].features.items()}
        Told(drafter, [dataclasses.replace(bench.texts[0], features=half)], [9]).drafts()
        require_same_bits(snapshot(draft), before, "drafting changes the draft: ")
        same = [*map(id, draft.module.parameters())] == weights
        assert same, "it replaces the draft's parameters, which the optimizer has"

    def test_what_pads_prompts_and_rounds_changes_no_draft(self, bench: Bench) -> None:
        """Whatever stands behind `lengths_B` tokens of a prompt and `counts_B` of a round."""
        drafter = bench.drafter(bench.noisy)
        cases = {"prompts (beyond lengths_B)": (), "rounds (beyond counts_B)": ROUNDS}
        for what, rounds in cases.items():
            one, other = (Told(drafter, bench.texts, LENGTHS, rounds, seed) for seed in (1, 2))
            one.drafts().require(other.drafts(), f"the drafter reads what pads {what}")

    def test_a_prompt_may_be_long_or_a_single_token(self, bench: Bench) -> None:
        """Beside one of another length it is drafted for as if it were alone."""
        drafter, texts = bench.drafter(bench.noisy), bench.texts[:2]
        lengths = [len(texts[0].token_ids_T) - 1, 1]
        told = Told(drafter, texts, lengths)
        together = told.drafts()
        for row, length in enumerate(lengths):
            alone = Told(drafter, texts[row : row + 1], [length], pad=0).drafts()
            how = f"a prompt of {length} tokens is drafted for otherwise in a batch than alone"
            together.row(row).require(alone, f"{how}\nthe rows of a batch count for each other")
        other = Told(drafter, texts[::-1], lengths[::-1])
        how = "after another batch's prefill() a batch is drafted for otherwise"
        how += "\nthe drafter holds what the state is to hold"
        together.require(told.drafts(), how)
        again = Told(drafter, texts, lengths, state=other.state)
        together.require(again.drafts(), "prefill() leaves of a state what was in it before")

    @once
    def test_a_state_holds_as_many_positions_as_are_asked_for(self, bench: Bench) -> None:
        """A decoder asks for those of the longest text, and of the drafts past its end."""
        drafter, text = bench.drafter(bench.noisy), bench.texts[:1]
        told: Any = {"drafter": drafter, "texts": text, "lengths": [SLOTS - drafter.num_drafts - 1]}
        (short, long) = (Told(**told, pad=0, span=span).drafts() for span in (SLOTS, 2 * SLOTS))
        short.require(long, f"a text that ends with max_len={SLOTS} is drafted for otherwise")

    @once
    def test_neighbours_are_told_apart_far_into_a_text(self, bench: Bench) -> None:
        """As early on, where swapping two rows, features of t and token t+1, moves the next draft.

        In bf16 positions 256 and 257 are one; a table of positions may end there.
        """
        drafter, text, moves = bench.drafter(bench.noisy), bench.texts[0], list[list[float]]()
        for told in (EARLY, FAR):
            texts = [text, *(swapped(text, at) for at in range(told - 9, told - 3))]
            drawn = Told(drafter, texts, [told] * len(texts), pad=0).propose(1.0)
            assert drawn.probs_BKV is not None
            plain, *others = drawn.probs_BKV[:, 0]
            moves.append([nats(other, plain) for other in others])
        for early, far in zip(*moves, strict=True):
            assert far >= 2e-3 * early or early < NATS, (
                f"after {EARLY} tokens swapping two neighbours moves a draft by {early:.2g} nats, after "
                f"{FAR} by {far:.2g}: do their positions become one? Count them in fp32, to any length"
            )

    @once
    def test_a_part_of_the_vocabulary_is_of_the_most_frequent_tokens(self, bench: Bench) -> None:
        """By the counts of the data, of which the rarest come first here."""
        counts = {number * 101 % VOCABULARY: 1 + number for number in range(VOCABULARY)}
        data = dataclasses.replace(bench.summary, token_counts=counts)
        drafter = bench.drafter(bench.shaken(0.1, data=data))
        drawn = Told(drafter, bench.texts, LENGTHS).propose(1.0)
        assert drawn.probs_BKV is not None
        drawable_BKV = drawn.probs_BKV > 0
        if not bool((drawable_BKV == drawable_BKV[0, 0]).all()):
            pytest.skip("other tokens can be drawn in each place")
        drawable = drawable_BKV[0, 0].nonzero()[:, 0].tolist()
        if len(drawable) == VOCABULARY:
            pytest.skip("it drafts all tokens")
        frequent = {*list(counts)[-len(drawable) :]}
        share = len(frequent.intersection(drawable)) / len(drawable)
        assert share > FREQUENT, (
            f"of the {len(drawable)} tokens that it drafts, {share:.0%} are among the most frequent "
            "ones: take those of which `DataSummary.token_counts` has most"
        )

    def test_rounds_that_were_accepted_count_as_a_longer_prompt(self, bench: Bench) -> None:
        """What a round leaves behind is what a prefill of the same tokens would have."""
        drafter = bench.drafter(bench.noisy)
        for number in range(1, len(ROUNDS) + 1):
            told = Told(drafter, bench.texts, LENGTHS, ROUNDS[:number])
            whole = Told(drafter, bench.texts, told.lengths)
            how = f"after {number} accept() it drafts otherwise than after prefill() of as many tokens"
            told.drafts().require(whole.drafts(), f"{how}\nit goes on from another token or state")

    @once
    def test_selected_rows_go_on_as_before(self, bench: Bench) -> None:
        told = Told(bench.drafter(bench.noisy), bench.texts, LENGTHS, ROUNDS[:1])
        before = told.drafts()
        told.state = told.drafter.select(told.state, torch.tensor([2, 0]))
        told.texts = told.texts[:2]  # as many
        after = told.drafts()
        for place, row in enumerate((2, 0)):
            how = f"after select([2, 0]) row {row} is drafted for otherwise"
            after.row(place).require(before.row(row), how)

    @once
    def test_a_temperature_sharpens_the_distributions(self, bench: Bench) -> None:
        """At half the temperature, a draft's probabilities are squared and normalised.

        Of the first, and of the second where the first is the same.
        """
        told = Told(bench.drafter(bench.noisy), bench.texts * 32, LENGTHS * 32)
        for hot in (1.0, 0.2):
            plain, half = told.drafts(hot), told.drafts(hot / 2)
            for at in range(1 + bool((plain.parents_BK[0, 1:2] == 0).any())):
                same_B = (plain.drawn_BN[:, :at] == half.drawn_BN[:, :at]).all(1)
                p, found = (one.probs_BKV[same_B, at].double() for one in (plain, half))
                gap = nats(found, p.square() / p.square().sum(-1, keepdim=True))
                said = f"temperature {hot / 2} is another one by {gap:.2g} nats, for draft {at}"
                assert gap < NATS, said

    @once
    def test_draws_come_from_the_generator_that_is_given(self, bench: Bench) -> None:
        told = Told(bench.drafter(bench.build()), bench.texts * 4, LENGTHS * 4)
        with global_seed(1):
            first, state = told.drafts(seed=1), torch.random.get_rng_state()
        with global_seed(2):
            again = told.drafts(seed=1)
        assert torch.equal(first.drawn_BN, again.drawn_BN), "one seed, and other drafts"
        with global_seed(1):
            assert torch.equal(torch.random.get_rng_state(), state), "it draws from torch's own"
        alike = torch.equal(*first.drawn_BN.view(2, 2 * len(LENGTHS), -1))
        assert not alike, "rows of one text draw the same drafts"
        others = (told.drafts(seed=seed).drawn_BN for seed in (2, 3, 4))
        same = all(torch.equal(first.drawn_BN, other) for other in others)
        assert not same, "four seeds, and the same drafts: it seeds a generator itself"

    @once
    def test_a_node_depends_on_what_is_above_and_beside_it(self, bench: Bench) -> None:
        """On nothing else of its row or tree; greedily no token is there twice.

        Whether it counts may depend on all that was drawn before.
        """
        told = Told(bench.drafter(bench.noisy), bench.texts[:1] * 64, LENGTHS[:1] * 64)
        greedy, drawn, known = told.propose(), told.propose(0.5), dict[str, Any]()
        for row, at, _, beside in nodes(greedy):
            token = int(greedy.tokens_BK[row, at])
            assert token not in beside, f"greedily it drafts token {token} twice, side by side"
        assert drawn.probs_BKV is not None
        for row, at, above, beside in nodes(drawn):
            probs_V, said = drawn.probs_BKV[row, at], f"after the drafts {above}, beside {beside}"
            gap = nats(probs_V, known.setdefault(said, probs_V))
            assert gap < NATS, f"{said}, distributions differ by {gap:.2g} nats: of another row?"
            counts = at < int(count_of(drawn)[row])
            said = f"after drawing {drawn.tokens_BK[row, :at].tolist()}"
            same = known.setdefault(said, counts) == counts
            assert same, f"{said}, whether node {at} counts depends on what it draws itself"

    @pytest.mark.parametrize("temperature", [1.0, 200.0])
    def test_sampled_drafts_follow_the_probabilities_they_come_with(
        self, bench: Bench, temperature: float
    ) -> None:
        """Of what was drawn, and counts, the mean probability is the distribution's, within 5 sigma.

        And the share of the rarest tokens, where a high temperature makes all nearly as probable.
        """
        told = Told(bench.drafter(bench.noisy), bench.texts * 64, LENGTHS * 64)
        excess, variance = [0.0, 0.0], [0.0, 4.0]  # a rare token or two are chance
        for seed in range(max(1, DRAWS // (len(told.texts) * told.drafter.num_drafts))):
            drawn = told.propose(temperature, seed)
            assert drawn.probs_BKV is not None
            q, tokens_BK1 = drawn.probs_BKV.double(), drawn.tokens_BK[..., None]
            assert (q.gather(-1, tokens_BK1) > 0).all(), "a token was drawn that has probability 0"
            counted_BK = torch.arange(q.shape[1]) < count_of(drawn)[:, None]
            least, order = q.masked_fill(q == 0, 1.0).topk(8, largest=False)
            rare = torch.zeros_like(q).scatter(-1, order, (least.cumsum(-1) <= RARE).to(q.dtype))
            for number, value in enumerate((q, rare)):
                mean_BK, drawn_BK = (q * value).sum(-1), value.gather(-1, tokens_BK1)[..., 0]
                of_BK = (q * value.square()).sum(-1) - mean_BK.square()
                excess[number] += float((drawn_BK - mean_BK)[counted_BK].sum())
                variance[number] += float(of_BK[counted_BK].sum())
        for what, more, of in zip(("probable", "often rare"), excess, variance, strict=True):
            sigmas = more / (math.sqrt(abs(of)) or 1)
            assert abs(sigmas) < 5, (
                f"drafts that count are {abs(sigmas):.1f} sigma {'more' if more > 0 else 'less'} {what} "
                "than drawn ones\nthey are drawn otherwise, or chosen by what was drawn"
            )


# ---------------------------------------------------------------- telling a drafter


@dataclass
class Drafts:
    """What a drafter proposes: greedily, and drawn at a temperature, with what it drew from.

    Of a row, its tokens, the parents of a tree's nodes and how many count are one list of numbers.
    """

    greedy_BN: Tensor
    drawn_BN: Tensor
    probs_BKV: Tensor
    parents_BK: Tensor

    def row(self, number: int) -> Drafts:
        return Drafts(*(tensor[number : number + 1] for tensor in vars(self).values()))

    def require(self, expected: Drafts, said: str) -> None:
        """The same drafts; the distributions too, of the first and of what follows the same draws."""
        gap = nats(self.probs_BKV[:, 0], expected.probs_BKV[:, 0])
        same_B = (self.drawn_BN == expected.drawn_BN).all(1)
        gap = max(gap, nats(self.probs_BKV[same_B], expected.probs_BKV[same_B]))
        assert gap < NATS, f"{said}\nthe log-probabilities differ by {gap:.2g} nats"
        ours, theirs = self.greedy_BN.tolist(), expected.greedy_BN.tolist()
        assert ours == theirs, f"{said}\nthe drafts are {ours}, not {theirs}"


class Told:
    """A drafter that was told the beginnings of texts, and the rounds after these.

    A round is a number of tokens for every row; `seed` draws what pads prompts and rounds.
    """

    def __init__(
        self, drafter: Drafter, texts: Sequence[Sample], lengths: Sequence[int],
        rounds: Sequence[Sequence[int]] = (), seed: int = 0, pad: int = 2, state: Any = None,
        span: int = 0,
    ) -> None:  # fmt: skip
        self.drafter, self.texts, self.lengths = drafter, texts, list(lengths)
        self.generator = torch.Generator().manual_seed(seed)
        width = depth_of(drafter) + 1
        span = span or max(lengths) + pad + (len(rounds) + 1) * (drafter.num_drafts + 1)
        self.state = drafter.allocate(len(texts), span) if state is None else state
        tokens_BT, features = self._window([0] * len(texts), lengths, max(lengths) + pad, 0)
        next_B = torch.stack([t.token_ids_T[n] for t, n in zip(texts, lengths, strict=True)])
        self._tell("prefill", tokens_BT, torch.tensor(self.lengths), features, next_B)
        for counts in rounds:
            drafter.propose(self.state)
            counts = [min(count, width, LONGEST) for count in counts]
            tokens_BK, features = self._window(self.lengths, counts, width, 1)
            self._tell("accept", tokens_BK, features, torch.tensor(counts))
            self.lengths = [sum(pair) for pair in zip(self.lengths, counts, strict=True)]

    def _tell(self, method: str, *given: Any) -> None:
        """Tokens and counts are the verifier's, features the target's: they stay as they are."""
        before = copy.deepcopy(given)
        getattr(self.drafter, method)(self.state, *given)
        same = all(map(torch.equal, tree_leaves(given), tree_leaves(before)))
        assert same, f"the drafter alters what is given to {method}()"

    def _window(
        self, starts: Sequence[int], counts: Sequence[int], width: int, ahead: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cut `counts` places out of the texts, tokens so many ahead of features, and pad them."""
        cuts = list(zip(self.texts, starts, counts, strict=True))
        rows = [text.token_ids_T[start + ahead :][:count] for text, start, count in cuts]
        features = {
            name: self._padded([text.features[name][at:][:n] for text, at, n in cuts], width)
            for name in self.drafter.request.names
        }
        return self._padded(rows, width), features

    def _padded(self, rows: Sequence[Tensor], width: int) -> Tensor:
        """Stack rows, with rubbish behind each up to the width."""
        shape = (len(rows), width, *rows[0].shape[1:])
        padded = torch.randint(200, shape, generator=self.generator).to(rows[0].dtype)
        for place, row in zip(padded, rows, strict=True):
            place[: len(row)] = row
        return padded

    def drafts(self, temperature: float = 1.0, seed: int = 0) -> Drafts:
        greedy, drawn = self.propose(), self.propose(temperature, seed)
        assert drawn.probs_BKV is not None
        return Drafts(numbers(greedy), numbers(drawn), drawn.probs_BKV, parents_of(drawn))

    def propose(self, temperature: float = 0.0, seed: int = 0) -> Proposal:
        """Ask for a round, which is checked as a decoder does."""
        generator = torch.Generator().manual_seed(seed)
        found, rows = self.drafter.propose(self.state, temperature, generator), len(self.texts)
        return checked_proposal(found, self.drafter, rows, VOCABULARY, temperature, values=True)


def swapped(text: Sample, at: int) -> Sample:
    """Return a text whose features there and at the next place are swapped, each with the token after it."""
    places = [*range(len(text.token_ids_T))]
    rows, tokens = ([*places[:i], i + 1, i, *places[i + 2 :]] for i in (at, at + 1))
    features = {name: value[rows] for name, value in text.features.items()}
    return dataclasses.replace(text, token_ids_T=text.token_ids_T[tokens], features=features)


def parents_of(proposal: Proposal) -> Tensor:
    """Return a tree's parents; a chain is a tree, too."""
    if proposal.parents_BK is not None:
        return proposal.parents_BK
    return (torch.arange(proposal.tokens_BK.shape[1]) - 1).expand_as(proposal.tokens_BK)


def count_of(proposal: Proposal) -> Tensor:
    """Return how many nodes of each row count."""
    (B, K), counts_B = proposal.tokens_BK.shape, proposal.counts_B
    return torch.full((B,), K) if counts_B is None else counts_B


def nodes(proposal: Proposal) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Yield the row and place of each node, the tokens above it, and the siblings' before it."""
    for row, parents in enumerate(parents_of(proposal).tolist()):
        tokens, above = proposal.tokens_BK[row].tolist(), {-1: list[int]()}
        for at, parent in enumerate(parents):
            above[at] = [*above[parent], tokens[at]]
            beside = [tokens[one] for one in range(at) if parents[one] == parent]
            yield row, at, above[parent], beside


def numbers(proposal: Proposal) -> Tensor:
    """Tokens, parents and counts of each row, side by side."""
    return torch.cat([proposal.tokens_BK, parents_of(proposal), count_of(proposal)[:, None]], 1)


def nats(found: Tensor, expected: Tensor) -> float:
    """How far log-probabilities are apart at most."""
    logs = [probs.clamp_min(FLOOR).log() for probs in (found, expected)]
    return float((logs[0] - logs[1]).abs().amax()) if found.numel() else 0.0
