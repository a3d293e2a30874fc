"""Exports reload exactly, say what both servers read, and damaged drafts are refused by name.

What is said of vLLM is read from its source of August 2026 (`llama_eagle3.py`, its loader and its
`EAGLEConfig`); no test runs it.
"""

from pathlib import Path
from typing import ClassVar

import draftcore_eagle3
import pytest
import torch
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.options import Eagle3Options
from draftcore_nn.served import UnservableError
from draftcore_sdk.algorithm_checks import WarmStarts
from draftcore_sdk.algorithm_fixtures import MakeDraft, Refusals, drop, put
from draftcore_sdk.algorithm_training import require_same_bits
from draftcore_sdk.exports import (
    GONE,
    ROPES,
    change_config,
    change_tensors,
    config_of,
    imports_of_ours,
    largest_gap,
)
from safetensors.torch import load_file

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

OPTIONS = Eagle3Options()


@pytest.fixture
def draft(make_draft: MakeDraft) -> Draft:
    return make_draft(dtype=torch.float32, draft_vocab_size=24, norm_output=True)


@pytest.fixture
def exported(draft: Draft, folder: Path) -> Path:
    Eagle3(OPTIONS).export_draft(draft, folder, "serving")
    return folder


class TestRefusals(Refusals):
    pass


class TestWarmStarts(WarmStarts):
    kept: ClassVar = {"draft_vocab_size": 24, "layers": [0, 2, 6], "norm_output": True}
    free: ClassVar = {"loss": "lk_alpha", "layers": [6, 2, 0]}
    against: ClassVar = {"draft_vocab_size": 30, "layers": [0, 1, 2], "norm_output": False}


# ------------------------------------------------------------ what is written


def test_tensors_and_config_say_what_servers_read(exported: Path) -> None:
    """Outputs of layers 1, 3, 4 enter layers 2, 4, 5; sglang reads the one, vLLM the other."""
    data, tensors = config_of(exported), load_file(exported / "model.safetensors")
    assert data["architectures"] == ["LlamaForCausalLMEagle3"]  # kept by vLLM, as it ends so
    assert data["model_type"] == "llama"  # the class of the config
    assert data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert data["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert data["eagle_config"]["use_aux_hidden_state"] is True
    assert data["norm_output"] is True
    for name in ("norm_before_residual", "attention_bias", "mlp_bias", "bias", "qkv_bias"):
        assert not data.get(name)
    assert data["tie_word_embeddings"] is False
    assert tensors["fc.weight"].shape == (32, 3 * data["target_hidden_size"])
    assert len(tensors["lm_head.weight"]) == data["draft_vocab_size"] == 24
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], tensors["d2t"] + torch.arange(24))


# ------------------------------------------------------------ what is read


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0.", "model.midlayer."])
def test_published_spellings_are_read(
    prefix: str, draft: Draft, exported: Path, target: TargetSpec
) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["embed_tokens.weight"], tensors["t2d"]
        for name in list(tensors):
            tensors[name.replace("midlayer.", prefix)] = tensors.pop(name)

    change_tensors(exported, rename)
    change_config(exported, eagle_aux_hidden_state_layer_ids=GONE)
    again = Eagle3(OPTIONS).import_draft(exported, target)
    assert again.config == draft.config
    require_same_bits(again.module.state_dict(), draft.module.state_dict())


REFUSED_CONFIGS = {
    "architectures": (["Eagle3DraftModel"], "research layout|LlamaForCausalLMEagle3"),
    "eagle_aux_hidden_state_layer_ids": ([1, 3, 4], "two sets of captured layers"),
    "norm_before_residual": (True, "norm_before_residual: True"),
    "attention_bias": (True, "attention_bias: True"),
    "num_hidden_layers": (2, "num_hidden_layers: 2"),
    "vocab_size": (50, "vocab_size 50, the target 48"),
    "hidden_size": (GONE, "hidden_size"),
    "draft_vocab_size": (25, r"d2t of shape \[24\]"),
    "rope_parameters": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "'dynamic'"),
}


@pytest.mark.parametrize("field", REFUSED_CONFIGS)
def test_a_config_we_would_compute_differently_is_refused(
    field: str, exported: Path, target: TargetSpec
) -> None:
    value, message = REFUSED_CONFIGS[field]
    change_config(exported, **{field: value})
    with pytest.raises(UsageError, match=message):
        Eagle3(OPTIONS).import_draft(exported, target)


def absolute(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] += torch.arange(24)


REFUSED_TENSORS = {
    "missing": (drop("midlayer.hidden_norm.weight"), r"missing midlayer.hidden_norm.weight \[32\]"),
    "unknown": (put("input_norm.weight", torch.ones(96)), r"unknown input_norm.weight \[96\]"),
    "shape": (put("fc.weight", torch.ones(32, 64)), r"fc.weight is \[32, 64\], not \[32, 96\]"),
    "no mapping": (drop("d2t"), "no d2t"),
    "absolute ids": (absolute, "absolute token ids"),
    "other mapping": (put("t2d", torch.ones(48, dtype=torch.bool)), "t2d and d2t"),
    "other target": (put("embed_tokens.weight", torch.ones(48, 32)), "not the target's embedding"),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_damaged_tensors_are_refused_by_name(case: str, exported: Path, target: TargetSpec) -> None:
    change, message = REFUSED_TENSORS[case]
    change_tensors(exported, change)
    with pytest.raises(UsageError, match=message):
        Eagle3(OPTIONS).import_draft(exported, target)


# ------------------------------------------------------------ as servers read it


def test_the_servers_reader_shares_no_code_with_what_it_checks() -> None:
    package = Path(draftcore_eagle3.__file__).parent
    assert imports_of_ours(package / "served.py") == {"draftcore_nn.served"}


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_is_read_as_it_was_trained(rope: str, server: str, tmp_path: Path) -> None:
    options = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_drafts": 3}
    assert largest_gap("draftcore_eagle3.plugin", options, rope, server, tmp_path) < 1e-3


def test_servers_read_no_unknown_kind_of_draft(exported: Path) -> None:
    change_config(exported, architectures=["Eagle3DraftModel"])
    with pytest.raises(UnservableError, match="LlamaForCausalLMEagle3"):
        Eagle3(OPTIONS).read_export(exported, "sglang")


@pytest.mark.parametrize("name", ["model.norm.weight", "input_norm.weight"])
def test_vllm_refuses_a_tensor_without_a_place(name: str, exported: Path) -> None:
    """sglang removes the prefix of the first, and leaves the other unread."""
    prefixed = name.startswith("model.")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors["norm.weight"].clone()
        if prefixed:
            del tensors["norm.weight"]

    change_tensors(exported, add)
    assert Eagle3(OPTIONS).read_export(exported, "sglang").ignored == (() if prefixed else (name,))
    with pytest.raises(UnservableError, match=f"no place for: {name}"):
        Eagle3(OPTIONS).read_export(exported, "vllm")
