"""What the algorithm suite works with: a tiny target, its own answers, an algorithm's hooks, and drafts.

The target is deep (12 layers) and wide in its weights, so that the default captured layers of an algorithm
exist, its answers vary from token to token, and a draft has to read the features to continue them.
One target serves a whole pytest process.

Shape letters: B batch, T tokens, K drafted tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftcore_eval.decode import EagerRunner, speculate
from draftcore_eval.options import EvalOptions
from draftcore_eval.report import Decoded
from draftcore_nn.served import ServedDraft
from torch import Tensor

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
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore_sdk import plain
from draftcore_sdk.internals import build_optimizer, scale_and_clip, type_error
from draftcore_sdk.suite import bound

LAYERS, GROWTH, ANSWER = 12, 1.5, 10
SPECIAL, VOCABULARY = 256, 259  # of bytes, and with three special tokens
# Most matrices are square: who transposes an export of such has the right shapes.
SHAPE: Mapping[str, Any] = {
    "num_hidden_layers": LAYERS, "head_dim": 12, "intermediate_size": 48,
    "max_position_embeddings": 8192,
}  # fmt: skip
UNHEARD = 8  # numbers of the last hidden state that the target's head does not read
# Their answers begin with one or two tokens in common: features have to tell which one follows.
QUESTIONS = ("a1", "c1", "c6")
Tensors = Mapping[str, Tensor]
STEPS, RATE, SEED = 30, 0.01, 7
LONGEST = 3 * STEPS  # steps after which a draft has learned what it can
GREEDY = EvalOptions(max_new_tokens=ANSWER, batch=len(QUESTIONS))

# A loose plugin that ends training as Ctrl-C does, after the step that the variable names.
STOP_AT = "DRAFTCORE_SUITE_STOP_AT"
STOPPER = f"""import os, signal
from draftcore import hookimpl

@hookimpl
def step_finished(step):
    if os.environ.get({STOP_AT!r}) == str(step):
        signal.raise_signal(signal.SIGINT)
"""
# And it offers the target in plain torch: no process has to import transformers' models.
TARGET = """
from draftcore.contracts.offers import Offer

@hookimpl
def describe():
    return [Offer("target", "plain", options="draftcore_hf.options:TargetOptions")]

@hookimpl
def target(name, options):
    if name == "plain":
        from draftcore_sdk.plain import open_target
        return open_target(**options.model_dump())
"""


@dataclass(frozen=True)
class Example:
    """A tiny target, questions to it with its own greedy answers, and all features of these."""

    stopper: Path  # a loose plugin that ends training after the step named by STOP_AT
    spec: TargetSpec
    prompts: list[list[int]]
    answers: list[list[int]]
    features: list[dict[str, Tensor]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each question and its answer."""
        return [len(p) + len(a) for p, a in zip(self.prompts, self.answers, strict=True)]

    @classmethod
    @functools.cache
    def of(cls, folder: Path, more: str = "{}") -> Example:
        """Make the example of this process in a folder, or return what is made there.

        `more` is JSON, which can be a key: what `tiny_target` is told beside the usual shape.
        """
        shape = {**SHAPE, **json.loads(more)}
        write = plain.write if shape == SHAPE else plain.write_other
        path = write(folder / "target", GROWTH, UNHEARD, **shape)
        # A module has one name in a process.
        stopper = folder / f"suite_{zlib.crc32(bytes(folder))}.py"
        stopper.write_text(STOPPER + TARGET)
        spec = plain.open_target(str(path), device="cpu")
        spec.logit_scale, spec.logit_softcap = 2.0, 20.0  # greedy decoding is the same with them
        written = spec.load_tokenizer().apply_chat_template
        asked = [[{"role": "user", "content": text}] for text in QUESTIONS]
        prompts = [list(written(turns, add_generation_prompt=True)["input_ids"]) for turns in asked]
        answers = spec.load_model().generate(prompts, ANSWER)
        everything = FeatureRequest(tuple(range(LAYERS)), True, "float32", spec.vocab_size, True)
        features = []
        for question, answer in zip(prompts, answers, strict=True):
            tokens_1T, lengths_1 = torch.tensor([question + answer]), [len(question + answer)]
            found = spec.load_model().features(tokens_1T, torch.tensor(lengths_1), everything)
            # Out of inference mode: autograd may save what a capture would have stored.
            features.append({name: value[0].clone() for name, value in found.items()})
        return cls(stopper, spec, prompts, answers, features)


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
    plugin: str = ""  # what offers it, as a suite says
    seeding: list[str] = field(default_factory=list)  # hooks that were found to seed, and said so

    def chosen(self, **options: Any) -> Bench:
        """Return the bench with other values of options."""
        data = {**self.data, **options}
        own = bound(self.plugin, "algorithm", self.offer.name, data)
        return dataclasses.replace(self, hook=own.hook, options=own.options, data=data)

    def require(self, capability: str) -> None:
        if capability not in self.offer.capabilities:
            pytest.skip(f"the algorithm does not claim the capability {capability}")

    def says(self, capability: str) -> bool:
        """Whether it claims a capability, for any options or, as `NAME:CHOICE`, for one that is made."""
        chosen = [name if value is True else value for name, value in self.options or ()]
        words = {capability, *(f"{capability}:{choice}" for choice in chosen)}
        return not words.isdisjoint(self.offer.capabilities)

    def require_absent(self, capability: str, because: str) -> None:
        if self.says(capability):
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
        return [self.text([row]) for row in range(len(QUESTIONS))]

    @cached_property
    def varied(self) -> list[Sample]:
        """Samples of several lengths with gaps in what is to be learned; the last is very long."""
        generator, samples = torch.Generator().manual_seed(SEED), list[Sample]()
        for rows, length in (([0], 11), ([1], 6), ([2], 9), ([0], 7), ([1, 2, 0], 0)):
            sample = self.text(rows, length)
            gaps_T = torch.rand(sample.loss_mask_T.shape, generator=generator) < 0.8
            learned_T = gaps_T if length else gaps_T & sample.loss_mask_T
            samples.append(dataclasses.replace(sample, loss_mask_T=learned_T))
        return samples

    @cached_property
    def texts(self) -> list[Sample]:
        """Longer samples, of all questions and answers in other orders."""
        return [self.text(rows) for rows in ([0, 1, 2] * 6, [1, 2, 0], [2, 0, 1])]

    @property
    def batch(self) -> DraftBatch:
        """A batch of them, which a test may change."""
        return self.collate(self.varied)

    def text(self, rows: Sequence[int], length: int = 0) -> Sample:
        """Questions with their answers, or the last `length` tokens of them."""
        example, request = self.example, self.request()
        tokens = [token for row in rows for token in example.prompts[row] + example.answers[row]]
        answered = [n >= len(example.prompts[r]) for r in rows for n in range(example.lengths[r])]
        features = {
            name: torch.cat([example.features[row][name] for row in rows])[-length:]
            for name in request.names
        }
        text = torch.tensor(tokens[-length:]), torch.tensor(answered[-length:])
        return Sample(SampleId(f"{rows}.{length}", 1), *text, request.select(features))

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

    def build(
        self, target: TargetSpec | None = None, seed: int = SEED, data: DataSummary | None = None
    ) -> Draft:
        """A fresh draft, as a run with this seed builds it."""
        return self._made("build_draft", target, seed, data=data or self.summary)

    def read(self, folder: Path, target: TargetSpec | None = None) -> Draft:
        """A draft that was exported."""
        return self._made("import_draft", target, SEED, folder=folder)

    def _made(self, hook: str, target: TargetSpec | None, seed: int, **given: Any) -> Draft:
        given |= {"target": target or self.example.spec, "options": self.options}
        with global_seed(seed):
            draft: Draft = getattr(self.hook, hook)(**given)
            seeds = torch.initial_seed() != seed and hook not in self.seeding
            self.seeding.extend([hook] * seeds)
            assert not seeds, f"{hook} seeds torch's own generator"
        return draft

    @cached_property
    def draft(self) -> Draft:
        """A fresh draft."""
        return self.build()

    @cached_property
    def noisy(self) -> Draft:
        """A draft all of whose weights count, in evaluation mode; it was trained on nothing."""
        draft = self.shaken(0.1)
        draft.module.eval()
        return draft

    def shaken(self, width: float, **of: Any) -> Draft:
        """Build a draft with noise on all that is trained: fresh weights are small, and norms 1."""
        draft = self.build(**of)
        with global_seed(SEED), torch.no_grad():
            for weight in trainable(draft).values():
                weight.add_(torch.randn_like(weight), alpha=width)
        return draft

    def loss(self, draft: Draft, batch: DraftBatch, step: int = STEPS // 2) -> StepOutput:
        """The loss at a step of a run of `STEPS` steps, as one ratio."""
        return as_ratio(self.output(draft, batch, step))

    def output(
        self, draft: Draft, batch: DraftBatch, step: int = STEPS // 2, seed: int = SEED,
        training: bool = True, total: int = STEPS,
    ) -> StepOutput:  # fmt: skip
        """What the algorithm returns as the loss."""
        context = StepContext(step, total, seed, training)
        given: Any = {"context": context, "options": self.options}
        return self.hook.forward_loss(draft=draft, batch=batch, **given)

    def measure(self, *batches: DraftBatch, draft: Draft | None = None) -> Measured:
        """Sum up the loss and the gradient of micro-batches, as the trainer does."""
        draft = draft or self.draft
        trained = trainable(draft)
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

    def train(self, draft: Draft, steps: int = LONGEST, samples: Any = ()) -> list[float]:
        """Train on these samples, or the learned ones, all of them at every step; return the losses."""
        optimizer = build_optimizer(draft.parameter_groups, weight_decay=0.0, betas=(0.9, 0.999))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        batch, losses = self.collate(samples or self.learned), list[float]()
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

    # ------------------------------------------------------------ decoding

    def drafter(self, draft: Draft, model: TargetModel | None = None) -> Drafter:
        draft.module.eval()
        model = model or self.example.spec.load_model()
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

    def export(self, draft: Draft, folder: Path, layout: str) -> Path:
        folder.mkdir(parents=True)
        self.hook.export_draft(draft=draft, folder=folder, layout=layout, options=self.options)
        return folder

    def served(self, folder: Path, server: str) -> ServedDraft:
        given: Any = {"folder": folder, "server": server, "options": self.options}
        served: ServedDraft = self.hook.read_export(**given)
        mistake = type_error(served, ServedDraft, "what read_export returned")
        assert not mistake, mistake
        return served


def contents(fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the tensors of a sample, a batch or a row, by field."""
    values = {**fields, **fields.get("features", {})}
    return {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}


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


def trainable(draft: Draft) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in draft.module.named_parameters() if p.requires_grad}


def snapshot(draft: Draft) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, also those outside the state dict."""
    named = [*draft.module.named_parameters(), *draft.module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def require_same_bits(found: Tensors, expected: Tensors, said: str = "") -> None:
    """Compare dtype, shape and every bit."""
    odd = sorted(found.keys() ^ expected.keys())
    assert not odd, f"{said}there are other tensors: {odd}"
    for name, tensor in expected.items():
        forms = [f"{one.dtype} {list(one.shape)}" for one in (found[name], tensor)]
        assert forms[0] == forms[1], f"{said}{name} is {forms[0]}, not {forms[1]}"
        places = (found[name] != tensor).nonzero().tolist()
        if places:
            said += f"{name}: {len(places)} of {tensor.numel()} values differ"
            pytest.fail(f"{said}, first at {places[0]}")


def require_same_output(found: StepOutput, expected: StepOutput, said: str) -> None:
    """The same loss and metrics to the bit."""
    pairs = {"numerator": (found.numerator, expected.numerator)}
    pairs["denominator"] = found.denominator, expected.denominator
    pairs |= {f"{n} (above)": (found.counts[n][0], expected.counts[n][0]) for n in found.counts}
    for name, (ours, theirs) in pairs.items():
        same = torch.equal(ours, theirs)
        assert same, f"{said} a {name} of {float(ours):.9g} and of {float(theirs):.9g}"


def summed(outputs: Sequence[StepOutput]) -> StepOutput:
    """Sum up the outputs of micro-batches, as the trainer does."""

    def totals(pairs: Iterable[Sequence[Any]]) -> tuple[Tensor, Tensor]:
        above, below, *_ = zip(*pairs, strict=True)
        return torch.stack(above).sum(), torch.stack(below).sum()

    sizes = {len(output.terms) for output in outputs}
    assert len(sizes) == 1, f"batches of one step have {sizes} terms: return as many of each"
    terms = zip(*(output.terms for output in outputs), strict=True)
    return StepOutput(
        terms=[(*totals(same), same[0][2]) for same in terms],
        counts={name: totals(o.counts[name] for o in outputs) for name in outputs[0].counts},
    )


def as_ratio(output: StepOutput) -> StepOutput:
    """Return a loss as one ratio: of several terms their sum, over 1."""
    if len(output.terms) == 1 and output.terms[0][2] == 1:
        return StepOutput(*output.terms[0][:2], output.counts)
    parts = [w * n / torch.where(d == 0, torch.ones_like(d), d) for n, d, w in output.terms]
    return StepOutput(sum(parts[1:], parts[0]), torch.ones_like(parts[0].detach()), output.counts)
