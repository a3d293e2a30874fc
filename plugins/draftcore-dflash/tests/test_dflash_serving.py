"""Exports reload exactly, say what servers read, and damaged drafts are refused by name.

What is said of vLLM is read from its source of August 2026 (`qwen3_dflash.py`, its loader, and the
code that chooses captured layers); no test runs it.
"""

from pathlib import Path
from typing import Any, ClassVar

import draftcore_dflash
import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.options import DFlashOptions
from draftcore_nn.served import Host, Round, UnservableError
from draftcore_sdk.algorithm_checks import WarmStarts
from draftcore_sdk.algorithm_fixtures import MakeDraft, MakeTarget, Refusals, drop, put
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
from transformers import Qwen3Config

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

OPTIONS = DFlashOptions()
MIXED = ("full_attention", "sliding_attention")


@pytest.fixture
def draft(make_draft: MakeDraft) -> Draft:
    return make_draft(dtype=torch.float32)


@pytest.fixture
def exported(draft: Draft, folder: Path) -> Path:
    DFlash(OPTIONS).export_draft(draft, folder, "serving")
    return folder


class TestRefusals(Refusals):
    pass


class TestWarmStarts(WarmStarts):
    kept: ClassVar = {"layers": (0, 2, 6), "mask_token_id": 3}
    free: ClassVar = {"loss": "dpace"}
    against: ClassVar = {"block_size": 8, "layers": (0, 1, 2), "num_layers": 3}


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


REFUSED_CONFIGS = {
    "architectures": (["Qwen3ForCausalLM"], "DFlashDraftModel"),
    "transformer_layer_config": ({}, "speculators layout"),
    "attention_bias": (True, "attention_bias: True"),
    "hidden_act": ("gelu", "hidden_act: 'gelu'"),
    "num_target_layers": (36, "num_target_layers 36, the target 8"),
    "vocab_size": (271, "vocab_size 271, the target 270"),
    "hidden_size": (GONE, "hidden_size"),
    "num_hidden_layers": (3, "num_hidden_layers 3 and 2 layer_types"),
    "layer_types": (["full_attention", "linear_attention"], r"\['linear_attention'\]"),
    "dflash_config": ({"projector_type": "domino", "block_size": 4}, "projector_type 'domino'"),
    "rope_parameters": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "'dynamic'"),
}


@pytest.mark.parametrize("field", REFUSED_CONFIGS)
def test_a_config_we_would_compute_differently_is_refused(
    field: str, exported: Path, target: TargetSpec
) -> None:
    value, message = REFUSED_CONFIGS[field]
    change_config(exported, **{field: value})
    with pytest.raises(UsageError, match=message):
        DFlash(OPTIONS).import_draft(exported, target)


REFUSED_TENSORS = {
    "missing": (drop("hidden_norm.weight"), r"missing hidden_norm.weight \[32\]"),
    "a head": (put("lm_head.weight", torch.ones(32, 32)), r"unknown lm_head.weight \[32, 32\]"),
    "width": (put("fc.weight", torch.ones(32, 64)), r"fc.weight is \[32, 64\], not \[32, 96\]"),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_damaged_tensors_are_refused_by_name(case: str, exported: Path, target: TargetSpec) -> None:
    change, message = REFUSED_TENSORS[case]
    change_tensors(exported, change)
    with pytest.raises(UsageError, match=message):
        DFlash(OPTIONS).import_draft(exported, target)


# ------------------------------------------------------------ as servers read it


def test_the_servers_reader_shares_no_code_with_what_it_checks() -> None:
    package = Path(draftcore_dflash.__file__).parent
    assert imports_of_ours(package / "served.py") == {"draftcore_nn.served"}


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_is_read_as_it_was_trained(rope: str, server: str, tmp_path: Path) -> None:
    options = {"num_layers": 2, "block_size": 4}
    assert largest_gap("draftcore_dflash.plugin", options, rope, server, tmp_path) < 1e-3


def test_servers_read_no_unknown_kind_of_draft(exported: Path) -> None:
    change_config(exported, architectures=["SomeDraftModel"])
    with pytest.raises(UnservableError, match="DFlashDraftModel"):
        DFlash(OPTIONS).read_export(exported, "sglang")


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


@pytest.mark.parametrize("name", ["lm_head.weight", "model.extra.weight"])
def test_a_tensor_of_no_dflash_draft_is_unread_by_sglang_and_not_by_vllm(
    name: str, exported: Path
) -> None:
    """A head of the draft's own vLLM would use, and nothing of ours has one."""
    change_tensors(exported, put(name, torch.ones(2, 32)))
    assert DFlash(OPTIONS).read_export(exported, "sglang").ignored == (name.removeprefix("model."),)
    with pytest.raises(UnservableError, match=f"no place for: {name}"):
        DFlash(OPTIONS).read_export(exported, "vllm")
