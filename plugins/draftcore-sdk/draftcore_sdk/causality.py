"""What a loss may read of its samples: nothing that is not there when a token is drafted.

Nothing is trained for it: with wide random weights, in fp64, all that is read moves the loss.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from draftcore.contracts.algorithm import Draft, Sample
from draftcore.errors import DraftcoreError
from draftcore_sdk.drafting import LENGTHS, Told
from draftcore_sdk.suite import Suite, once
from draftcore_sdk.workbench import SPECIAL, UNHEARD, VOCABULARY, Bench, as_ratio

TOKENS, LEARNED = 24, range(12, 16)  # of a text, and those of them that the loss mask has
LONG, PART, SEEDS = 160, 40, 8  # tokens of a longer one and of its parts; how often is drawn
LABELS = {"last_hidden", "topk_logits", "topk_ids"}  # features that make the target's distribution
STILL = {torch.float64: 1e-9, torch.float32: 1e-5}  # of a loss: what may be rounding


class Causality(Suite):
    """The part of `algorithms.AlgorithmSuite` that changes samples and looks at the loss."""

    def test_the_loss_reads_nothing_that_comes_after_what_it_predicts(self, bench: Bench) -> None:
        """Up to token t it reads features up to t-2, and tokens up to t-1; the label may be more.

        That is token t, or the target's distribution of it, which features of t-1 make.
        """
        read, says = Reading.of(bench), bench.offer.capabilities
        last = LEARNED[-1] + read.offset
        for name in [*read.text.features, "token_ids"]:
            label, seen = name in LABELS and "cross_entropy" not in says, list[int]()
            first = last if label or name == "embeddings" else last - 1
            first = last + ("distils" not in says) if name == "token_ids" else first
            if read.moves(name, first):
                seen = [at for at in range(first, TOKENS) if read.moves(name, at, at + 1)]
            elif name == "last_hidden" and "distils" in says:  # as a state, not as a label
                seen = [last - 1] * read.moves(name, last - 1, last, UNHEARD)
            assert not seen, (
                f"training sees the future: the loss of token {last} reads {name} of token "
                f"{', '.join(map(str, seen))}, which is not there when that is drafted\n"
                "a row or a mask reads too far, or attention is not causal"
            )

    @torch.no_grad()
    def test_rows_may_be_of_more_than_4096_tokens_and_of_one(self, bench: Bench) -> None:
        """The end of a long one counts, and one that predicts nothing adds nothing."""
        one = learning(bench.texts[1], 1, range(1))
        assert math.isfinite(self._loss(bench, one)), "of a row of one token the loss is not finite"
        for text in (bench.text([0, 1, 2] * 45), bench.texts[0]):
            length = len(text.token_ids_T)
            long = learning(text, length, range(length - 4, length))
            alone = self._loss(bench, long)
            assert alone != 0, f"the loss is 0 of a row of {length} tokens: its end does not count"
        both = self._loss(bench, one, long)
        same = math.isclose(alone, both, rel_tol=1e-5)
        assert same, f"a row of one token makes {both:.6g} of a loss of {alone:.6g}"

    @once
    def test_every_part_of_a_long_text_is_learned(self, bench: Bench) -> None:
        """Where what is learned of a text is drawn, by one seed or another; of any token it can draft."""
        text = learning(bench.texts[0], LONG, range(LONG))

        def loss(text: Sample, seed: int) -> float:
            output = bench.output(bench.noisy, bench.collate([text]), seed=seed)
            return float(as_ratio(output).numerator.detach())

        for start in range(0, LONG, PART):
            mask_T = text.loss_mask_T.clone()
            mask_T[start : start + PART] = False
            less = dataclasses.replace(text, loss_mask_T=mask_T)
            counts = any(loss(text, seed) != loss(less, seed) for seed in range(SEEDS))
            part = f"tokens {start} to {start + PART - 1} of a text of {LONG}"
            assert counts, f"{part} are never learned, by {SEEDS} seeds: choose among all of them"
        drawn = Told(bench.drafter(bench.noisy), bench.texts, LENGTHS).propose(1.0).probs_BKV
        assert drawn is not None
        few = learning(bench.texts[0], LONG, range(PART, PART + 9))
        for token in (0, *range(SPECIAL, VOCABULARY)):
            tokens_T = few.token_ids_T.masked_fill(few.loss_mask_T, token)
            alike = dataclasses.replace(few, token_ids_T=tokens_T)
            counts = any(loss(alike, seed) for seed in range(SEEDS))
            said = f"token {token} is never learned: is it what masked labels are, or ignored?"
            assert counts or not (drawn[..., token] > 0).any(), said

    def test_a_held_out_loss_has_no_noise(self, bench: Bench) -> None:
        """Of two tokens (of one, a block learns none) there is little to choose: seeds change noise."""
        batch = bench.collate([learning(bench.texts[1], TOKENS, range(12, 14))])
        drawn = [bench.output(bench.noisy, batch, seed=n, training=False) for n in range(SEEDS)]
        losses = {float(as_ratio(output).numerator.detach()) for output in drawn}
        assert losses != {0.0}, "of two tokens to be learned the held out loss is 0: none counts"
        assert len(losses) < SEEDS, (
            f"with context.training=False {SEEDS} seeds give {SEEDS} losses of two tokens, from "
            f"{min(losses):.6g} to {max(losses):.6g}: leave the noise out, it is of training"
        )

    def _loss(self, bench: Bench, *samples: Sample) -> float:
        return float(bench.loss(bench.draft, bench.collate(samples)).numerator.detach())


def learning(text: Sample, tokens: int, learned: range) -> Sample:
    """Return the beginning of a text, of which these tokens are to be learned."""
    places_T = torch.arange(tokens)
    mask_T = (places_T >= learned.start) & (places_T < learned.stop)
    features = {name: value[:tokens] for name, value in text.features.items()}
    return Sample(text.id, text.token_ids_T[:tokens], mask_T, features)


@dataclass
class Reading:
    """A draft of wide random weights, a text of which a few tokens are learned, and the loss of it."""

    bench: Bench
    draft: Draft
    text: Sample
    plain: Any = None

    @classmethod
    def of(cls, bench: Bench) -> Reading:
        draft, text = bench.shaken(0.3), learning(bench.texts[1], TOKENS, LEARNED)
        for dtype in STILL:  # not every draft computes in fp64
            draft.module.to(dtype)
            wide = {
                n: x.to(dtype) if x.is_floating_point() else x for n, x in text.features.items()
            }
            read = cls(bench, draft, dataclasses.replace(text, features=wide))
            try:
                read.plain = read.loss(read.text)
                break
            except (DraftcoreError, RuntimeError):
                if dtype == torch.float32:
                    raise
        assert read.plain.isfinite(), f"with wide random weights the loss is {read.plain}"
        return read

    @torch.no_grad()
    def loss(self, text: Sample) -> Any:
        return self.bench.loss(self.draft, self.bench.collate([text])).numerator

    def moves(self, name: str, start: int, stop: int = TOKENS, width: int | None = None) -> bool:
        """Say whether the loss is another one with other features, or tokens, at some places."""
        values = {**self.text.features, "token_ids": self.text.token_ids_T}
        changed = values[name].clone()
        part = changed[start:stop, :width] if changed.ndim > 1 else changed[start:stop]
        part.copy_(-part if changed.is_floating_point() else (part + 7) % 256)
        values[name] = changed
        tokens_T = values.pop("token_ids")
        text = dataclasses.replace(self.text, token_ids_T=tokens_T, features=values)
        gap = abs(float(self.loss(text) - self.plain))
        return not gap <= STILL[self.plain.dtype] * abs(float(self.plain))

    @property
    def offset(self) -> int:
        """How far the last label is beyond the mask: some published losses weigh a row by its own token."""
        last, says = LEARNED[-1], self.bench.offer.capabilities
        if "cross_entropy" in says:
            return 0
        later = any(self.moves(name, last + 1) for name in LABELS & self.text.features.keys())
        return 2 * (later or ("distils" not in says and self.moves("token_ids", last + 2)))
