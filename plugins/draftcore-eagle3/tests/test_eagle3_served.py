"""The reader of exports shares no code with what it checks, and reads every RoPE and tensor rightly.

What is said of vLLM is read from its source of August 2026 (`llama_eagle3.py`, its loader and its
`EAGLEConfig`); no test runs it.
"""

from collections import Counter
from pathlib import Path

import draftcore_eagle3
import pytest
import torch
from draftcore_eagle3 import plugin
from draftcore_eagle3.options import Eagle3Options
from draftcore_sdk.algorithm_fixtures import MakeDraft
from draftcore_sdk.exports import ROPES, change_tensors, config_of, imports_of_ours, largest_gap
from safetensors.torch import load_file

from draftcore.contracts.serving import UnservableError


def test_the_reader_shares_no_code_with_what_it_checks() -> None:
    package = Path(draftcore_eagle3.__file__).parent
    shared = {"draftcore_tools.served", "draftcore.contracts.serving"}
    assert imports_of_ours(package / "served.py") == shared


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_is_read_as_it_was_trained(rope: str, server: str, tmp_path: Path) -> None:
    options = Eagle3Options(num_attention_heads=6, num_key_value_heads=3, num_drafts=3)
    assert largest_gap("draftcore_eagle3.plugin", options, rope, server, tmp_path) < 1e-3


def test_an_unknown_kind_of_draft_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Eagle3DraftModel"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnservableError, match="LlamaForCausalLMEagle3"):
        plugin.read_export(tmp_path, "sglang")


# ------------------------------------------------------------ what vLLM's loader does with names

LAYER = "model.layers.0"
# The parameters of its module, by what is filled into each.
PARAMETERS = {
    "model.embed_tokens.weight": 1, "model.fc.weight": 1, "model.norm.weight": 1,
    "lm_head.weight": 1, "draft_id_to_target_id": 1,
    f"{LAYER}.self_attn.qkv_proj.weight": 3, f"{LAYER}.self_attn.o_proj.weight": 1,
    f"{LAYER}.mlp.gate_up_proj.weight": 2, f"{LAYER}.mlp.down_proj.weight": 1,
    f"{LAYER}.input_layernorm.weight": 1, f"{LAYER}.hidden_norm.weight": 1,
    f"{LAYER}.post_attention_layernorm.weight": 1,
}  # fmt: skip
MERGED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
          "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip


def parameter(name: str) -> str:
    """Where vLLM puts a tensor: `model.` goes before all but the head and the mapping."""
    if name == "d2t":
        return "draft_id_to_target_id"
    if name == "lm_head.weight":
        return name
    name = "model." + name.replace("midlayer.", "layers.0.")
    return ".".join(MERGED.get(part, part) for part in name.split("."))


@pytest.fixture
def exported(make_draft: MakeDraft, folder: Path) -> Path:
    plugin.export_draft(make_draft(dtype=torch.float32, draft_vocab_size=24), folder, "serving")
    return folder


def test_each_tensor_has_its_place_in_vllm_and_each_place_its_tensors(exported: Path) -> None:
    """It says nothing of a tensor that is missing, and fails on one without a place; it skips t2d."""
    tensors = load_file(exported / "model.safetensors")
    found = Counter(parameter(name) for name in tensors if name != "t2d")
    assert dict(found) == PARAMETERS


def test_the_config_says_what_vllm_reads(exported: Path) -> None:
    data, tensors = config_of(exported), load_file(exported / "model.safetensors")
    assert data["architectures"] == ["LlamaForCausalLMEagle3"]  # kept, as it ends so
    assert data["model_type"] == "llama"  # the class of the config
    assert data["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # the top level's, as inputs
    assert data["eagle_config"]["use_aux_hidden_state"] is True
    assert tensors["fc.weight"].shape[1] == 3 * data["target_hidden_size"]
    assert len(tensors["lm_head.weight"]) == len(tensors["d2t"]) == data["draft_vocab_size"] == 24
    for name in ("norm_before_residual", "attention_bias", "mlp_bias", "bias", "qkv_bias"):
        assert not data.get(name)


@pytest.mark.parametrize("name", ["model.norm.weight", "input_norm.weight"])
def test_vllm_refuses_a_tensor_without_a_place(name: str, exported: Path) -> None:
    """sglang removes the prefix of the first, and leaves the other unread."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors["norm.weight"].clone()
        if name.startswith("model."):
            del tensors["norm.weight"]

    change_tensors(exported, add)
    left = () if name.startswith("model.") else (name,)
    assert plugin.read_export(exported, "sglang").ignored == left
    with pytest.raises(UnservableError, match=f"no place for: {name}"):
        plugin.read_export(exported, "vllm")
