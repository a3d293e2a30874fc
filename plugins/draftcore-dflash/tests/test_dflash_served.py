"""The reader of exports shares no code with what it checks, and reads every RoPE and tensor rightly.

What is said of vLLM is read from its source of August 2026 (`qwen3_dflash.py`, its loader, and the
code that chooses captured layers); no test runs it.
"""

from collections import Counter
from pathlib import Path

import draftcore_dflash
import pytest
import torch
from draftcore_dflash import plugin
from draftcore_dflash.options import DFlashOptions
from draftcore_sdk.algorithm_fixtures import MakeDraft
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

from draftcore.contracts.serving import Host, Round, UnservableError
from draftcore.contracts.target import TargetSpec


def test_the_reader_shares_no_code_with_what_it_checks() -> None:
    package = Path(draftcore_dflash.__file__).parent
    shared = {"draftcore_tools.served", "draftcore.contracts.serving"}
    assert imports_of_ours(package / "served.py") == shared


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_is_read_as_it_was_trained(rope: str, server: str, tmp_path: Path) -> None:
    options = DFlashOptions(num_layers=2, block_size=4)
    assert largest_gap("draftcore_dflash.plugin", options, rope, server, tmp_path) < 1e-3


def test_an_unknown_kind_of_draft_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["SomeDraftModel"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnservableError, match="DFlashDraftModel"):
        plugin.read_export(tmp_path, "sglang")


# ------------------------------------------------------------ what vLLM does

# The parameters of one layer of its module, by how many tensors are filled into each.
LAYER = {
    "self_attn.qkv_proj": 3, "self_attn.o_proj": 1, "self_attn.q_norm": 1, "self_attn.k_norm": 1,
    "mlp.gate_up_proj": 2, "mlp.down_proj": 1, "input_layernorm": 1, "post_attention_layernorm": 1,
}  # fmt: skip
MERGED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
          "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip


@pytest.fixture
def exported(make_draft: MakeDraft, folder: Path) -> Path:
    plugin.export_draft(make_draft(dtype=torch.float32), folder, "serving")
    return folder


def test_each_tensor_has_its_place_in_vllm_and_each_place_its_tensors(exported: Path) -> None:
    """`model.` goes before all names; embedding and head are the target's where there are none."""
    found: Counter[str] = Counter()
    for name in load_file(exported / "model.safetensors"):
        found["model." + ".".join(MERGED.get(part, part) for part in name.split("."))] += 1
    layers = {f"model.layers.{i}.{n}.weight": k for i in range(2) for n, k in LAYER.items()}
    others = dict.fromkeys(("model.fc.weight", "model.hidden_norm.weight", "model.norm.weight"), 1)
    assert dict(found) == layers | others


def test_the_config_says_what_vllm_reads(exported: Path) -> None:
    data = config_of(exported)
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["model_type"] == "qwen3"
    assert "eagle_aux_hidden_state_layer_ids" not in data  # it would come before what follows
    assert data["dflash_config"]["target_layer_ids"] == [1, 3, 4]  # outputs: it adds one
    assert data["dflash_config"]["mask_token_id"] == 259
    wide = load_file(exported / "model.safetensors")["fc.weight"].shape[1]
    assert wide == 3 * (data.get("target_hidden_size") or data["hidden_size"])
    assert data.get("draft_vocab_size") is None  # or d2t would have to be there
    assert "use_swa" not in data["dflash_config"]


def read_both(folder: Path, target: TargetSpec) -> tuple[tuple[int, ...], str]:
    """The layers that sglang captures, and the refusal by vLLM's conventions."""
    host = Host.of(target)
    layers = plugin.read_export(folder, "sglang").captured(host)
    with pytest.raises(UnservableError) as caught:
        plugin.read_export(folder, "vllm").captured(host)
    return layers, str(caught.value)


def test_without_layer_ids_each_server_has_a_default_of_its_own(
    make_draft: MakeDraft, folder: Path, target: TargetSpec
) -> None:
    plugin.export_draft(make_draft(num_layers=2, layers=(1, 5)), folder, "serving")
    change_config(folder, "dflash_config", target_layer_ids=GONE)
    layers, refusal = read_both(folder, target)
    assert layers == (1, 5)
    assert "vLLM captures three layers then, and makes fc for 2" in refusal
    plugin.export_draft(make_draft(num_layers=3), folder, "serving")
    change_config(folder, "dflash_config", target_layer_ids=GONE)
    assert plugin.read_export(folder, "vllm").captured(Host.of(target)) == (1, 3, 4)
    assert plugin.read_export(folder, "sglang").captured(Host.of(target)) == (1, 3, 5)


def test_vllm_looks_for_the_mask_token_in_one_place(exported: Path, target: TargetSpec) -> None:
    change_config(exported, "dflash_config", mask_token_id=GONE)
    change_config(exported, mask_token_id=259)
    host, tokens_T = Host.of(target), torch.arange(5)
    at = Round(host, tokens_T, 7, 3 * (torch.zeros(5, 32),), torch.zeros(5, 32))
    none = torch.zeros(0, dtype=torch.long)
    assert plugin.read_export(exported, "sglang").logits(at, none).shape == (1, 270)
    with pytest.raises(UnservableError, match=r"no dflash_config\.mask_token_id, and vLLM"):
        plugin.read_export(exported, "vllm").logits(at, none)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.extra.weight"])
def test_a_tensor_of_no_dflash_draft_is_unread_by_sglang_and_not_by_vllm(
    name: str, exported: Path
) -> None:
    """A head of the draft's own vLLM would use, and nothing of ours has one."""
    change_tensors(exported, lambda tensors: tensors.update({name: torch.ones(2, 32)}))
    assert plugin.read_export(exported, "sglang").ignored == (name.removeprefix("model."),)
    with pytest.raises(UnservableError, match=f"no place for: {name}"):
        plugin.read_export(exported, "vllm")
