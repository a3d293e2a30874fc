"""DFlash passes its suites; what a draft takes from its target; exports say what servers read.

What is said of vLLM is read from its source of August 2026 (`qwen3_dflash.py`, its loader, and the
code that chooses captured layers); no test runs it.
"""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.config import captured_layers
from draftcore_dflash.options import DFlashOptions
from draftcore_nn.served import Host, Round, UnservableError
from draftcore_nn.target import mask_token
from draftcore_sdk.algorithm_fixtures import NO_DATA, ExportSuite, MakeDraft, MakeTarget, drop, put
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.comparisons import require_trained_drafts
from draftcore_sdk.exports import GONE, ROPES, change, change_config, change_tensors, config_of
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.workbench import require_same_bits
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from draftcore.contracts.algorithm import Draft, Sample
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

OPTIONS = DFlashOptions()
MIXED = ("full_attention", "sliding_attention")


class TestPlugin(PluginSuite):
    plugin = "draftcore_dflash.plugin"


class TestDFlash(AlgorithmSuite):
    plugin = "draftcore_dflash.plugin"
    # Nine anchors are all of a learned answer, and a choice in the suite's long sample.
    options: ClassVar[dict[str, Any]] = {
        "num_layers": 2, "layers": [2, 5, 9], "block_size": 5, "num_anchors": 9,
    }  # fmt: skip


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


# ------------------------------------------------------------ what a draft is made of


def build(target: TargetSpec, **options: Any) -> Draft:
    torch.manual_seed(0)
    return DFlash(DFlashOptions(**{"num_layers": 2, **options})).build_draft(target, NO_DATA)


def test_a_fresh_draft_fits_its_target(target: TargetSpec) -> None:
    draft = build(target, head_dim=16, num_key_value_heads=1, intermediate_size=24)
    parameters = dict(draft.module.named_parameters())
    for name, parameter in parameters.items():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1), name
    shapes = {
        "fc": (32, 64), "layers.0.mlp.up_proj": (24, 32), "layers.1.self_attn.k_norm": (16,),
        "layers.1.self_attn.q_proj": (64, 32), "layers.1.self_attn.v_proj": (16, 32),
    }  # fmt: skip
    assert {name: tuple(parameters[f"{name}.weight"].shape) for name in shapes} == shapes
    defaults = draft.defaults
    assert (defaults.lr, defaults.warmup_ratio, defaults.clip) == (6e-4, 0.04, 1.0)


def test_a_draft_for_scaled_logits_starts_at_their_scale(make_target: MakeTarget) -> None:
    target = make_target()
    target.logit_scale = 0.25
    for name, weight in build(target).module.named_parameters():
        right = torch.full_like(weight, 0.25 if name == "norm.weight" else 1.0)
        assert weight.ndim > 1 or weight.equal(right), name


@pytest.mark.parametrize(
    ("asked", "count", "depth", "layers"),
    [
        (None, 5, 36, (1, 9, 17, 25, 33)),
        (None, 5, 28, (1, 7, 13, 19, 25)),
        (None, 5, 64, (1, 16, 31, 46, 61)),
        (None, 3, 9, (1, 4, 6)),  # 3.5 goes up to the even 4
        (None, 3, 11, (1, 4, 8)),  # 4.5 down to the even 4
        (None, 1, 36, (18,)),
        (None, 2, 36, (1, 33)),
        (None, 5, 6, r"collide: \[1, 2, 2, 2, 3\](.|\n)*for example \[0, 1, 2, 3, 4\]"),
        (None, 5, 4, r"for example \[0, 1, 2\]"),
        ((1, 7), 5, 8, "layer 7 is the last one; servers"),
        (None, 1, 1, "deeper target"),
    ],
)
def test_default_layers_are_evenly_spaced_halves_going_to_even_or_cannot_be_captured(
    asked: tuple[int, ...] | None, count: int, depth: int, layers: tuple[int, ...] | str
) -> None:
    if isinstance(layers, tuple):
        assert captured_layers(asked, count, depth) == layers
    else:
        with pytest.raises(UsageError, match=layers):
            captured_layers(asked, count, depth)


def test_the_mask_token_is_found_in_this_order(make_target: MakeTarget) -> None:
    """One of zeros is passed over: its rows would have no queries, and positions were all the same."""
    target, full = make_target(), make_target(vocab_size=259)
    tokenizer, other = target.load_tokenizer(), full.load_tokenizer()
    assert mask_token(target, 7) == 7
    assert mask_token(target, None) == 259 == len(tokenizer)  # the first unused row
    assert mask_token(full, None) == other.pad_token_id

    def blank(_: Any, tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][other.pad_token_id] = 0

    change(Path(full.path), blank)
    assert mask_token(full, None) == other.eos_token_id
    other.pad_token = None
    assert mask_token(full, None) == other.eos_token_id
    other.eos_token = None
    with pytest.raises(UsageError, match=r"no mask, unused, pad, end or unknown(.|\n)*set mask"):
        mask_token(full, None)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert mask_token(target, None) == tokenizer.mask_token_id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_types": ("full_attention",)}, "1 layers, num_layers is 2"),
        ({"layer_types": MIXED}, "set both or neither"),
        ({"layer_types": ("full_attention",) * 2, "sliding_window": 4}, "set both or neither"),
        ({"mask_token_id": 270}, r"mask_token_id 270 has no row(.|\n)*0 to 269"),
    ],
)
def test_shapes_that_cannot_be(options: dict[str, Any], message: str, target: TargetSpec) -> None:
    with pytest.raises(UsageError, match=message):
        build(target, **options)


def test_positions_that_change_with_length_are_refused_before_a_capture(
    make_target: MakeTarget,
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UsageError, match=r"'dynamic'(.|\n)*default, linear, llama3, yarn"):
        DFlash(DFlashOptions()).feature_request(make_target(rope_parameters=rope))


# ------------------------------------------------------------ decoding


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 3},
        {"sliding_window": 5, "layer_types": MIXED},
        {"is_causal": True, "num_key_value_heads": 1, "head_dim": 12},
    ],
    ids=str,
)
def test_proposals_equal_training_over_ragged_rounds(
    options: dict[str, Any], make_draft: MakeDraft, target: TargetSpec
) -> None:
    """Of the block at the last known token, whose own features are never seen."""
    draft = make_draft(**options)
    module: Any = draft.module

    def trained(sample: Sample, known: int) -> Tensor:
        blocks = Blocks.of(torch.tensor([[known - 1]]), torch.tensor([[True]]))
        hidden = module.block_hidden(DFlash(OPTIONS).collate([sample]), blocks)[0, 1:]
        return hidden @ module.head.T  # type: ignore[no-any-return]

    drafter = DFlash(DFlashOptions(block_size=4)).drafter(draft, target.load_model())
    require_trained_drafts(drafter, 270, 0.7, trained)
    with pytest.raises(UsageError, match="a block of 4 drafts 3 tokens"):
        DFlash(DFlashOptions(block_size=4, num_drafts=4)).drafter(draft, target.load_model())


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
    options: Any, stated: bool | None, make_draft: MakeDraft, folder: Path, target: TargetSpec
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
    again: Any = DFlash(OPTIONS).import_draft(exported, target)
    assert again.module.config.block_size == 4
    require_same_bits(again.module.state_dict(), draft.module.state_dict())


def test_layers_and_mask_token_left_out_are_the_default_ones(
    make_draft: MakeDraft, folder: Path, target: TargetSpec
) -> None:
    DFlash(OPTIONS).export_draft(make_draft(layers=None), folder, "serving")
    change_config(folder, dflash_config={})
    config: Any = DFlash(DFlashOptions(mask_token_id=7)).import_draft(folder, target).module.config
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
