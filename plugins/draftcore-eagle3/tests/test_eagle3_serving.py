"""Exports reload exactly, say what both servers read, and damaged drafts are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_eagle3 import plugin
from draftcore_eagle3.options import Eagle3Options
from draftcore_sdk.algorithm_fixtures import MakeDraft, MakeSamples, MakeTarget, Refusals, drop, put
from draftcore_sdk.exports import GONE, change_config, change_tensors, config_of
from safetensors.torch import load_file
from transformers import LlamaConfig

from draftcore.contracts.algorithm import DataSummary, Draft, StepContext
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

NOTHING = DataSummary("", 0, 0, 0, 0, {})
LAYER_TENSORS = {
    "input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
}  # fmt: skip


@pytest.fixture
def exported(make_draft: MakeDraft, folder: Path) -> tuple[Draft, Path]:
    draft = make_draft(dtype=torch.float32, draft_vocab_size=24, norm_output=True)
    plugin.export_draft(draft, folder, "serving")
    return draft, folder


def same_loss(one: Draft, other: Draft, samples: Any) -> bool:
    batch = plugin.collate(samples, Eagle3Options())
    context = StepContext(0, 1, 0)
    first, second = (plugin.forward_loss(d, batch, context).numerator for d in (one, other))
    return torch.equal(first, second)


@pytest.mark.parametrize(
    "options", [{"draft_vocab_size": 24}, {"fc_norm": True, "norm_output": True}], ids=str
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
    again = plugin.import_draft(folder, target, Eagle3Options(ttt_length=3))
    assert again.config == draft.config
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name
    samples = make_samples(9, 5)
    for sample in samples:
        for feature in sample.features.values():
            feature.data = feature.float()
    assert same_loss(draft, again, samples)


def test_tensors_bear_the_names_servers_know(exported: tuple[Draft, Path]) -> None:
    tensors = load_file(exported[1] / "model.safetensors")
    names = {f"midlayer.{name}.weight" for name in LAYER_TENSORS}
    names |= {f"{name}.weight" for name in ("embed_tokens", "fc", "lm_head", "norm")}
    assert set(tensors) == names | {"d2t", "t2d"}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    ids = tensors["d2t"] + torch.arange(24)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert tensors["fc.weight"].shape == (32, 96)


def test_layer_ids_are_written_in_both_conventions(exported: tuple[Draft, Path]) -> None:
    """Outputs of layers 1, 3, 4 enter layers 2, 4, 5."""
    data = config_of(exported[1])
    assert data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert data["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert data["norm_output"] is True
    assert data["tie_word_embeddings"] is False


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 7e5},
    "partial": {"rope_type": "default", "rope_theta": 7e5, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 7e5, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 7e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
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
    if rope["rope_type"] != "default":
        assert not torch.allclose(frequency, 7e5 ** -(torch.arange(4).double() / 4))
    assert len(frequency) == (2 if "partial_rotary_factor" in rope else 4)
    data = config_of(folder)
    for gone in (["rope_parameters"], ["rope_theta", "rope_scaling"]):
        part = {name: value for name, value in data.items() if name not in gone}
        (folder / "config.json").write_text(json.dumps(part))
        again = plugin.import_draft(folder, target, Eagle3Options())
        rotary = again.module.get_buffer("rotary.inverse_frequency")
        torch.testing.assert_close(rotary.double(), frequency, rtol=1e-6, atol=0)
        assert LlamaConfig.from_dict(part).rope_parameters["rope_theta"] == 7e5
    assert again.module.get_submodule("rotary").scale == pytest.approx(
        0.1 * torch.tensor(2.0).log().item() + 1 if rope["rope_type"] == "yarn" else 1.0
    )


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0.", "model.midlayer."])
def test_published_spellings_are_read(
    prefix: str, exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    draft, folder = exported

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["embed_tokens.weight"], tensors["t2d"]
        for name in list(tensors):
            tensors[name.replace("midlayer.", prefix)] = tensors.pop(name)

    change_tensors(folder, rename)
    change_config(folder, eagle_aux_hidden_state_layer_ids=GONE)
    again = plugin.import_draft(folder, target, Eagle3Options())
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name


REFUSED_CONFIGS = {
    "architectures": (["Eagle3DraftModel"], "research layout|LlamaForCausalLMEagle3"),
    "eagle_aux_hidden_state_layer_ids": ([1, 3, 4], "two sets of captured layers"),
    "norm_before_residual": (True, "norm_before_residual: True"),
    "attention_bias": (True, "attention_bias: True"),
    "num_hidden_layers": (2, "num_hidden_layers: 2"),
    "target_hidden_size": (64, "target of 64"),
    "vocab_size": (50, "vocab_size 50, the target 48"),
    "hidden_size": (GONE, "hidden_size"),
    "draft_vocab_size": (25, r"d2t of shape \[24\]"),
    "rope_parameters": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "'dynamic'"),
}


@pytest.mark.parametrize("field", REFUSED_CONFIGS)
def test_a_config_we_would_compute_differently_is_refused(
    field: str, exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    value, message = REFUSED_CONFIGS[field]
    change_config(exported[1], **{field: value})
    with pytest.raises(UsageError, match=message):
        plugin.import_draft(exported[1], target, Eagle3Options())


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
def test_damaged_tensors_are_refused_by_name(
    case: str, exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    change, message = REFUSED_TENSORS[case]
    change_tensors(exported[1], change)
    with pytest.raises(UsageError, match=message):
        plugin.import_draft(exported[1], target, Eagle3Options())


class TestRefusals(Refusals):
    pass


# ------------------------------------------------------------ warm start


def test_a_warm_start_takes_over_weights_mapping_and_layers(
    make_draft: MakeDraft, folder: Path, target: TargetSpec
) -> None:
    draft = make_draft(dtype=torch.float32, draft_vocab_size=24, layers=[0, 2, 6])
    plugin.export_draft(draft, folder, "serving")
    options = Eagle3Options(warm_start=str(folder), loss="lk_alpha")
    assert plugin.feature_request(target, options).layers == (0, 2, 6)
    again = plugin.build_draft(target, NOTHING, options)
    assert torch.equal(again.module.get_buffer("d2t"), draft.module.get_buffer("d2t"))
    assert torch.equal(
        again.module.get_parameter("lm_head.weight"), draft.module.get_parameter("lm_head.weight")
    )


@pytest.mark.parametrize(
    "option", [{"draft_vocab_size": 30}, {"layers": [0, 1, 2]}, {"norm_output": False}], ids=str
)
def test_options_against_a_warm_start_are_refused(
    option: dict[str, Any], exported: tuple[Draft, Path], target: TargetSpec
) -> None:
    options = Eagle3Options(warm_start=str(exported[1]), **option)
    with pytest.raises(UsageError, match=f"option {next(iter(option))} is"):
        plugin.feature_request(target, options)
