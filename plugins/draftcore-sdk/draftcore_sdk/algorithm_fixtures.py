"""Fixtures for an algorithm's own tests: a tiny target, drafts for it, samples.

A conftest imports the fixtures and adds one, `algorithm`, that says what they are made for:

    from draftcore_sdk.algorithm_fixtures import Tiny, folder, make_draft, make_samples, ...

    @pytest.fixture(scope="session")
    def algorithm() -> Tiny:
        return Tiny(MyAlgorithm, MyOptions, {"num_layers": 2}, ["hidden.1", "last_hidden"], shape={})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_hf.target import TransformersTarget
from torch import Tensor, nn

from draftcore.contracts.algorithm import (
    DataSummary,
    Draft,
    DraftBatch,
    Sample,
    SampleId,
    StepContext,
    StepOutput,
)
from draftcore.contracts.target import TargetSpec
from draftcore_sdk.targets import tiny_target

MakeTarget = Callable[..., TargetSpec]
MakeDraft = Callable[..., Draft]
MakeSamples = Callable[..., list[Sample]]
WIDTH = 32
NO_DATA = DataSummary("", 0, 0, 0, 0, {})
SHAPE = {"hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 8, "head_dim": 8}


@dataclass(frozen=True)
class Tiny:
    """An algorithm at a size for tests: its class and options, and what keeps it small.

    `small` are the options of every draft, `shape` goes to `tiny_target`, `features` are those of
    samples, with token ids below `tokens`. `std` is that of a draft's random weights: large, as flat
    distributions hide mistakes.
    """

    made_with: Callable[[Any], Any]  # its options
    options: Callable[..., Any]
    small: Mapping[str, Any]
    features: Sequence[str]
    shape: Mapping[str, Any]
    summary: DataSummary = NO_DATA
    tokens: int = 250
    std: float = 0.2

    @property
    def plain(self) -> Any:
        """The algorithm with its default options."""
        return self.made_with(self.options())


@pytest.fixture(scope="session")
def make_target(algorithm: Tiny, tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """Save a Qwen3 with random weights; keyword arguments go to `tiny_target`."""

    def make(**changes: Any) -> TargetSpec:
        shape = {**SHAPE, **algorithm.shape, **changes}
        folder = tiny_target(tmp_path_factory.mktemp("target"), **shape)
        return TransformersTarget(str(folder), device="cpu")

    return make


@pytest.fixture(scope="session")
def target(make_target: MakeTarget) -> TargetSpec:
    return make_target()


@pytest.fixture
def make_draft(algorithm: Tiny, target: TargetSpec) -> MakeDraft:
    """Build a draft for the tiny target, in fp64, through the hook; arguments are options."""

    def make(of: TargetSpec = target, dtype: torch.dtype = torch.float64, **options: Any) -> Draft:
        torch.manual_seed(2)
        settings = algorithm.options(**{**algorithm.small, **options})
        draft: Draft = algorithm.made_with(settings).build_draft(of, algorithm.summary)
        draft.module.to(dtype)
        for parameter in draft.module.parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=algorithm.std)
        return draft

    return make


@pytest.fixture
def make_samples(algorithm: Tiny) -> MakeSamples:
    """Draw random samples of these lengths, about three in four of their tokens to be learned."""

    def make(*lengths: int) -> list[Sample]:
        generator, samples = torch.Generator().manual_seed(3), list[Sample]()
        for index, length in enumerate(lengths):
            tokens_T = torch.randint(algorithm.tokens, (length,), generator=generator)
            learned_T = torch.rand(length, generator=generator) < 0.75
            form: Any = {"size": (length, WIDTH), "generator": generator, "dtype": torch.float64}
            features = {name: torch.randn(**form) for name in algorithm.features}
            samples.append(Sample(SampleId(f"3.{index}", 1), tokens_T, learned_T, features))
        return samples

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Name a folder for an export, which is not there yet."""
    return tmp_path / "export"


# ---------------------------------------------------------------- training


def accumulate(
    algorithm: Any, draft: Draft, batches: Sequence[DraftBatch], context: StepContext
) -> tuple[StepOutput, list[Tensor]]:
    """Run micro-batches as one update; return what their outputs sum up to, and the gradients."""
    draft.module.zero_grad()
    output = as_ratio(summed([algorithm.forward_loss(draft, batch, context) for batch in batches]))
    torch.autograd.backward([output.numerator / output.denominator])
    gradients = [p.grad.clone() for p in draft.module.parameters() if p.grad is not None]
    return output, gradients


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


def use_exact_frequencies(module: nn.Module, theta: float = 10000.0) -> None:
    """Replace the rotary frequencies, computed in fp32, by the same in fp64."""
    frequency = module.get_buffer("rotary.inverse_frequency")
    exact = theta ** -(torch.arange(len(frequency), dtype=torch.float64) / len(frequency))
    torch.testing.assert_close(frequency, exact, rtol=1e-6, atol=0)
    frequency.copy_(exact)


# ---------------------------------------------------------------- exports


def drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    """Return an edit of an export's tensors that takes one out."""
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    """Return an edit of an export's tensors that sets one."""
    return lambda tensors: tensors.update({name: tensor})
