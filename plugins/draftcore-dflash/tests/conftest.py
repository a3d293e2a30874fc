"""A tiny random target, saved and read back as any target is, and what tests draw from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash import plugin
from draftcore_dflash.options import DFlashOptions
from draftcore_sdk.samples import random_samples
from draftcore_sdk.targets import tiny_target

from draftcore.contracts.algorithm import DataSummary, Draft, Sample
from draftcore.contracts.target import TargetSpec
from draftcore.target import TransformersTarget

WIDTH = 32
LAYERS = (1, 3, 4)
SMALL = {"num_layers": 2, "layers": LAYERS, "block_size": 4, "num_anchors": 5}
SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 8,
    "head_dim": 8,
    "vocab_size": 270,
}

MakeTarget = Callable[..., TargetSpec]
MakeDraft = Callable[..., Draft]
MakeSamples = Callable[..., list[Sample]]


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """Save a Qwen3 with random weights; keyword arguments change its config."""

    def make(**changes: Any) -> TargetSpec:
        folder = tiny_target(tmp_path_factory.mktemp("target"), **{**SHAPE, **changes})
        return TransformersTarget(str(folder), device="cpu")

    return make


@pytest.fixture(scope="session")
def target(make_target: MakeTarget) -> TargetSpec:
    return make_target()


@pytest.fixture
def make_draft(target: TargetSpec) -> MakeDraft:
    """Build a draft for the tiny target, in fp64, through the hook; arguments are options."""

    def make(of: TargetSpec = target, dtype: torch.dtype = torch.float64, **options: Any) -> Draft:
        torch.manual_seed(2)
        settings = DFlashOptions(**{**SMALL, **options})
        draft = plugin.build_draft(of, DataSummary("", 0, 0, 0, 0, {}), settings)
        draft.module.to(dtype)
        for parameter in draft.module.parameters():  # wider than usual: flat ones hide mistakes
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
        return draft

    return make


@pytest.fixture
def make_samples() -> MakeSamples:
    """Random samples of the given lengths."""

    def make(*lengths: int, seed: int = 3, layers: tuple[int, ...] = LAYERS) -> list[Sample]:
        names = [f"hidden.{layer}" for layer in layers]
        return random_samples(lengths, names, width=WIDTH, tokens=250, seed=seed)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "export"
