"""What every drafter must make of what it is told, and how it must draw.

The texts are the learned ones, cut at unequal lengths, with the features that training saw: a drafter
is asked by its contract alone, without a target that decodes.

Shape letters: B batch, T tokens, K drafts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Drafter, Proposal, Sample
from draftcore.evaluation.proposals import depth_of
from draftcore_sdk.algorithm_training import Training
from draftcore_sdk.check import variants
from draftcore_sdk.workbench import STEPS, Bench, global_seed

NATS = 1e-3  # between log-probabilities; orders of summation make 1e-5, what is wrong 1e-2 and more
EXACT = 1e-4  # between a loss and -log p; at most 5e-6 in three algorithms, features in half 4e-4
FLOOR = 1e-6  # probabilities below it are not told apart
LENGTHS, LONGEST = (19, 7, 24), 30  # of the prompts, of a round
ROUNDS = ((1, 99, 2), (99, 2, 1))  # tokens that are accepted of three rows; 99 is as many as can be


class Drafting(Training):
    """The part of `algorithms.AlgorithmSuite` that tells a drafter texts and looks at its drafts."""

    def test_what_pads_prompts_and_rounds_changes_no_draft(self, bench: Bench) -> None:
        """Whatever stands behind `lengths_B` tokens of a prompt and `counts_B` of a round."""
        drafter = bench.drafter(bench.trained.draft)
        cases = {"prompts (beyond lengths_B)": (), "rounds (beyond counts_B)": ROUNDS}
        for what, rounds in cases.items():
            one, other = (Told(drafter, bench.texts, LENGTHS, rounds, seed) for seed in (1, 2))
            one.drafts().require(other.drafts(), f"the drafter reads what pads {what}")

    def test_rounds_that_were_accepted_count_as_a_longer_prompt(self, bench: Bench) -> None:
        """What a round leaves behind is what a prefill of the same tokens would have."""
        drafter = bench.drafter(bench.trained.draft)
        for number in range(1, len(ROUNDS) + 1):
            told = Told(drafter, bench.texts, LENGTHS, ROUNDS[:number])
            whole = Told(drafter, bench.texts, told.lengths)
            how = f"after {number} accept() it drafts otherwise than after prefill() of as many tokens"
            told.drafts().require(whole.drafts(), f"{how}\nit goes on from another token or state")

    def test_a_prompt_may_be_long_or_a_single_token(self, bench: Bench) -> None:
        """Beside one of another length it is drafted for as if it were alone."""
        drafter, texts = bench.drafter(bench.trained.draft), bench.texts[:2]
        lengths = [len(texts[0].token_ids_T) - 1, 1]
        told = Told(drafter, texts, lengths)
        together = told.drafts()
        for row, length in enumerate(lengths):
            alone = Told(drafter, texts[row : row + 1], [length], pad=0).drafts()
            together.row(row).require(alone, f"a prompt of {length} tokens in a batch and alone")
        Told(drafter, texts[::-1], lengths[::-1])
        how = "after another batch's prefill()\nthe drafter holds what the state is to hold"
        together.require(told.drafts(), how)

    def test_selected_rows_go_on_as_before(self, bench: Bench) -> None:
        told = Told(bench.drafter(bench.trained.draft), bench.texts, LENGTHS, ROUNDS[:1])
        before = told.drafts()
        told.state = told.drafter.select(told.state, torch.tensor([2, 0]))
        after = told.drafts()
        for place, row in enumerate((2, 0)):
            after.row(place).require(before.row(row), f"row {row} of select()")

    def test_a_temperature_sharpens_the_distributions(self, bench: Bench) -> None:
        """At half the temperature, the first draft's probabilities are squared and normalised."""
        told = Told(bench.drafter(bench.trained.draft), bench.texts, LENGTHS)
        plain, half = (told.drafts(t).probs_BKV[:, 0].double() for t in (1.0, 0.5))
        gap = nats(half, plain.square() / plain.square().sum(-1, keepdim=True))
        assert gap < NATS, f"a temperature of 0.5 is another one by {gap:.2g} nats"

    def test_draws_come_from_the_generator_that_is_given(self, bench: Bench) -> None:
        told = Told(bench.drafter(bench.build()), bench.texts * 4, LENGTHS * 4)
        with global_seed(1):
            first, state = told.drafts(seed=1), torch.random.get_rng_state()
        with global_seed(2):
            again = told.drafts(seed=1)
        assert torch.equal(first.drawn_BN, again.drawn_BN), "one seed, and other drafts"
        with global_seed(1):
            assert torch.equal(torch.random.get_rng_state(), state), "it draws from torch's own"
        others = (told.drafts(seed=seed).drawn_BN for seed in (2, 3, 4))
        same = all(torch.equal(first.drawn_BN, other) for other in others)
        assert not same, "four seeds, and the same drafts: it seeds a generator itself"

    def test_the_drafter_is_as_sure_as_training_made_it(self, bench: Bench) -> None:
        """The mean probability of what a draft knows by heart; 0.96 to 0.99 in six algorithms."""
        known = bench.known(bench.trained.draft)
        least = 0.93 if bench.trained.knows_by_heart else 0.0
        assert known.sure >= least, (
            f"the right tokens have a mean probability of {known.sure:.2f}, expected {least}\n"
            "logits or states are scaled, or normed once more, where training does not"
        )

    # ------------------------------------------------------------ capability `cross_entropy`

    def test_training_minimises_the_cross_entropy_of_the_drafter(self, bench: Bench) -> None:
        """Its loss of the last token of a short text is -log p of the drafter, for any last token.

        Of a text of n tokens, from the second on to be learned, the last is drafted first by who
        was told n-2, second by who was told n-3, and so on; what these weigh is for training to say.
        """
        bench.require("cross_entropy")
        for name, value in variants(bench.offer):
            if isinstance(value, str) and bench.data.get(name) == value:
                pytest.skip(f"the capability is of the default options, and {name} is {value}")
        for fit in first_drafts(bench):
            gap = fit.gap
            assert gap < EXACT, fit.explained


# ---------------------------------------------------------------- telling a drafter


@dataclass
class Drafts:
    """What a drafter proposes: greedily, and drawn at a temperature, with what it drew from.

    Of a row, its tokens, the parents of a tree's nodes and how many count are one list of numbers.
    """

    greedy_BN: Tensor
    drawn_BN: Tensor
    probs_BKV: Tensor

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
        rounds: Sequence[Sequence[int]] = (), seed: int = 0, pad: int = 2,
    ) -> None:  # fmt: skip
        self.drafter, self.texts, self.lengths = drafter, texts, list(lengths)
        self.generator = torch.Generator().manual_seed(seed)
        width = depth_of(drafter) + 1
        span = max(lengths) + pad + (len(rounds) + 1) * (drafter.num_drafts + 1)
        self.state = drafter.allocate(len(texts), span)
        tokens_BT, features = self._window([0] * len(texts), lengths, max(lengths) + pad, 0)
        next_B = torch.stack([t.token_ids_T[n] for t, n in zip(texts, lengths, strict=True)])
        drafter.prefill(self.state, tokens_BT, torch.tensor(self.lengths), features, next_B)
        for counts in rounds:
            drafter.propose(self.state)
            counts = [min(count, width, LONGEST) for count in counts]
            tokens_BK, features = self._window(self.lengths, counts, width, 1)
            drafter.accept(self.state, tokens_BK, features, torch.tensor(counts))
            self.lengths = [sum(pair) for pair in zip(self.lengths, counts, strict=True)]

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
        greedy = self.drafter.propose(self.state)
        generator = torch.Generator().manual_seed(seed)
        drawn = self.drafter.propose(self.state, temperature, generator)
        assert drawn.probs_BKV is not None, "sampled proposals need their probabilities"
        return Drafts(numbers(greedy), numbers(drawn), drawn.probs_BKV)


def numbers(proposal: Proposal) -> Tensor:
    """Tokens, parents and counts of each row, side by side."""
    counts_B1 = None if proposal.counts_B is None else proposal.counts_B[:, None]
    parts = (proposal.tokens_BK, proposal.parents_BK, counts_B1)
    return torch.cat([part for part in parts if part is not None], 1)


def nats(found: Tensor, expected: Tensor) -> float:
    """How far log-probabilities are apart at most."""
    logs = [probs.clamp_min(FLOOR).log() for probs in (found, expected)]
    return float((logs[0] - logs[1]).abs().amax()) if found.numel() else 0.0


# ---------------------------------------------------------------- training and the drafter


@dataclass
class Fit:
    """The loss of some tokens in training, and -log p of each in the drafter, by places."""

    loss_N: Tensor
    surprise_NP: Tensor  # place k: as draft k of who was told so many tokens less

    @property
    def gap(self) -> float:
        """By how much the loss is no weighted sum of these at most, in nats of a draft of weight 1."""
        solved = torch.linalg.lstsq(self.surprise_NP, self.loss_N[:, None])
        weights_P: Tensor = solved.solution[:, 0]
        weight = float(weights_P.sum())
        rest_N = self.loss_N - self.surprise_NP @ weights_P
        return float(rest_N.abs().max()) / weight if weight > 1e-6 else math.inf

    @property
    def explained(self) -> str:
        ones_N1 = torch.ones_like(self.surprise_NP[:, :1])
        places = self.surprise_NP.shape[1]
        if float(self.loss_N.std()) < 1e-6:
            cause = "the loss is the same whatever token that is: another one is the label"
        elif Fit(self.loss_N, torch.cat([self.surprise_NP, ones_N1], 1)).gap < EXACT:
            cause = "they differ by a factor and a constant: label smoothing, or other logits"
        elif places == 1:
            cause = "they are of other logits: another state, norm or label than in training"
        else:
            cause = "of the first draft they agree: what goes from step to step differs"
        said = f"the loss of a token that is drafted in {places} place(s) is not its -log p"
        return f"{said} in the drafter: {self.gap:.2g} nats apart\n{cause}"


def first_drafts(bench: Bench) -> list[Fit]:
    """Fit the loss of a text's last token: of three tokens, and of four where two are drafted.

    The last of three is draft 0 of who was told one. The last of four is draft 0 of who was told
    two, and draft 1 of who was told one, if the third is the draft 0 that was drawn.
    """
    draft, text = bench.build(), bench.texts[0]
    bench.train(draft, steps=10)  # briefly: what is known by heart leaves nothing to draw
    drafter = bench.drafter(draft)
    after_1 = Told(drafter, [text] * 64, [1] * 64, pad=0).drafts()
    row = int(
        (after_1.drawn_BN[:, 0] != after_1.greedy_BN[:, 0]).int().argmax()
    )  # rather an odd one
    tokens_T = text.token_ids_T.clone()
    tokens_T[2] = after_1.drawn_BN[row, 0]
    drawn = dataclasses.replace(text, token_ids_T=tokens_T)
    after_2 = Told(drafter, [drawn], [2], pad=0).drafts()
    draft.module.train()
    fits = [fitted(bench, draft, drawn, 3, after_1.probs_BKV[row, :1])]
    if depth_of(drafter) == drafter.num_drafts > 1:
        both_PV = torch.stack([after_2.probs_BKV[0, 0], after_1.probs_BKV[row, 1]])
        fits.append(fitted(bench, draft, drawn, 4, both_PV))
    return fits


def fitted(bench: Bench, draft: Draft, text: Sample, length: int, probs_PV: Tensor) -> Fit:
    """Try last tokens of a text, from the most to the least probable that counts."""
    order_V = probs_PV[0].argsort(descending=True)
    likely = order_V[probs_PV.amin(0)[order_V] > 1e-12]
    tried = likely[:: max(1, len(likely) // 16)]
    if len(tried) < 4:
        pytest.skip("the first draft is chosen, not drawn: its distribution is not to be seen")

    def loss(token: int, learned: bool) -> Any:
        tokens_T = torch.cat([text.token_ids_T[: length - 1], torch.tensor([token])])
        mask_T = torch.arange(length) > 0
        mask_T[-1] = learned
        features = {name: value[:length] for name, value in text.features.items()}
        sample = Sample(text.id, tokens_T, mask_T, features)
        output = bench.output(draft, bench.collate([sample]), STEPS)
        return sum(weight * numerator for numerator, _, weight in output.terms)

    with torch.no_grad():
        losses = [loss(token, True) - loss(token, False) for token in tried.tolist()]
    return Fit(torch.stack(losses).double(), -probs_PV[:, tried].double().log().T)
