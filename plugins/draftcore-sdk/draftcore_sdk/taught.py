"""That a drafter computes what training taught: answers by heart, and each loss of a token exactly.

Shape letters: B batch, T tokens, K drafts, V vocabulary, H hidden, N labels that are tried, P places of a
draft.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

import pytest
import torch
from draftcore_eval.proposals import depth_of
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample
from draftcore_sdk.causality import LABELS, LEARNED, Reading, learning
from draftcore_sdk.check import variants
from draftcore_sdk.drafting import FAR, Told, count_of, nodes, parents_of
from draftcore_sdk.suite import Suite, once, slow
from draftcore_sdk.workbench import ANSWER, SPECIAL, STEPS, VOCABULARY, Bench

# Between a loss and a surprise; at most 6e-6 in nine algorithms, with features in half 4e-4.
EXACT = 3e-5
ROWS, DRAWN, TRIED = 64, 8, 10  # of draws, how often for one token, of labels
EARLY = 4  # tokens that a drafter was told
COIN, COIN_AT = 8, 6  # tokens that an answer may go on with, and in which place of it
# What a teacher may do with the target's logits, and what it then has forgotten.
TEACHERS = {"": (1, 1), "soft cap": (1, 0), "scale": (0, 1), "scale and soft cap": (0, 0)}
Note = Callable[[str, object], None]  # pytest's `record_property`: the report shows it


class Taught(Suite):
    """The part of `algorithms.AlgorithmSuite` that compares training's loss with the drafter."""

    @slow
    def test_the_drafter_computes_what_training_taught(
        self, bench: Bench, record_property: Note
    ) -> None:
        """A draft that has learned answers drafts them, and is sure of them.

        Six algorithms that know them by heart are right about all, and sure by 0.96 to 0.99; with
        another layer, position or norm than in training they are right about 0.8 at most. Those that
        learn the target's distribution have 0.9 of it; what else should be known, nobody can say.
        """
        known, losses, least, surest = Known.of(bench), bench.trained.losses, 0.5, 0.0
        if known.distils:
            least, surest = 0.8, 0.7
        elif losses[-1] < 0.01 * losses[0]:  # next to nothing of the loss is left
            least, surest = 0.97, 0.93
        what = "the target's distribution" if known.distils else "the right tokens"
        said = f"{known.right:.2f} of the drafts are right, expected {least}"
        sure = f"sure of {what} by {known.sure:.2f}, expected {surest}"
        record_property("judged", f"{said}; {sure}")
        for share, where, which in (
            (known.early, "earlier", "a position late"), (known.late, "later", "a position early"),
        ):  # fmt: skip
            if share > max(0.4, known.right):
                said = f"the drafter is {which}: {share:.2f} are right one token {where}\n{said}"
        assert known.right >= least, said
        cause = "logits or states are scaled, or normed once more, where training does not"
        assert known.sure >= surest, f"{cause}\n{sure}"
        require_counts(bench)

    @once
    def test_the_drafter_reads_as_far_back_as_training(self, bench: Bench) -> None:
        """Of a long text both read the first features, or neither does."""
        text, drafter = bench.texts[0], bench.drafter(bench.noisy)
        turned = {n: torch.cat([x[:20].flip(-1), x[20:]]) for n, x in text.features.items()}
        losses, drafts = list[float](), list[Tensor]()
        for one in (text, dataclasses.replace(text, features=turned)):
            batch = bench.collate([learning(one, FAR + 2, range(FAR - 2, FAR + 2))])
            losses.append(float(bench.loss(bench.noisy, batch).numerator.detach()))
            drafts.append(Told(drafter, [one], [FAR], pad=0).drafts().probs_BKV)
        reads = {"training": losses[0] != losses[1], "the drafter": not torch.equal(*drafts)}
        less, more = sorted(reads, key=lambda name: reads[name])
        assert reads[less] == reads[more], (
            f"{FAR} tokens back {more} reads features and {less} does not: a window, or lost slots"
        )

    @once
    @torch.no_grad()
    def test_what_the_target_teaches_has_its_scale_and_soft_cap(self, bench: Bench) -> None:
        """Of a loss that reads the state from which the target's distribution of its label is made."""
        read, plain = Reading.of(bench), float(bench.loss(bench.noisy, bench.batch).numerator)
        last = LEARNED[-1] + read.offset
        if "last_hidden" not in read.text.features or not read.moves("last_hidden", last - 1, last):
            pytest.skip("the loss does not read the target's last state of what it predicts")
        for name, value in {"logit_scale": 0.2, "logit_softcap": 1.0}.items():
            target = copy.copy(bench.example.spec)
            setattr(target, name, value)
            draft = bench.build(target)
            draft.module.load_state_dict(bench.noisy.module.state_dict())
            same = float(bench.loss(draft, bench.batch).numerator) == plain
            assert not same, f"the target's {name} is forgotten: `TargetSpec.capped`"

    # ------------------------------------------------------------ capabilities

    def test_training_minimises_the_cross_entropy_of_the_drafter(
        self, bench: Bench, record_property: Note
    ) -> None:
        """Its loss of the last token of a short text is -log p of the drafter, for any last token.

        Of a text of n tokens, from the second on to be learned, the last is drafted first by who
        was told n-2, second by who was told n-3, and so on; what these weigh is for training to say.
        Far into a text as well, where only who was told n-2 drafts what is learned alone.
        """
        record_property("judged", require_fits(bench, "cross_entropy"))

    def test_training_minimises_the_cross_entropy_with_the_targets_distribution(
        self, bench: Bench, record_property: Note
    ) -> None:
        """Its loss of such a token is -sum p log q of the target's p and the drafter's q, for any p.

        Both are of the tokens that the drafter can draw. The entropy of p may be taken off.
        """
        record_property("judged", require_fits(bench, "distils"))


@dataclass
class Known:
    """Of the next three tokens of learned answers, from many places of them.

    Which share is drafted rightly, or would be one token earlier or later, and how sure the drafter
    is of what is right; where it `distils`, how much it has of the target's distribution. The first
    round does not count, as some algorithms never train it.
    """

    distils: bool
    right: float
    sure: float
    early: float
    late: float

    @classmethod
    def of(cls, bench: Bench) -> Known:
        drafter, answers = bench.drafter(bench.trained.draft), bench.example.answers
        distils = "distils" in bench.offer.capabilities
        right, sure, early, late = (list[float]() for _ in range(4))
        for done in range(2, ANSWER):
            wanted = min(3, depth_of(drafter), ANSWER - done)
            lengths = [len(prompt) + done - 1 for prompt in bench.example.prompts]
            told = Told(drafter, bench.learned, lengths, pad=0)
            greedy, drawn, best = told.propose(), told.propose(1.0), [0] * len(answers)
            for row, at, above, _ in nodes(greedy):
                path = [*above, int(greedy.tokens_BK[row, at])]
                if path == answers[row][done:][: len(path)]:
                    best[row] = max(best[row], min(wanted, len(path)))
            right += [count / wanted for count in best]
            assert drawn.probs_BKV is not None
            for row, at, above, beside in nodes(drawn):
                rest = answers[row][done:][:wanted]
                if not beside and len(above) < wanted and above == rest[: len(above)]:
                    probs_V, place = drawn.probs_BKV[row, at], lengths[row] + len(above)
                    state_H = bench.example.features[row]["last_hidden"][place]
                    taught_V = bench.example.spec.load_model().logits(state_H).softmax(-1)
                    share = torch.minimum(probs_V, taught_V).sum()
                    sure.append(float(share if distils else probs_V[rest[len(above)]]))
            for row, drafts in enumerate(greedy.tokens_BK[:, :wanted].tolist()):
                early += map(eq, drafts, answers[row][done - 1 :])
                late += map(eq, drafts, answers[row][done + 1 :])
        means = (sum(shares) / max(1, len(shares)) for shares in (right, sure, early, late))
        return cls(distils, *means)


def require_counts(bench: Bench) -> None:
    """Require of who leaves out drafts that it drafts what is known, and no longer.

    Of a text that is learned with each of `COIN` tokens in one place, so that nobody knows which.
    """
    text, at = bench.learned[0], len(bench.example.prompts[0]) + COIN_AT
    if Told(bench.drafter(bench.trained.draft), [text], [at], pad=0).propose().counts_B is None:
        return
    texts, draft, told = list[Sample](), bench.build(), range(at - 1, at - 5, -1)
    for token in [*bench.summary.token_counts][:COIN]:
        tokens_T = text.token_ids_T.clone()
        tokens_T[at] = token
        labels = {"last_hidden": bench.example.spec.head()[tokens_T.roll(-1)]}
        features = {name: labels.get(name, x) for name, x in text.features.items()}
        texts.append(dataclasses.replace(text, token_ids_T=tokens_T, features=features))
    bench.train(draft, samples=texts)
    drafter = bench.drafter(draft)
    counts = [int(count_of(Told(drafter, texts[:1], [n], pad=0).propose())) for n in told]
    known = [min(number, drafter.num_drafts) for number in range(len(counts))]
    assert counts == known or len({*counts}) == 1, (  # as many whatever it knows
        f"of rounds that know {known} tokens, and then not which of {COIN} it is, {counts} count\n"
        "a confidence is learned a row off, or does not end the round: all before must be there"
    )


# ---------------------------------------------------------------- a token's loss


@dataclass
class Fit:
    """The loss of a token in training, by labels, and the drafter's surprise at each, by places."""

    loss_N: Tensor
    surprise_NP: Tensor  # place k: as draft k of who was told so many tokens less
    free_NX: Tensor  # what the loss may have a share of beside

    @property
    def gap(self) -> float:
        """By how much the loss is no weighted sum of these at most, in nats of a draft of weight 1."""
        both_NC = torch.cat([self.surprise_NP, self.free_NX], 1)
        shares_C = torch.linalg.lstsq(both_NC, self.loss_N[:, None]).solution[:, 0]
        weight = float(shares_C[: self.surprise_NP.shape[1]].sum())
        rest_N = self.loss_N - both_NC @ shares_C
        return float(rest_N.abs().max()) / weight if weight > 1e-6 else math.inf

    @property
    def cause(self) -> str:
        """What differs where it is none."""
        ones_N1 = torch.ones_like(self.surprise_NP[:, :1])
        if float(self.loss_N.std()) < 1e-6:
            return "the loss is the same whatever the label is: another one is learned"
        if dataclasses.replace(self, free_NX=torch.cat([self.free_NX, ones_N1], 1)).gap < EXACT:
            return "they differ by a factor and a constant: label smoothing, or other logits"
        if self.surprise_NP.shape[1] == 1:
            said = "they are of other logits: another state, norm or label than in training"
            return f"{said}; or a floor\nor an epsilon is under the logarithm"
        return "of the first draft they agree: what goes from step to step differs"


def require_fits(bench: Bench, capability: str) -> str:
    """Require that the loss of a token is the drafter's surprise at it; say how near it is."""
    bench.require(capability)
    for name, value in variants(bench.offer):
        if isinstance(value, str) and bench.data.get(name) == value:
            pytest.skip(f"the capability is of the default options, and {name} is {value}")
    draft, offset, gaps = bench.shaken(0.1), Reading.of(bench).offset, list[float]()
    fit = fit_teachers if capability == "distils" else fit_tokens
    for text, probs_PV in [*drawn_texts(bench, draft)]:
        draft.module.train()
        fits = fit(bench, draft, text, probs_PV, offset)
        gaps.append(fits[""].gap)
        forgotten = next((name for name, fit in fits.items() if name and fit.gap < EXACT), "")
        cause = f"the {forgotten} of the target's logits is forgotten: `TargetSpec.capped`"
        assert gaps[-1] < EXACT, (
            f"{cause if forgotten else fits[''].cause}\nthe loss of a token that is drafted in "
            f"{len(gaps)} place(s) is {gaps[-1]:.2g} nats off its surprise in the drafter"
        )
    said = f"{max(gaps):.1g} nats apart in {len(gaps)} place(s), expected {EXACT}"
    for told in (EARLY, FAR):
        text = bench.texts[0]
        probs_BKV = Told(bench.drafter(draft), [text], [told], pad=0).propose(1.0).probs_BKV
        assert probs_BKV is not None
        draft.module.train()
        gap = fit(bench, draft, text, probs_BKV[0, :1], offset, told)[""].gap
        if told == EARLY and gap >= EXACT:
            return said  # who was told less drafts it as well
        assert gap < EXACT, (
            f"after {told} tokens the loss of the next is {gap:.2g} nats off its surprise in the "
            f"drafter, and not after {EARLY}: another window, position or number of slots"
        )
    return f"{said}; also after {FAR} tokens"


def drawn_texts(bench: Bench, draft: Draft) -> Iterator[tuple[Sample, Tensor]]:
    """Yield texts, and the distributions [P, V] of token 2 of the first, 3 of the second, 4 of the third.

    Token 2 is draft 0 of who was told one. Token 3 is draft 0 of who was told two, and a child's draft
    of who was told one, as token 2 is the node that was drawn above it; and so on.
    """
    drafter, text = bench.drafter(draft), bench.texts[1]
    told = Told(drafter, [text] * ROWS, [1] * ROWS, pad=0)
    greedy, drawn = told.propose(), told.propose(1.0)
    parents = parents_of(drawn)[0].tolist()
    path = [max((at for at, up in enumerate(parents) if up == -1 and at in parents), default=0)]
    while path[-1] in parents:
        path.append(parents.index(path[-1]))
    texts = []
    for drawn_K in drawn.tokens_BK[:, path[:2]]:
        parts = text.token_ids_T[:2], drawn_K, text.token_ids_T[2 + len(drawn_K) :]
        texts.append(dataclasses.replace(text, token_ids_T=torch.cat(parts)))
    second = Told(drafter, texts, [2] * ROWS, pad=0).propose(1.0)
    assert drawn.probs_BKV is not None
    assert second.probs_BKV is not None
    # Rather a row that greedy drafts would not show, and whose second draft is soon drawn again.
    odd_B = drawn.tokens_BK[:, path[0]] != greedy.tokens_BK[:, path[0]]
    again_B = second.probs_BKV[:, 0].gather(1, drawn.tokens_BK[:, path[:2]][:, -1:])[:, 0]
    row = int((again_B * (odd_B + 1e-3)).argmax())
    text, first_KV = texts[row], drawn.probs_BKV[row]
    yield text, first_KV[:1]
    if path[1:]:
        yield text, torch.stack([second.probs_BKV[row, 0], first_KV[path[1]]])
    if path[2:]:
        many = Told(drafter, [text] * 2 * ROWS, [2] * 2 * ROWS, pad=0)
        third = Told(drafter, [text], [3], pad=0).propose(1.0)
        assert third.probs_BKV is not None
        for drawn in (many.propose(1.0, seed) for seed in range(DRAWN)):
            assert drawn.probs_BKV is not None
            for number, at, above, beside in nodes(drawn):
                if above == text.token_ids_T[3:4].tolist() and not beside:
                    rest_PV = torch.stack([drawn.probs_BKV[number, at], first_KV[path[2]]])
                    yield text, torch.cat([third.probs_BKV[0, :1], rest_PV])
                    return


def fit_tokens(
    bench: Bench, draft: Draft, text: Sample, probs_PV: Tensor, offset: int, told: int = 1
) -> dict[str, Fit]:
    """Try last tokens, from the most to the least probable that counts."""
    order_V = probs_PV[0].argsort(descending=True)
    likely = order_V[probs_PV.amin(0)[order_V] > 1e-12]
    # They are drafted, and learned, like any other token.
    ends = torch.isin(likely, torch.tensor([0, *range(SPECIAL, VOCABULARY)]))
    tried = torch.cat([likely[~ends][:: max(1, len(likely) // TRIED)], likely[ends]])
    if len(tried) < 4:
        pytest.skip("the first draft is chosen, not drawn: its distribution is not to be seen")
    tokens_NT = text.token_ids_T.repeat(len(tried), 1)
    tokens_NT[:, told + len(probs_PV)] = tried
    texts = [dataclasses.replace(text, token_ids_T=tokens_T) for tokens_T in tokens_NT]
    surprise_NP = -probs_PV[:, tried].double().log().T
    loss_N = losses(bench, draft, texts, told, told + len(probs_PV), offset)
    return {"": Fit(loss_N, surprise_NP, surprise_NP[:, :0])}


def fit_teachers(
    bench: Bench, draft: Draft, text: Sample, probs_PV: Tensor, offset: int, told: int = 1
) -> dict[str, Fit]:
    """Try what the target may say of the last token: at other places of its answers it said that."""
    spec, label = bench.example.spec, told + len(probs_PV)
    states_NH = torch.cat([read["last_hidden"] for read in bench.example.features])
    logits_NV = (states_NH @ spec.head().T).double()
    drawable_V, most = probs_PV.amin(0) > 0, bench.request().topk or VOCABULARY
    counts_NV = drawable_V & (logits_NV >= logits_NV.topk(most).values[:, -1:])
    places = drawable_V[logits_NV.argmax(-1)].nonzero()[:, 0]
    assert len(places), "the drafter can draw nothing that the target says: its logits are scaled"
    places = places[:: max(1, len(places) // TRIED)]
    texts = []
    for place in places:
        features = {name: value.clone() for name, value in text.features.items()}
        for name in LABELS & features.keys():
            others = torch.cat([sample.features[name] for sample in bench.learned])
            features[name][label - 1] = others[place]
        texts.append(dataclasses.replace(text, features=features))
    surprise_VP = -probs_PV.double().clamp_min(1e-300).log().T
    loss_N, fits = losses(bench, draft, texts, told, label, offset), {}
    for name, (scaled, capped) in TEACHERS.items():
        given_NV = logits_NV[places] * spec.logit_scale**scaled
        if capped and spec.logit_softcap:
            given_NV = spec.logit_softcap * torch.tanh(given_NV / spec.logit_softcap)
        logs_NV = given_NV.masked_fill(~counts_NV[places], -torch.inf).log_softmax(-1)
        p_NV = logs_NV.exp()
        entropy_N1 = -(p_NV * logs_NV).nan_to_num().sum(-1, keepdim=True)
        fits[name] = Fit(loss_N, p_NV @ surprise_VP, entropy_N1)
    return fits


def losses(
    bench: Bench, draft: Draft, texts: Sequence[Sample], first: int, label: int, offset: int
) -> Tensor:
    """Return what a token of each text adds to the loss, whose labels are this one and from `first` on."""

    def loss(text: Sample, stop: int) -> Any:
        sample = learning(text, label + 1, range(max(0, first - offset), stop - offset))
        output = bench.output(draft, bench.collate([sample]), STEPS)
        return sum(weight * numerator for numerator, _, weight in output.terms)

    with torch.no_grad():
        without = loss(texts[0], label)
        return torch.stack([loss(text, label + 1) - without for text in texts]).double()
