"""A tiny random target, saved and read back as any target is, and what tests draw from it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftcore_medusa import plugin
from draftcore_medusa.options import MedusaOptions
from draftcore_sdk.targets import tiny_target

from draftcore.contracts.algorithm import DataSummary, Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec
from draftcore.target import TransformersTarget

WIDTH = 48
MakeDraft = Callable[..., Draft]
MakeSamples = Callable[..., list[Sample]]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    folder = tiny_target(tmp_path_factory.mktemp("target"), hidden_size=WIDTH)
    return TransformersTarget(str(folder), device="cpu")


@pytest.fixture
def make_draft(target: TargetSpec) -> MakeDraft:
    """Build a draft through the hook; arguments are options. `random` heads are not the identity."""

    def make(
        of: TargetSpec = target,
        dtype: torch.dtype = torch.float64,
        random: bool = True,
        **options: Any,
    ) -> Draft:
        torch.manual_seed(2)
        draft = plugin.build_draft(of, DataSummary("", 0, 0, 0, 0, {}), MedusaOptions(**options))
        draft.module.to(dtype)
        for parameter in draft.module.parameters() if random else ():
            torch.nn.init.normal_(parameter, std=0.2)
        return draft

    return make


@pytest.fixture
def make_samples() -> MakeSamples:
    """Random samples of the given lengths, about three in four tokens to be learned."""

    def make(*lengths: int, seed: int = 3) -> list[Sample]:
        generator = torch.Generator().manual_seed(seed)
        return [
            Sample(
                SampleId(f"{seed}.{index}", 1),
                torch.randint(250, (length,), generator=generator),
                torch.rand(length, generator=generator) < 0.75,
                {"last_hidden": torch.randn(length, WIDTH, generator=generator).double()},
            )
            for index, length in enumerate(lengths)
        ]

    return make
