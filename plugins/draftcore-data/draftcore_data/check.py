"""Are a run's answers the target's own? Their likelihood under it, beside what it says itself.

If a text was sampled from a model, a token's log-likelihood is on average the negative entropy of the
model's distribution there; greedy and cooler sampling give more. Words of others give less, and by
how much says how far their distribution lies from the target's, in nats per token. Tokens that the
model finds very unlikely are as frequent as it says in its own text, or rarer; where others wrote,
they are more, also in a text that is else what the model often says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetModel
from draftcore.errors import UsageError
from draftcore_data.dataset import Dataset

# The target's own answers, and answers near its own: nats per token below what sampling from it would
# give, and share of unlikely tokens above that. Measured at T = 1: 0.02 and 0.003; at T = 1.3: 0.8 and
# 0.07; own answers to other questions: 0.24 and 0.03; people's code that it was trained on: 0.25 and
# 0.02; people's other code: 1.8 and 0.15.
OWN, NEAR = (0.1, 0.01), (0.2, 0.02)
UNLIKELY = 1e-3
SLICE = 256  # tokens whose logits are held at a time

Pair = tuple[list[int], list[int]]  # a prompt and its answer, as tokens


MEANING = {
    "own": "the answers are the target's own, or as likely to it as those",
    "near": "the answers are near the target's own and not quite: of a relative, sampled at a high\n"
    "temperature, to other questions, or partly of others",
    "foreign": "the answers are not the target's own: a draft learns to say what the target would not\n"
    "make them anew: draftcore data regenerate",
}


@dataclass(frozen=True)
class Measured:
    """How a target judges some answers: means over `tokens` of their tokens.

    `argmax` is the share of tokens that it finds the most likely ones, `unlikely` that of tokens to
    which it gives less than 1 in 1,000. `expected_*` is what it would be, had the target sampled them
    at temperature 1.
    """

    tokens: int
    likelihood: float
    expected_likelihood: float
    argmax: float
    unlikely: float
    expected_unlikely: float

    def within(self, bounds: tuple[float, float]) -> bool:
        gap = self.expected_likelihood - self.likelihood
        return gap <= bounds[0] and self.unlikely - self.expected_unlikely <= bounds[1]


@dataclass(frozen=True)
class Verdict:
    """The data's answers and the target's own greedy ones to the same prompts, as it judges them."""

    rows: int
    data: Measured
    own: Measured

    @property
    def name(self) -> str:
        return "own" if self.data.within(OWN) else "near" if self.data.within(NEAR) else "foreign"

    def lines(self) -> list[str]:
        head = "", "log-likelihood", "if sampled", "argmax", "below 1/1000", "if sampled", "tokens"
        cells = [
            (
                name, f"{m.likelihood:.3f}", f"{m.expected_likelihood:.3f}", f"{m.argmax:.1%}",
                f"{m.unlikely:.2%}", f"{m.expected_unlikely:.2%}", f"{m.tokens:,}",
            )
            for name, m in {"the data's answers": self.data, "the target's, greedy": self.own}.items()
        ]  # fmt: skip
        shape = "{:20}{:>16}{:>12}{:>9}{:>14}{:>12}{:>9}"
        return [*(shape.format(*row) for row in (head, *cells)), *MEANING[self.name].splitlines()]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.name}


def check_answers(dataset: Dataset, model: TargetModel, rows: int, longest: int) -> Verdict:
    """Judge the first answers of so many rows, spread over the data, up to so many tokens each."""
    chosen = np.linspace(0, len(dataset.lengths) - 1, min(rows, len(dataset.lengths)))
    pairs = [first_answer(dataset, int(row), longest) for row in chosen]
    pairs = sorted((pair for pair in pairs if pair[0]), key=lambda pair: len(pair[0]))
    if not pairs:
        raise UsageError(
            "no row asks for its first answer\n  give data whose answers follow questions"
        )
    own: list[Pair] = []
    for at in range(0, len(pairs), 8):
        prompts = [prompt for prompt, _ in pairs[at : at + 8]]
        own += zip(prompts, model.generate(prompts, longest), strict=True)
    return Verdict(len(pairs), measure(model, pairs), measure(model, own))


def first_answer(dataset: Dataset, row: int, longest: int) -> Pair:
    """Return what comes before a row's first learned token, and the answer that begins there.

    Nothing comes before that of a row with images, which is not asked here.
    """
    if dataset.images(row):
        return [], []
    ids, mask = dataset.tokens(row).tolist(), dataset.loss_mask(row)
    start = int(mask.argmax())
    length = int((~mask[start:]).argmax()) or len(ids) - start
    return ids[:start], ids[start : start + min(length, longest)]


@torch.inference_mode()
def measure(model: TargetModel, pairs: Sequence[Pair]) -> Measured:
    """Have the target read the answers to their prompts, one row at a time."""
    request = FeatureRequest((), True, str(model.dtype).removeprefix("torch."))
    tokens, sums = 0, torch.zeros(5, dtype=torch.float64, device=model.device)
    for prompt, answer in pairs:
        tokens_1T = torch.tensor([prompt + answer], device=model.device)
        lengths_1 = torch.tensor([tokens_1T.shape[1]], device=model.device)
        hidden_TH = model.features(tokens_1T, lengths_1, request)["last_hidden"][0]
        said_N, seen_NH = tokens_1T[0, len(prompt) :], hidden_TH[len(prompt) - 1 : -1]
        for at in range(0, len(answer), SLICE):
            log_RV = model.logits(seen_NH[at : at + SLICE]).float().log_softmax(-1)
            said_R = log_RV.gather(1, said_N[at : at + SLICE, None])[:, 0]
            probs_RV, least = log_RV.exp(), math.log(UNLIKELY)
            most_R = log_RV.amax(-1)
            parts = (
                said_R, probs_RV * log_RV, said_R == most_R, said_R < least,
                probs_RV * (log_RV < least),
            )  # fmt: skip
            sums += torch.stack([part.sum() for part in parts])
        tokens += len(answer)
    return Measured(tokens, *(sums / tokens).tolist())
