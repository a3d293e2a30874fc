"""What the algorithm suite works with: an algorithm's hooks on a tiny target (`example`), and drafts.

Shape letters: B batch, T tokens, K drafted tokens.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftcore_eval.decode import EagerRunner, speculate
from draftcore_eval.options import EvalOptions
from draftcore_eval.report import Decoded
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Phase
from draftcore_nn.served import Host, Round, ServedDraft
from torch import Tensor
from torch.nn import functional

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
from draftcore.contracts.target import TargetSpec
from draftcore_sdk.algorithm_fixtures import as_ratio, summed
from draftcore_sdk.example import ANSWER, QUESTIONS, Example
from draftcore_sdk.internals import build_optimizer, scale_and_clip, type_error

STEPS, RATE, SEED = 30, 0.01, 7
LONGEST = 3 * STEPS  # steps after which a draft has learned what it can
GREEDY = EvalOptions(max_new_tokens=ANSWER, batch=len(QUESTIONS))


@dataclass
class Measured:
    """What micro-batches sum up to, and the gradient that this leaves, by parameter."""

    output: StepOutput
    gradients: dict[str, Tensor]


@dataclass
class Trained:
    """A draft in evaluation mode, and the losses that it was trained by."""

    draft: Draft
    losses: list[float]

    @property
    def knows_by_heart(self) -> bool:
        """Whether next to nothing of the loss is left."""
        return self.losses[-1] < 0.01 * self.losses[0]


@dataclass(frozen=True)
class Bench:
    """An algorithm's hooks with its options, on the tiny target. No test changes what is cached."""

    hook: Specs
    offer: Offer
    options: Any
    example: Example
    folder: Path  # an empty one, for runs
    data: Mapping[str, Any]  # the options as a run's YAML has them
    loose: Sequence[Path]  # the files of plugins that are not installed
    extras: Sequence[str] = ()  # installed wrappers and observers

    def require(self, capability: str) -> None:
        if capability not in self.offer.capabilities:
            pytest.skip(f"the algorithm does not claim the capability {capability}")

    def require_absent(self, capability: str, because: str) -> None:
        if capability in self.offer.capabilities:
            pytest.skip(f"the algorithm says {capability}: {because}")

    def claimed(self, prefix: str) -> list[str]:
        """What is claimed by capabilities PREFIX:NAME; skips the test where there is none."""
        words = (word.partition(":") for word in sorted(self.offer.capabilities))
        names = [name for before, _, name in words if before == prefix]
        if not names:
            pytest.skip(f"the algorithm declares no capability {prefix}:NAME")
        return names

    # ------------------------------------------------------------ data

    def request(self, target: TargetSpec | None = None) -> FeatureRequest:
        target = target or self.example.spec
        return self.hook.feature_request(target=target, options=self.options)

    @cached_property
    def learned(self) -> list[Sample]:
        """The target's answers, each to be learned whole."""
        return [self._sample([row]) for row in range(len(QUESTIONS))]

    @cached_property
    def varied(self) -> list[Sample]:
        """Samples of several lengths with gaps in what is to be learned; the last is very long."""
        generator, samples = torch.Generator().manual_seed(SEED), list[Sample]()
        for rows, length in (([0], 11), ([1], 6), ([2], 9), ([0], 7), ([1, 2, 0], 0)):
            sample = self._sample(rows, length)
            gaps_T = torch.rand(sample.loss_mask_T.shape, generator=generator) < 0.8
            learned_T = gaps_T if length else gaps_T & sample.loss_mask_T
            samples.append(dataclasses.replace(sample, loss_mask_T=learned_T))
        return samples

    @cached_property
    def texts(self) -> list[Sample]:
        """Longer samples, of all questions and answers in other orders."""
        return [self._sample(rows) for rows in ([0, 1, 2], [1, 2, 0], [2, 0, 1])]

    @property
    def batch(self) -> DraftBatch:
        """A batch of them, which a test may change."""
        return self.collate(self.varied)

    def _sample(self, rows: Sequence[int], length: int = 0) -> Sample:
        """Questions with their answers, or the last `length` tokens of them."""
        example, request = self.example, self.request()
        tokens = [token for row in rows for token in example.prompts[row] + example.answers[row]]
        answered = [n >= len(example.prompts[r]) for r in rows for n in range(example.lengths[r])]
        features = {
            name: torch.cat([example.features[row][name] for row in rows])[-length:]
            for name in request.names
        }
        return Sample(
            SampleId(f"{rows}.{length}", 1),
            torch.tensor(tokens[-length:]),
            torch.tensor(answered[-length:]),
            request.select(features),
        )

    @cached_property
    def summary(self) -> DataSummary:
        """What a run on the learned samples would know of its data."""
        answered = [token for answer in self.example.answers for token in answer]
        counts = {token: answered.count(token) for token in answered}
        lengths = [len(sample.token_ids_T) for sample in self.learned]
        return DataSummary("suite", len(lengths), sum(lengths), len(answered), max(lengths), counts)

    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        return self.hook.collate(samples=[*samples], options=self.options)

    # ------------------------------------------------------------ training

    def build(self, target: TargetSpec | None = None, seed: int = SEED) -> Draft:
        """A fresh draft, as a run with this seed builds it."""
        given = {"target": target or self.example.spec, "options": self.options}
        return self._made("build_draft", seed, data=self.summary, **given)

    def read(self, folder: Path) -> Draft:
        """A draft that was exported."""
        given = {"target": self.example.spec, "options": self.options}
        return self._made("import_draft", SEED, folder=folder, **given)

    def _made(self, hook: str, seed: int, **given: Any) -> Draft:
        with global_seed(seed):
            draft: Draft = getattr(self.hook, hook)(**given)
            assert torch.initial_seed() == seed, f"{hook} seeds torch's own generator"
        return draft

    @cached_property
    def draft(self) -> Draft:
        """A fresh draft."""
        return self.build()

    def loss(self, draft: Draft, batch: DraftBatch, step: int = STEPS // 2) -> StepOutput:
        """The loss at a step of a run of `STEPS` steps, as one ratio."""
        return as_ratio(self.output(draft, batch, step))

    def output(self, draft: Draft, batch: DraftBatch, step: int = STEPS // 2) -> StepOutput:
        """What the algorithm returns as the loss."""
        context = StepContext(step, STEPS, SEED)
        return self.hook.forward_loss(
            draft=draft, batch=batch, context=context, options=self.options
        )

    def measure(self, *batches: DraftBatch, draft: Draft | None = None) -> Measured:
        """Sum up the loss and the gradient of micro-batches, as the trainer does."""
        draft = draft or self.draft
        trained = {n: p for n, p in draft.module.named_parameters() if p.requires_grad}
        output = as_ratio(summed([self.output(draft, batch) for batch in batches]))
        found: Sequence[Tensor | None] = [None] * len(trained)
        if output.numerator.requires_grad:
            found = torch.autograd.grad(output.numerator, list(trained.values()), allow_unused=True)
        pairs = zip(trained.items(), found, strict=True)
        gradients = {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}
        detached = StepOutput(output.numerator.detach(), output.denominator, output.counts)
        return Measured(detached, gradients)

    @cached_property
    def whole(self) -> Measured:
        """The loss of the varied samples in one piece."""
        return self.measure(self.batch)

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

    def train(self, draft: Draft, steps: int = LONGEST) -> list[float]:
        """Train on the learned samples, all of them at every step; return the losses."""
        optimizer = build_optimizer(draft.parameter_groups, weight_decay=0.0, betas=(0.9, 0.999))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        batch, losses = self.collate(self.learned), list[float]()
        for step in range(steps):
            output = self.loss(draft, batch, min(step + 1, STEPS))
            output.numerator.backward()  # type: ignore[no-untyped-call]
            scale_and_clip(parameters, output.denominator, draft.defaults.clip)
            for group in optimizer.param_groups:
                group["lr"] = RATE * (min(step + 1, 5) / 5 if step < LONGEST - 10 else 0.2)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(output.numerator.detach() / output.denominator))
        return losses

    @cached_property
    def trained(self) -> Trained:
        """A draft that was trained on the target's answers."""
        draft = self.build()
        losses = self.train(draft)
        draft.module.eval()
        return Trained(draft, losses)

    @cached_property
    def begun(self) -> Draft:
        """A draft that was trained briefly: what is known by heart leaves nothing to draw."""
        draft = self.build()
        self.train(draft, steps=10)
        return draft

    # ------------------------------------------------------------ decoding

    def drafter(self, draft: Draft) -> Drafter:
        draft.module.eval()
        model = self.example.spec.load_model()
        found = self.hook.drafter(draft=draft, target=model, options=self.options)
        for name, kind in {"num_drafts": int, "depth": int, "request": FeatureRequest}.items():
            mistake = type_error(getattr(found, name, 1), kind, f"`{name}` of the drafter")
            assert not mistake, mistake
        return found

    def decode(
        self, draft: Draft, prompts: Sequence[Sequence[int]], drafter: Drafter | None = None
    ) -> list[Decoded]:
        """Decode prompts together, greedily, as long as the learned answers are."""
        runner = EagerRunner(self.example.spec.load_model(), drafter or self.drafter(draft))
        return speculate(runner, prompts, GREEDY)

    def decode_recorded(self, draft: Draft, prompts: Sequence[Sequence[int]]) -> list[Decoded]:
        """The same, in rounds that are recorded and replayed, with a row of padding."""
        model, drafter = self.example.spec.load_model(), self.drafter(draft)
        most = max(map(len, prompts)) + ANSWER + drafter.num_drafts + 1
        phase = Phase("decode", "recording", rows=(len(prompts) + 1,), lengths=(most,))
        runner = DecodeGraphRunner(model, drafter, draft.module, phase, RecordingBackend())
        runner.reserve(len(prompts), most)
        return speculate(runner, prompts, GREEDY)

    # ------------------------------------------------------------ exports

    def round(self, row: int, layers: Sequence[int], host: Host) -> Round:
        """Where a server stands after a prompt, before the first drafts."""
        prompt, features = self.example.prompts[row], self.example.features[row]
        hidden = tuple(features[f"hidden.{layer}"][: len(prompt)] for layer in layers)
        last_TH, first = features["last_hidden"][: len(prompt)], self.example.answers[row][0]
        return Round(host, torch.tensor(prompt), first, hidden, last_TH)

    def export(self, draft: Draft, folder: Path, layout: str) -> Path:
        folder.mkdir(parents=True)
        self.hook.export_draft(draft=draft, folder=folder, layout=layout, options=self.options)
        return folder

    def served(self, folder: Path, server: str) -> ServedDraft:
        served: ServedDraft = self.hook.read_export(
            folder=folder, server=server, options=self.options
        )
        mistake = type_error(served, ServedDraft, "what read_export returned")
        assert not mistake, mistake
        return served


# ---------------------------------------------------------------- small helpers


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


def snapshot(draft: Draft) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, also those outside the state dict."""
    named = [*draft.module.named_parameters(), *draft.module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}
