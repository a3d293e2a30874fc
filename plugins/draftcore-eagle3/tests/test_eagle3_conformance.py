"""EAGLE-3 passes its suites; exports say what both servers read.

What is said of vLLM is read from its source of August 2026 (`llama_eagle3.py`, its loader and its
`EAGLEConfig`); no test runs it.
"""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.options import Eagle3Options
from draftcore_sdk.algorithm_exports import ExportSuite
from draftcore_sdk.algorithm_fixtures import MakeDraft, drop, put
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.exports import GONE, ROPES, change_config, change_tensors, config_of
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.workbench import require_same_bits
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.target import TargetSpec


class TestPlugin(PluginSuite):
    plugin = "draftcore_eagle3.plugin"


class TestEagle3(AlgorithmSuite):
    plugin = "draftcore_eagle3.plugin"
    options: ClassVar[dict[str, Any]] = {"ttt_length": 3, "draft_vocab_size": 200, "num_drafts": 3}


Tensors = dict[str, Tensor]
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_drafts": 3}
EAGLE_31 = {"fc_norm": True, "norm_output": True, "num_drafts": 4}


@pytest.fixture
def draft(make_draft: MakeDraft) -> Draft:
    return make_draft(dtype=torch.float32, draft_vocab_size=24, norm_output=True)


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(24)


def prefix(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors.pop("norm.weight")


class TestExports(ExportSuite):
    plugin, architecture = "draftcore_eagle3.plugin", "LlamaForCausalLMEagle3"
    kept: ClassVar = {"draft_vocab_size": 24, "layers": [0, 2, 6], "norm_output": True}
    free: ClassVar = {"loss": "lk_alpha", "layers": [6, 2, 0]}
    against: ClassVar = {"draft_vocab_size": 30, "layers": [0, 1, 2], "norm_output": False}
    refused_configs: ClassVar = {
        "two sets of layers": (
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "two sets of captured layers",
        ),
        "another residual": ({"norm_before_residual": True}, "norm_before_residual: True"),
        "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers: 2"),
        "another vocabulary of the draft": ({"draft_vocab_size": 25}, r"d2t of shape \[24\]"),
    }  # fmt: skip
    refused_tensors: ClassVar = {
        "unknown": (put("input_norm.weight", torch.ones(96)), r"unknown input_norm.weight \[96\]"),
        "no mapping": (drop("d2t"), "no d2t"),
        "absolute ids": (absolute, "absolute token ids"),
        "other mapping": (put("t2d", torch.ones(48, dtype=torch.bool)), "t2d and d2t"),
        "other target": (
            put("embed_tokens.weight", torch.ones(48, 32)), "not the target's embedding",
        ),
    }  # fmt: skip
    stray: ClassVar = {
        "model.norm.weight": (prefix, ()),  # sglang removes the prefix
        "input_norm.weight": (put("input_norm.weight", torch.ones(96)), ("input_norm.weight",)),
    }
    served: ClassVar[dict[str, tuple[str, dict[str, Any]]]] = {
        **{rope: (rope, HEADS) for rope in ROPES},
        "EAGLE-3.1": ("default", EAGLE_31),
    }


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
    def rename(tensors: Tensors) -> None:
        del tensors["embed_tokens.weight"], tensors["t2d"]
        for name in list(tensors):
            tensors[name.replace("midlayer.", prefix)] = tensors.pop(name)

    change_tensors(exported, rename)
    change_config(exported, eagle_aux_hidden_state_layer_ids=GONE)
    again = Eagle3(Eagle3Options()).import_draft(exported, target)
    assert again.config == draft.config
    require_same_bits(again.module.state_dict(), draft.module.state_dict())
