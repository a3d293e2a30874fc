"""A tiny random target, saved and read back as any target is, and what tests draw from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_eagle3 import plugin
from draftcore_eagle3.options import Eagle3Options
from draftcore_sdk.samples import random_samples
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftcore.contracts.algorithm import DataSummary, Draft, Sample
from draftcore.contracts.target import TargetSpec
from draftcore.target import TransformersTarget

VOCAB, WIDTH, LAYERS = 48, 32, 8

MakeTarget = Callable[..., TargetSpec]
MakeDraft = Callable[..., Draft]
MakeSamples = Callable[..., list[Sample]]


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """Save a Qwen3 with random weights; keyword arguments change its config."""

    def make(**changes: Any) -> TargetSpec:
        torch.manual_seed(1)
        shape: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "intermediate_size": 40,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            "dtype": "float32",
            "eos_token_id": None,
        }
        folder = tmp_path_factory.mktemp("target")
        model = Qwen3ForCausalLM(Qwen3Config(**{**shape, **changes}))
        for parameter in model.parameters():
            if parameter.ndim == 2:  # larger than usual: a flat teacher would hide mistakes
                torch.nn.init.normal_(parameter, std=0.3)
        model.to(model.config.dtype).save_pretrained(folder)
        return TransformersTarget(str(folder))

    return make


@pytest.fixture(scope="session")
def target(make_target: MakeTarget) -> TargetSpec:
    return make_target()


@pytest.fixture
def make_draft(target: TargetSpec) -> MakeDraft:
    """Build a draft for the tiny target, in fp64, through the hook; arguments are options."""

    def make(of: TargetSpec = target, dtype: torch.dtype = torch.float64, **options: Any) -> Draft:
        torch.manual_seed(2)
        settings = Eagle3Options(**{"ttt_length": 3, **options})
        seen = DataSummary("", 1, 90, 90, 9, {token: 90 - token for token in range(0, VOCAB, 2)})
        draft = plugin.build_draft(of, seen, settings)
        draft.module.to(dtype)
        for parameter in draft.module.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
        return draft

    return make


@pytest.fixture
def make_samples() -> MakeSamples:
    """Random samples of the given lengths."""

    def make(*lengths: int, seed: int = 3, layers: tuple[int, ...] = (1, 3, 4)) -> list[Sample]:
        names = [*(f"hidden.{layer}" for layer in layers), "last_hidden"]
        return random_samples(lengths, names, width=WIDTH, tokens=VOCAB, seed=seed)

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "export"
