"""DFlash passes its suites; exports reload exactly and say what servers read.

What is said of vLLM is read from its source of August 2026 (`qwen3_dflash.py`, its loader, and the
code that chooses captured layers); no test runs it.
"""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.options import DFlashOptions
from draftcore_nn.served import Host, Round, UnservableError
from draftcore_sdk.algorithm_exports import ExportSuite
from draftcore_sdk.algorithm_fixtures import MakeDraft, MakeTarget, drop, put
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.exports import GONE, ROPES, change_config, change_tensors, config_of
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.workbench import require_same_bits
from safetensors.torch import load_file
from transformers import Qwen3Config

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.target import TargetSpec


class TestPlugin(PluginSuite):
    plugin = "draftcore_dflash.plugin"


class TestDFlash(AlgorithmSuite):
    plugin = "draftcore_dflash.plugin"
    # Nine anchors are all of a learned answer, and a choice in the suite's long sample.
    options: ClassVar[dict[str, Any]] = {
        "num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9,
    }  # fmt: skip


OPTIONS = DFlashOptions()
MIXED = ("full_attention", "sliding_attention")


class TestExports(ExportSuite):
    plugin, architecture = "draftcore_dflash.plugin", "DFlashDraftModel"
    kept: ClassVar = {"layers": (0, 2, 6), "mask_token_id": 3}
    free: ClassVar = {"loss": "dpace"}
    against: ClassVar = {"block_size": 8, "layers": (0, 1, 2), "num_layers": 3}
    refused_configs: ClassVar = {
        "speculators": ({"transformer_layer_config": {}}, "speculators layout"),
        "another activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        "a deeper target": ({"num_target_layers": 36}, "num_target_layers 36, the target 8"),
        "three layers": ({"num_hidden_layers": 3}, "num_hidden_layers 3 and 2 layer_types"),
        "unknown layers": (
            {"layer_types": ["full_attention", "linear_attention"]}, r"\['linear_attention'\]",
        ),
        "a head": (
            {"dflash_config": {"projector_type": "domino", "block_size": 4}},
            "projector_type 'domino'",
        ),
    }  # fmt: skip
    refused_tensors: ClassVar = {
        "no norm": (drop("hidden_norm.weight"), r"missing hidden_norm.weight \[32\]"),
        "a head": (put("lm_head.weight", torch.ones(32, 32)), r"unknown lm_head.weight \[32, 32\]"),
    }
    stray: ClassVar = {  # a head of the draft's own vLLM would use, and nothing of ours has one
        "lm_head.weight": (put("lm_head.weight", torch.ones(2, 32)), ("lm_head.weight",)),
        "model.extra.weight": (put("model.extra.weight", torch.ones(2, 32)), ("extra.weight",)),
    }
    served: ClassVar[dict[str, tuple[str, dict[str, Any]]]] = {
        "partial": ("partial", {}),
        "yarn, sliding": ("deepseek-v3", {"sliding_window": 6}),
        "mixed": ("default", {"sliding_window": 6, "layer_types": MIXED}),
        "sliding, both directions": ("default", {"sliding_window": 6, "is_causal": False}),
    }


# ------------------------------------------------------------ what is written


def test_config_says_what_servers_read(exported: Path) -> None:
    data = config_of(exported)
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["model_type"] == "qwen3"
    assert data["dflash_config"]["target_layer_ids"] == [1, 3, 4]  # outputs: vLLM adds one
    assert data["dflash_config"]["mask_token_id"] == 259
    assert (data["block_size"], data["num_hidden_layers"], data["num_target_layers"]) == (4, 2, 8)
    # vLLM would prefer the first to target_layer_ids, and for the others look for more tensors.
    assert not {"eagle_aux_hidden_state_layer_ids", "draft_vocab_size"} & data.keys()
    assert "use_swa" not in data["dflash_config"]
    wide = load_file(exported / "model.safetensors")["fc.weight"].shape[1]
    assert wide == 3 * (data.get("target_hidden_size") or data["hidden_size"])
    qwen = Qwen3Config.from_dict(data)
    assert (qwen.head_dim, qwen.num_key_value_heads, qwen.vocab_size) == (8, 2, 270)


@pytest.mark.parametrize(
    ("options", "stated"),
    [
        ({"num_layers": 1, "layers": (4, 1), "head_dim": 12, "mask_token_id": 3}, False),
        ({"sliding_window": 3}, True),
        ({"sliding_window": 3, "is_causal": False}, False),
        ({"sliding_window": 3, "layer_types": MIXED, "num_key_value_heads": 1}, None),
        ({"sliding_window": 3, "layer_types": MIXED, "is_causal": False}, False),
    ],
    ids=str,
)
def test_a_shape_is_kept_and_causality_stated_where_one_value_is_true_of_all_layers(
    options: dict[str, Any],
    stated: bool | None,
    make_draft: MakeDraft,
    folder: Path,
    target: TargetSpec,
) -> None:
    """Servers take full layers for bidirectional, sliding ones for causal, unless it is stated."""
    draft = make_draft(dtype=torch.float32, **options)
    DFlash(OPTIONS).export_draft(draft, folder, "serving")
    data = config_of(folder)
    assert data.get("is_causal") is stated
    assert data["sliding_window"] == options.get("sliding_window")
    assert data["use_sliding_window"] is ("sliding_window" in options)
    again = DFlash(OPTIONS).import_draft(folder, target)
    require_same_bits(again.module.state_dict(), draft.module.state_dict())
    meant = {"is_causal": None}  # is stated, or follows from the layers' types
    assert {**again.config, **meant} == {**draft.config, **meant}


def test_a_partial_rope_is_written_under_sglangs_name_too(
    make_target: MakeTarget, make_draft: MakeDraft, folder: Path
) -> None:
    draft = make_draft(of=make_target(rope_parameters=ROPES["partial"]))
    DFlash(OPTIONS).export_draft(draft, folder, "serving")
    assert config_of(folder)["rope_parameters"]["rope_dim"] == 4


# ------------------------------------------------------------ what is read


def test_published_spellings_are_read(draft: Draft, exported: Path, target: TargetSpec) -> None:
    """A prefix, another writer's names, block_size in dflash_config, and fields left out."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    change_tensors(exported, rename)
    left_out = ("block_size", "is_causal", "layer_types", "sliding_window", "target_hidden_size")
    change_config(exported, **dict.fromkeys(left_out, GONE))
    again = DFlash(OPTIONS).import_draft(exported, target)
    assert again.module.config.block_size == 4
    require_same_bits(again.module.state_dict(), draft.module.state_dict())


def test_layers_and_mask_token_left_out_are_the_default_ones(
    make_draft: MakeDraft, folder: Path, target: TargetSpec
) -> None:
    DFlash(OPTIONS).export_draft(make_draft(layers=None), folder, "serving")
    change_config(folder, dflash_config={})
    config = DFlash(DFlashOptions(mask_token_id=7)).import_draft(folder, target).module.config
    assert (config.layers, config.mask_token_id) == ((1, 5), 7)


# ------------------------------------------------------------ as servers read it


def test_without_layer_ids_each_server_has_a_default_of_its_own(
    make_draft: MakeDraft, folder: Path, target: TargetSpec
) -> None:
    host, drafts = Host.of(target), {"two": {"num_layers": 2, "layers": (1, 5)}, "three": {}}
    for name, options in drafts.items():
        DFlash(OPTIONS).export_draft(
            make_draft(**{"num_layers": 3, **options}), folder / name, "serving"
        )
        change_config(folder / name, "dflash_config", target_layer_ids=GONE)
    assert DFlash(OPTIONS).read_export(folder / "two", "sglang").captured(host) == (1, 5)
    with pytest.raises(UnservableError, match="three layers then, and makes fc for 2"):
        DFlash(OPTIONS).read_export(folder / "two", "vllm").captured(host)
    assert DFlash(OPTIONS).read_export(folder / "three", "sglang").captured(host) == (1, 3, 5)
    assert DFlash(OPTIONS).read_export(folder / "three", "vllm").captured(host) == (1, 3, 4)


def test_vllm_looks_for_the_mask_token_in_one_place(exported: Path, target: TargetSpec) -> None:
    change_config(exported, "dflash_config", mask_token_id=GONE)
    change_config(exported, mask_token_id=259)
    host, tokens_T = Host.of(target), torch.arange(5)
    at = Round(host, tokens_T, 7, 3 * (torch.zeros(5, 32),), torch.zeros(5, 32))
    none = torch.zeros(0, dtype=torch.long)
    assert DFlash(OPTIONS).read_export(exported, "sglang").logits(at, none).shape == (1, 270)
    with pytest.raises(UnservableError, match=r"no dflash_config\.mask_token_id, and vLLM"):
        DFlash(OPTIONS).read_export(exported, "vllm").logits(at, none)
