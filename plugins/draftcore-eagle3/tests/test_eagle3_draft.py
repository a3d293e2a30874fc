"""EAGLE-3 passes its suites; what a draft takes from its target; exports say what both servers read.

What is said of vLLM is read from its source of August 2026 (`llama_eagle3.py`, its loader and its
`EAGLEConfig`); no test runs it.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.config import captured_layers, from_target
from draftcore_eagle3.loss import Rows
from draftcore_eagle3.options import Eagle3Options
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.algorithm_fixtures import ExportSuite, MakeDraft, MakeTarget, drop, put
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.comparisons import require_trained_drafts
from draftcore_sdk.exports import GONE, ROPES, change, change_config, change_tensors, config_of
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.workbench import require_same_bits
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.algorithm import DataSummary, Draft, Sample
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

SEEN = DataSummary("", 1, 6, 6, 6, {5: 3, 40: 2, 7: 1})


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
    kept: ClassVar = {
        "draft_vocab_size": 24, "layers": [0, 2, 6], "norm_output": True, "num_layers": 3,
    }  # fmt: skip
    free: ClassVar = {"loss": "lk_alpha", "layers": [6, 2, 0]}
    against: ClassVar = {
        "num_layers": 2,
        "draft_vocab_size": 30,
        "layers": [0, 1, 2],
        "norm_output": False,
    }
    refused_configs: ClassVar = {
        "two sets of layers": (
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "two sets of captured layers",
        ),
        "another residual": ({"norm_before_residual": True}, "norm_before_residual: True"),
        "two layers": ({"num_hidden_layers": 2}, r"missing layers.1.input_layernorm.weight \[32\]"),
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
        "three layers": ("default", {"num_layers": 3, "num_drafts": 3}),
    }


# ------------------------------------------------------------ what a draft is made of


def build(target: TargetSpec, **options: Any) -> Any:
    torch.manual_seed(0)
    return Eagle3(Eagle3Options(**options)).build_draft(target, SEEN)


def test_a_fresh_draft_starts_from_its_target(target: TargetSpec) -> None:
    draft = build(target, draft_vocab_size=6, fc_norm=True)
    module = draft.module
    ids = torch.tensor([0, 1, 2, 5, 7, 40])
    assert torch.equal(module.token_ids(), ids)
    assert torch.equal(module.lm_head.weight, target.head()[ids])
    assert torch.equal(module.embed_tokens, target.embedding())
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name != "lm_head.weight":
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1), name
    assert module.midlayer.self_attn.k_proj.weight.shape == (16, 64)
    defaults = draft.defaults
    assert (defaults.lr, defaults.warmup_ratio, defaults.clip) == (1e-4, 0.015, 0.5)


def test_a_draft_for_scaled_logits_starts_at_their_scale_and_a_tied_target_is_held_once(
    make_target: MakeTarget,
) -> None:
    scaled = make_target()
    scaled.logit_scale = 0.25
    assert torch.equal(build(scaled).module.lm_head.weight, 0.25 * scaled.head())

    def to_bfloat16(config: dict[str, Any], tensors: Tensors) -> None:
        config["dtype"] = "bfloat16"
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    folder = make_target(tie_word_embeddings=True).path
    change(Path(folder), to_bfloat16)
    target = TransformersTarget(folder)
    module = build(target).module
    assert (module.target_head, module.embed_tokens.dtype) == (None, torch.bfloat16)
    assert Eagle3(Eagle3Options()).feature_request(target).dtype == "bfloat16"


# Each target's config.json: its kind, widths of state and MLP, heads, those of keys and values, and more.
MOE = "moe_intermediate_size"
TARGETS: dict[str, tuple[str, tuple[int, int, int, int], dict[str, int]]] = {
    "Llama-3.1-8B": ("Llama", (4096, 14336, 32, 8), {}),
    "Qwen3-8B": ("Qwen3", (4096, 12288, 32, 8), {"head_dim": 128}),
    "Gemma-3-1B": ("Gemma3Text", (1152, 6912, 4, 1), {"head_dim": 256}),
    "gpt-oss-20b, -120b": (
        "GptOss", (2880, 2880, 64, 8), {"head_dim": 64, "num_experts_per_tok": 4}),
    "Qwen3-30B-A3B": (
        "Qwen3Moe", (2048, 6144, 32, 4), {"head_dim": 128, MOE: 768, "num_experts_per_tok": 8}),
    "Qwen3-Coder-480B-A35B": (
        "Qwen3Moe", (6144, 8192, 96, 8), {"head_dim": 128, MOE: 2560, "num_experts_per_tok": 8}),
    "Qwen3-Next-80B-A3B": (
        "Qwen3Next", (2048, 5120, 16, 2),
        {"head_dim": 256, MOE: 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10}),
    "Llama-4-Scout": (
        "Llama4Text", (5120, 8192, 40, 8),
        {"head_dim": 128, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1}),
    "DeepSeek-V2-Lite": (
        "DeepseekV2", (2048, 10944, 16, 16),
        {MOE: 1408, "n_shared_experts": 2, "num_experts_per_tok": 6, "kv_lora_rank": 512, "v_head_dim": 128}),
    "DeepSeek-V3": (
        "DeepseekV3", (7168, 18432, 128, 128),
        {MOE: 2048, "n_shared_experts": 1, "num_experts_per_tok": 8, "kv_lora_rank": 512, "v_head_dim": 128}),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_the_readme_says_how_large_a_draft_is_for_known_targets(name: str) -> None:
    kind, sizes, more = TARGETS[name]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    text = getattr(transformers, f"{kind}Config")(**dict(zip(names, sizes, strict=True)), **more)
    target: Any = SimpleNamespace(text_config=text, vocab_size=text.vocab_size, num_layers=24)
    found = from_target(target, Eagle3Options())
    heads = f"{found.num_attention_heads} / {found.num_key_value_heads} x {found.head_dim}"
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"| {name} | {heads} | {found.intermediate_size:,} |" in readme


def test_what_a_draft_is_made_of_is_said(target: TargetSpec) -> None:
    assert build(target, intermediate_size=7, rope_theta=5e5).about == (
        "1 layer of width 32, 4 query and 2 key/value heads of 8, MLP of 7, "
        "RoPE default of base 500000"
    )


@pytest.mark.parametrize(
    ("asked", "depth", "layers"),
    [
        (None, 36, (1, 17, 32)),
        (None, 8, (1, 3, 4)),
        (None, 7, (1, 2, 3)),
        (None, 6, r"collide: \[1, 2, 2\](.|\n)*for example \[0, 2, 4\]"),
        (None, 4, r"for example \[0, 1, 2\]"),
        ((1, 3, 7), 8, "layer 7 is the last one; servers"),
        (None, 3, "at least 4 layers"),
    ],
)
def test_default_layers_and_those_that_cannot_be_captured(
    asked: tuple[int, ...] | None, depth: int, layers: tuple[int, ...] | str
) -> None:
    if isinstance(layers, tuple):
        assert captured_layers(asked, depth) == layers
    else:
        with pytest.raises(UsageError, match=layers):
            captured_layers(asked, depth)


def test_request_names_the_layers_and_the_last_hidden_state(target: TargetSpec) -> None:
    request = Eagle3(Eagle3Options(layers=(6, 0, 2))).feature_request(target)
    assert request.names == ("hidden.0", "hidden.2", "hidden.6", "last_hidden")


# ------------------------------------------------------------ options and vocabulary


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 49}, "draft_vocab_size 49(.|\n)*at most 48"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "divisor of 32"),
    ],
)
def test_shapes_that_cannot_be(options: dict[str, Any], message: str, target: TargetSpec) -> None:
    with pytest.raises(UsageError, match=message):
        build(target, **options)


# ------------------------------------------------------------ decoding


@pytest.mark.parametrize(
    "options",
    [
        {"draft_vocab_size": 24},
        {"norm_output": True, "num_layers": 3},
        {"fc_norm": True, "num_key_value_heads": 1},
    ],
    ids=str,
)
def test_proposals_equal_training_over_ragged_rounds(
    options: dict[str, Any], make_draft: MakeDraft, target: TargetSpec
) -> None:
    """The row of the last features, at each step: it reads the last known token first."""
    draft = make_draft(ttt_length=4, **options)
    module: Any = draft.module
    ids = module.token_ids()

    def trained(sample: Sample, known: int) -> Tensor:
        batch = Eagle3(Eagle3Options()).collate([sample])
        every = Rows.of(torch.ones_like(batch.loss_mask_BT), 4)
        logits_KV = torch.full((4, 48), -torch.inf, dtype=torch.float64)
        for step, normed_NH in enumerate(module.unroll(batch, every)):
            logits_KV[step, slice(None) if ids is None else ids] = module.lm_head(
                normed_NH[known - 2]
            )
        return logits_KV

    drafter = Eagle3(Eagle3Options(num_drafts=4)).drafter(draft, target.load_model())
    require_trained_drafts(drafter, 48, 0.7, trained)


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
