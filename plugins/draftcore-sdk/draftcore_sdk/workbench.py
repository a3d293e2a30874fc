"""What the algorithm suite works with: an algorithm's hooks on a tiny target (`example`), and a draft.

Shape letters: B batch, T tokens, K drafted tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Phase
from torch import Tensor
from torch.nn import functional

from draftcore.config import EvalConfig
from draftcore.contracts.algorithm import (
    DataSummary,
    Draft,
    DraftBatch,
    Drafter,
    Sample,
    SampleId,
    StepContext,
    StepOutput,
)
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import Offer
from draftcore.contracts.serving import Host, Round
from draftcore.contracts.target import TargetSpec
from draftcore.evaluation.decode import Clock, EagerRunner, right_padded, speculate, verify
from draftcore.evaluation.report import Decoded
from draftcore.training.optimizer import build_optimizer, scale_and_clip
from draftcore_sdk.example import ANSWER, QUESTIONS, Example

STEPS, RATE, SEED = 30, 0.01, 7

# ---------------------------------------------------------------- an algorithm at work


@dataclass
class Measured:
    """A loss over micro-batches, summed as the trainer does, with the gradient it leaves."""

    numerator: Tensor
    denominator: Tensor
    counts: dict[str, tuple[Tensor, Tensor]]
    gradients: dict[str, Tensor]


@dataclass
class Trained:
    draft: Draft
    losses: list[float]


@dataclass(frozen=True)
class Bench:
    """An algorithm's hooks with its options, on the tiny target."""

    hook: Specs
    offer: Offer
    options: Any
    example: Example
    cli: Sequence[str] = ()
    yaml: Mapping[str, Any] = field(default_factory=dict)

    def require(self, capability: str) -> None:
        if capability not in self.offer.capabilities:
            pytest.skip(f"the algorithm does not claim the capability {capability}")

    def require_absent(self, capability: str, because: str) -> None:
        if capability in self.offer.capabilities:
            pytest.skip(f"the algorithm says {capability}: {because}")

    # ------------------------------------------------------------ data

    def request(self, target: TargetSpec | None = None) -> FeatureRequest:
        target = target or self.example.spec
        return self.hook.feature_request(target=target, options=self.options)

    @cached_property
    def learned(self) -> list[Sample]:
        """The target's answers, each to be learned whole."""
        return [self._sample(row) for row in range(len(QUESTIONS))]

    @cached_property
    def varied(self) -> list[Sample]:
        """Four samples of other lengths, with gaps in what is to be learned."""
        generator = torch.Generator().manual_seed(SEED)
        samples = []
        for row, length in ((0, 11), (1, 6), (2, 9), (0, 7)):
            sample = self._sample(row, length)
            gaps_T = torch.rand(length, generator=generator) < 0.8
            samples.append(dataclasses.replace(sample, loss_mask_T=gaps_T))
        return samples

    @cached_property
    def long(self) -> Sample:
        """A sample ten times as long as others, with little to learn."""
        parts = [self._sample(row) for row in (1, 2, 0)]
        mask_T = torch.cat([part.loss_mask_T for part in parts]).logical_and(
            torch.arange(sum(len(part.token_ids_T) for part in parts)) % 6 < 3
        )
        features = {
            name: torch.cat([part.features[name] for part in parts]) for name in parts[0].features
        }
        tokens_T = torch.cat([part.token_ids_T for part in parts])
        return Sample(SampleId("long", 0), tokens_T, mask_T, features)

    def _sample(self, row: int, length: int | None = None) -> Sample:
        """A question and its answer, or the last `length` tokens of them."""
        tokens_T = torch.tensor(self.example.prompts[row] + self.example.answers[row])
        start = 0 if length is None else len(tokens_T) - length
        request = self.request()
        features = {
            name: self.example.features[row][name][start:].to(getattr(torch, request.dtype))
            for name in request.names
        }
        mask_T = torch.arange(len(tokens_T)) >= len(self.example.prompts[row])
        identity = SampleId(f"{row}.{length}", 0)
        return Sample(identity, tokens_T[start:].clone(), mask_T[start:].clone(), features)

    @cached_property
    def summary(self) -> DataSummary:
        """What a run on the learned samples would know of its data."""
        counts: dict[int, int] = {}
        for token in (token for answer in self.example.answers for token in answer):
            counts[token] = counts.get(token, 0) + 1
        lengths = [len(sample.token_ids_T) for sample in self.learned]
        total = sum(map(len, self.example.answers))
        return DataSummary("suite", len(lengths), sum(lengths), total, max(lengths), counts)

    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        return self.hook.collate(samples=samples, options=self.options)

    # ------------------------------------------------------------ training

    def build(self, target: TargetSpec | None = None, seed: int = SEED) -> Draft:
        """A fresh draft, as a run with this seed builds it."""
        with global_seed(seed):
            return self.hook.build_draft(
                target=target or self.example.spec, data=self.summary, options=self.options
            )

    def loss(
        self, draft: Draft, batch: DraftBatch, step: int = STEPS // 2, seed: int = SEED
    ) -> StepOutput:
        """The loss at a step of a run of `STEPS` steps."""
        context = StepContext(step, STEPS, seed)
        return self.hook.forward_loss(draft=draft, batch=batch, context=context)

    def measure(self, draft: Draft, batches: Sequence[DraftBatch]) -> Measured:
        """Accumulate the loss and the gradient of micro-batches, as the trainer does."""
        draft.module.zero_grad(set_to_none=True)
        outputs = [self.loss(draft, batch) for batch in batches]
        for output in outputs:
            if output.numerator.requires_grad:
                output.numerator.backward()  # type: ignore[no-untyped-call]
        counts = {
            name: (
                torch.stack([output.counts[name][0] for output in outputs]).sum(),
                torch.stack([output.counts[name][1] for output in outputs]).sum(),
            )
            for name in outputs[0].counts
        }
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in draft.module.named_parameters()
            if p.requires_grad
        }
        draft.module.zero_grad(set_to_none=True)
        return Measured(
            torch.stack([output.numerator.detach() for output in outputs]).sum(),
            torch.stack([output.denominator for output in outputs]).sum(),
            counts,
            gradients,
        )

    @torch.no_grad()
    def rise(self, draft: Draft, batch: DraftBatch, direction: Mapping[str, Tensor]) -> float:
        """How fast the numerator rises along a direction in the parameters, by differences."""
        step, values = 1e-6, []
        for move in (step, -2 * step, step):
            for name, parameter in draft.module.named_parameters():
                if name in direction:
                    parameter.add_(direction[name], alpha=move)
            values.append(float(self.loss(draft, batch).numerator))
        return (values[0] - values[1]) / (2 * step)

    def train(self, draft: Draft, steps: int | None = None) -> list[float]:
        """Train on the learned samples, all of them at every step; return the losses.

        Without `steps` until the answers are known by heart, or `STEPS` and on until the loss
        hardly falls, then a little at a lower rate.
        """
        optimizer = build_optimizer(draft.parameter_groups, weight_decay=0.0, betas=(0.9, 0.999))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        batch = self.collate(self.learned)
        losses: list[float] = []
        for rate in learning_rates(losses, steps):
            output = self.loss(draft, batch, min(len(losses), STEPS - 1))
            output.numerator.backward()  # type: ignore[no-untyped-call]
            scale_and_clip(parameters, output.denominator, draft.defaults.clip)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(output.numerator.detach() / output.denominator))
        return losses

    # ------------------------------------------------------------ decoding

    def drafter(self, draft: Draft) -> Drafter:
        return self.hook.drafter(draft=draft, target=self.example.spec.model, options=self.options)

    def decode(
        self, draft: Draft, prompts: Sequence[Sequence[int]], drafter: Drafter | None = None
    ) -> list[Decoded]:
        """Decode prompts together, greedily, as long as the learned answers are."""
        with evaluating(draft):
            drafter = drafter or self.drafter(draft)
            runner = EagerRunner(self.example.spec.model, drafter)
            return speculate(runner, prompts, GREEDY, Clock())

    def decode_recorded(self, draft: Draft, prompts: Sequence[Sequence[int]]) -> list[Decoded]:
        """The same, in rounds that are recorded and replayed, with a row of padding."""
        model, drafter = self.example.spec.model, self.drafter(draft)
        most = max(map(len, prompts)) + ANSWER + drafter.num_drafts + 1
        phase = Phase("decode", "recording", rows=(len(prompts) + 1,), lengths=(most,))
        runner = DecodeGraphRunner(model, drafter, draft.module, phase, RecordingBackend())
        with evaluating(draft):
            runner.reserve(len(prompts), most)
            return speculate(runner, prompts, GREEDY, Clock())

    def agreement(self, draft: Draft) -> float:
        """The share of drafts that are right on the learned answers, the first three of a round.

        The first round, which some algorithms never train, does not count. The others begin one or
        two tokens after the one before (a row without a right draft lags behind), so a draft that
        knows the answers is asked for them from many places.
        """
        right, asked, done = 0, 0, 2
        with evaluating(draft):
            decoding = Decoding(self, draft, self.example.prompts)
            decoding.round(most=1)
            for most in itertools.cycle((1, 2)):
                wanted = min(3, decoding.drafter.num_drafts, ANSWER - done)
                if wanted < 1:
                    return right / asked
                _, right_B = decoding.round(most)
                right += int(right_B.clamp(max=wanted).sum())
                asked += wanted * len(right_B)
                done += most
        raise AssertionError

    # ------------------------------------------------------------ exports

    @property
    def layouts(self) -> list[str]:
        """The declared export layouts; skips the test where there is none."""
        names = sorted(name for name in self.offer.capabilities if name.startswith("layout:"))
        if not names:
            pytest.skip("the algorithm declares no export layout (capability layout:NAME)")
        return [name.removeprefix("layout:") for name in names]

    @property
    def servers(self) -> list[str]:
        """The servers as which an export can be read; skips the test where there is none."""
        names = sorted(name for name in self.offer.capabilities if name.startswith("served:"))
        if not names:
            pytest.skip("the algorithm declares no server (capability served:NAME)")
        return [name.removeprefix("served:") for name in names]

    def round(self, row: int, layers: Sequence[int], host: Host) -> Round:
        """Where a server stands after a prompt, before the first drafts."""
        prompt, features = self.example.prompts[row], self.example.features[row]
        return Round(
            host,
            torch.tensor(prompt),
            self.example.answers[row][0],
            tuple(features[f"hidden.{layer}"][: len(prompt)] for layer in layers),
            features["last_hidden"][: len(prompt)],
        )

    def export(self, draft: Draft, folder: Path, layout: str) -> Path:
        folder.mkdir(parents=True)
        self.hook.export_draft(draft=draft, folder=folder, layout=layout)
        return folder

    def imported(self, folder: Path) -> Draft:
        return self.hook.import_draft(folder=folder, target=self.example.spec, options=self.options)


GREEDY = EvalConfig(max_new_tokens=ANSWER, batch=len(QUESTIONS))


class Decoding:
    """Rows that are decoded greedily one round at a time; what `speculate` does in a loop."""

    def __init__(self, bench: Bench, draft: Draft, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.drafter = bench.example.spec.model, bench.drafter(draft)
        tokens_BT, self.lengths_B = right_padded(prompts, "cpu")
        rows, longest = tokens_BT.shape
        self.span = longest + ANSWER + 3 * (self.drafter.num_drafts + 1)
        self.cache = self.model.allocate(rows, self.span)
        self.state = self.drafter.allocate(rows, self.span)
        features = self._read(tokens_BT, torch.zeros_like(self.lengths_B))
        last_BH = features["last_hidden"][torch.arange(rows), self.lengths_B - 1]
        self.last_B = self.model.logits(last_BH).argmax(-1)
        self.altered: set[str] = set()
        with self._watched(tokens=tokens_BT, lengths=self.lengths_B, next=self.last_B, **features):
            self.drafter.prefill(self.state, tokens_BT, self.lengths_B, features, self.last_B)

    def propose(self, temperature: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(seed)
        return self.drafter.propose(self.state, temperature, generator)

    def round(self, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Propose, verify, and accept `most` tokens a row; returns drafts_BK, and how many are right."""
        drafts_BK, _ = self.propose()
        features = self._read(torch.cat([self.last_B[:, None], drafts_BK], 1), self.lengths_B)
        logits_BTV = self.model.logits(features["last_hidden"])
        tokens_BT, counts_B = verify(logits_BTV, drafts_BK, None, 0.0, torch.Generator())
        right_B, counts_B = counts_B - 1, counts_B.clamp(max=most)
        with self._watched(tokens=tokens_BT, counts=counts_B, **features):
            self.drafter.accept(self.state, tokens_BT, features, counts_B)
        self.last_B = tokens_BT[torch.arange(len(tokens_BT)), counts_B - 1]
        self.lengths_B = self.lengths_B + counts_B
        return drafts_BK, right_B

    def select(self, rows_B: Tensor) -> None:
        self.cache = self.model.select(self.cache, rows_B)
        self.state = self.drafter.select(self.state, rows_B)
        self.lengths_B, self.last_B = self.lengths_B[rows_B], self.last_B[rows_B]

    @contextmanager
    def _watched(self, **given: Tensor) -> Iterator[None]:
        """Note which of the drafter's arguments it alters."""
        before = {name: tensor.clone() for name, tensor in given.items()}
        yield
        self.altered |= {name for name, old in before.items() if not torch.equal(given[name], old)}

    def _read(self, tokens_BT: Tensor, start_B: Tensor) -> dict[str, Tensor]:
        positions_BT = start_B[:, None] + torch.arange(tokens_BT.shape[1])
        return self.model.forward(
            self.cache, tokens_BT, positions_BT, self.span, self.drafter.request
        )


# ---------------------------------------------------------------- small helpers


def learning_rates(losses: Sequence[float], steps: int | None) -> Iterator[float]:
    """Yield the rate of each step, given the losses of those before."""
    while len(losses) < (3 * STEPS if steps is None else steps):
        yield RATE * min(1.0, (len(losses) + 1) / 5)
        if steps is None and len(losses) % 5 == 0:
            if knows_by_heart(losses):
                return
            if len(losses) >= STEPS and losses[-11] - losses[-1] < 0.01 * losses[0]:
                break
    for _ in range(10 if steps is None else 0):
        yield RATE / 5


def knows_by_heart(losses: Sequence[float]) -> bool:
    """Whether next to nothing of the loss is left."""
    return losses[-1] < 0.01 * losses[0]


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed every global generator, and put the state before back."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


@contextmanager
def evaluating(draft: Draft) -> Iterator[None]:
    """Put a draft into evaluation mode and back."""
    training = draft.module.training
    draft.module.eval()
    try:
        yield
    finally:
        draft.module.train(training)


def padded(batch: DraftBatch, more: int) -> DraftBatch:
    """Pad a batch further on the right, with rubbish under the masks."""
    return dataclasses.replace(
        batch,
        token_ids_BT=functional.pad(batch.token_ids_BT, (0, more), value=7),
        loss_mask_BT=functional.pad(batch.loss_mask_BT, (0, more)),
        attention_mask_BT=functional.pad(batch.attention_mask_BT, (0, more)),
        features={
            name: functional.pad(value, (0, 0, 0, more), value=3.0)
            for name, value in batch.features.items()
        },
    )


def masked(sample: Sample) -> Sample:
    """The same sample with nothing to learn."""
    return dataclasses.replace(sample, loss_mask_T=torch.zeros_like(sample.loss_mask_T))


def snapshot(draft: Draft) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, also those outside the state dict."""
    named = [*draft.module.named_parameters(), *draft.module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}
