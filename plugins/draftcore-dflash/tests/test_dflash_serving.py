"""Exports reload exactly, say what servers read, and damaged drafts are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash import plugin
from draftcore_dflash.options import DFlashOptions
from draftcore_sdk.algorithm_fixtures import MakeDraft, MakeSamples, MakeTarget, Refusals, drop, put
from draftcore_sdk.exports import GONE, change_config, change_tensors, config_of
from safetensors.torch import load_file
from transformers import Qwen3Config

from draftcore.contracts.algorithm import DataSummary, Draft, StepContext
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

NOTHING = DataSummary("", 0, 0, 0, 0, {})
SLIDING = "sliding_attention"
LAYER_TENSORS = {
    "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm",
}  # fmt: skip


@pytest.fixture
def exported(make_draft: MakeDraft, folder: Path) -> tuple[Draft, Path]:
    draft = make_draft(dtype=torch.float32)
    plugin.export_draft(draft, folder, "serving")
    return draft, folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 3},
        {"sliding_window": 3, "is_causal": False},
        {"sliding_window": 5, "layer_types": ("full_attention", SLIDING), "num_key_value_heads": 1},
        {"num_layers": 1, "layers": (4, 1), "head_dim": 12, "mask_token_id": 3},
    ],
    ids=str,
)
def test_an_export_reloads_bit_for_bit(
    options: dict[str, Any],
    make_draft: MakeDraft,
    folder: Path,
    target: TargetSpec,
    make_samples: MakeSamples,
) -> None:
    draft = make_draft(dtype=torch.float32, **options)
    plugin.export_draft(draft, folder, "serving")
    again = plugin.import_draft(folder, target, DFlashOptions(num_anchors=5))
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name
    samples = make_samples(9, 5)
    batch, context = plugin.collate(samples, DFlashOptions()), StepContext(0, 1, 0)
    one, other = (plugin.forward_loss(d, batch, context).numerator for d in (draft, again))
    assert torch.equal(one, other)


def test_tensors_bear_the_names_servers_know(exported: tuple[Draft, Path]) -> None:
    """No embedding and no head: the server has the target's."""
    tensors = load_file(exported[1] / "model.safetensors")
    names = {f"layers.{i}.{name}.weight" for i in range(2) for name in LAYER_TENSORS}
    assert set(tensors) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert tensors["fc.weight"].shape == (32, 96)


def test_config_says_what_servers_read(exported: tuple[Draft, Path]) -> None:
    data = config_of(exported[1])
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["model_type"] == "qwen3"
    assert data["dflash_config"]["target_layer_ids"] == [1, 3, 4]
    assert data["dflash_config"]["mask_token_id"] == 259
    assert (data["block_size"], data["num_hidden_layers"], data["num_target_layers"]) == (4, 2, 8)
    qwen = Qwen3Config.from_dict(data)
    assert (qwen.head_dim, qwen.num_key_value_heads, qwen.vocab_size) == (8, 2, 270)


@pytest.mark.parametrize(
    ("options", "stated"),
    [
        ({}, False),
        ({"sliding_window": 3}, True),
        ({"sliding_window": 3, "is_causal": False}, False),
        ({"sliding_window": 3, "layer_types": ("full_attention", SLIDING)}, None),
        (
            {
                "sliding_window": 3,
                "layer_types": ("full_attention", SLIDING),
                "is_causal": False,
            },
            False,
        ),
    ],
    ids=str,
)
def test_causality_is_stated_where_one_value_is_true_of_all_layers(
    options: dict[str, Any], stated: bool | None, make_draft: MakeDraft, folder: Path
) -> None:
    """Servers take full layers for bidirectional, sliding ones for causal, unless it is stated."""
    plugin.export_draft(make_draft(**options), folder, "serving")
    data = config_of(folder)
    assert data.get("is_causal") is stated
    assert data["sliding_window"] == options.get("sliding_window")
    assert data["use_sliding_window"] is ("sliding_window" in options)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 7e5},
    "partial": {"rope_type": "default", "rope_theta": 7e5, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 7e5, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 7e5,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_survives_in_either_spelling(
    rope: dict[str, Any],
    make_target: MakeTarget,
    make_draft: MakeDraft,
    folder: Path,
) -> None:
    target = make_target(rope_parameters=rope)
    draft = make_draft(of=target)
    plugin.export_draft(draft, folder, "serving")
    frequency = draft.module.get_buffer("rotary.inverse_frequency")
    assert len(frequency) == (2 if "partial_rotary_factor" in rope else 4)
    data = config_of(folder)
    assert data["rope_parameters"].get("rope_dim") == (
        4 if "partial_rotary_factor" in rope else None
    )
    for gone in (["rope_parameters"], ["rope_theta", "rope_scaling"]):
        part = {name: value for name, value in data.items() if name not in gone}
        (folder / "config.json").write_text(json.dumps(part))
        again = plugin.import_draft(folder, target, DFlashOptions())
        rotary = again.module.get_buffer("rotary.inverse_frequency")
        torch.testing.assert_close(rotary.double(), frequency, rtol=1e-6, atol=0)


def test_published_spellings_are_read(exported: tuple[Draft, Path], target: TargetSpec) -> None:
    """A prefix, another writer's names, block_size in dflash_config, and fields left out."""
    draft, folder = exported

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    change_tensors(folder, rename)
    left_out = ("block_size", "is_causal", "layer_types", "sliding_window", "target_hidden_size")
    change_config(folder, **dict.fromkeys(left_out, GONE))
    again = plugin.import_draft(folder, target, DFlashOptions())
    assert again.module.config.block_size == 4
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name


def test_layers_and_mask_token_left_out_are_the_default_ones(
    make_draft: MakeDraft, folder: Path, target: TargetSpec
) -> None:
    plugin.export_draft(make_draft(layers=None), folder, "serving")
    change_config(folder, dflash_config={})
    config = plugin.import_draft(folder, target, DFlashOptions(mask_token_id=7)).module.config
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
    field: str, exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    value, message = REFUSED_CONFIGS[field]
    change_config(exported[1], **{field: value})
    with pytest.raises(UsageError, match=message):
        plugin.import_draft(exported[1], target, DFlashOptions())


REFUSED_TENSORS = {
    "missing": (drop("hidden_norm.weight"), r"missing hidden_norm.weight \[32\]"),
    "a head": (put("lm_head.weight", torch.ones(32, 32)), r"unknown lm_head.weight \[32, 32\]"),
    "width": (put("fc.weight", torch.ones(32, 64)), r"fc.weight is \[32, 64\], not \[32, 96\]"),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_damaged_tensors_are_refused_by_name(
    case: str, exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    change, message = REFUSED_TENSORS[case]
    change_tensors(exported[1], change)
    with pytest.raises(UsageError, match=message):
        plugin.import_draft(exported[1], target, DFlashOptions())


class TestRefusals(Refusals):
    pass


# ------------------------------------------------------------ warm start


def test_a_warm_start_takes_over_weights_layers_and_mask_token(
    make_draft: MakeDraft, folder: Path, target: TargetSpec
) -> None:
    draft = make_draft(dtype=torch.float32, layers=(0, 2, 6), mask_token_id=3)
    plugin.export_draft(draft, folder, "serving")
    options = DFlashOptions(warm_start=str(folder), loss="dpace")
    assert plugin.feature_request(target, options).layers == (0, 2, 6)
    again = plugin.build_draft(target, NOTHING, options)
    assert again.module.config.mask_token_id == 3
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name


@pytest.mark.parametrize(
    "option", [{"block_size": 8}, {"layers": (0, 1, 2)}, {"num_layers": 3}], ids=str
)
def test_options_against_a_warm_start_are_refused(
    option: dict[str, Any], exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    options = DFlashOptions(warm_start=str(exported[1]), **option)
    with pytest.raises(UsageError, match=f"option {next(iter(option))} is"):
        plugin.feature_request(target, options)
