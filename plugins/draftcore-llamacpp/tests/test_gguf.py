"""`draftcore gguf`: the file holds the export, and what llama.cpp would serve wrongly is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from draftcore_llamacpp.convert import write_draft
from draftcore_sdk.exports import change
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.targets import conversations, tiny_target
from safetensors.numpy import load_file
from torch import Tensor

from draftcore.cli import main
from draftcore.errors import UsageError
from draftcore.files import EXPORT

BLOCKS = {"num_layers": 2, "block_size": 5, "layers": [1, 3], "num_anchors": 8}
WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 120, "ttt_length": 2, "layers": [1, 2, 4]},
    "dflash": {**BLOCKS, **WINDOW, "is_causal": True},
    "dflash2": {**BLOCKS, "selector_rank": 8, "selector_top_k": 6},
    "domino": {**BLOCKS, "gru_hidden_dim": 8, "emb_dim": 8},
    "dspark": {**BLOCKS, "markov_rank": 8},
}
PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
(DOMINO,) = re.findall(r"^error: runs/domino/export(: .*\n.*)$", PAGE, re.MULTILINE)
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


class TestLlamaCpp(PluginSuite):
    plugin = "draftcore_llamacpp.plugin"


def run_cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of some drafts after a step, exported; its YAML lies in its folder."""
    folder = tmp_path_factory.mktemp("run")
    drafts = {
        name: {"algorithm": {"name": name, "options": options}} for name, options in DRAFTS.items()
    }
    config = {
        "run": str(folder),
        "target": {"path": str(tiny_target(folder / "target")), "device": "cpu"},
        "data": {"train": str(conversations(folder / "train.jsonl", 4))},
        "drafts": drafts,
        "train": {"device": "cpu", "batch": 4, "max_steps": 1},
    }
    (file := folder / "run.yaml").write_text(yaml.safe_dump(config))
    for verb in ("train", "export"):
        assert (result := run_cli(verb, file)).exit_code == 0, result.output
    return folder


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys and the tensors of a file, these as they are written in Python."""
    reader = gguf.GGUFReader(file)
    tensors = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type != gguf.GGMLQuantizationType.I64
        else np.array(tensor.data)
        for tensor in reader.tensors
    }
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def test_an_eagle3_file_holds_the_export_with_paired_rows_and_absolute_ids(
    run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "draft.gguf"
    result = run_cli("gguf", run / "run.yaml", "--draft", "eagle3", "--out", file)
    assert result.exit_code == 0, result.output
    assert f"-md {file} --spec-type draft-eagle3 --spec-draft-n-max 7" in result.output
    (keys, tensors), stored = read(file), load_file(run / "eagle3/export/model.safetensors")
    assert keys["general.architecture"] == "eagle3"
    assert keys["eagle3.target_layers"] == [2, 3, 5]  # the inputs of these are the outputs 1, 2, 4
    assert keys["eagle3.vocab_size"] == 259 == len(keys["tokenizer.ggml.tokens"])
    assert (keys["eagle3.attention.head_count"], keys["eagle3.attention.key_length"]) == (4, 16)
    assert keys["tokenizer.ggml.eos_token_id"] == 257
    heads, width = 4, 16
    pairs = [
        head * width + (row % 2) * width // 2 + row // 2
        for head in range(heads)
        for row in range(width)
    ]
    np.testing.assert_array_equal(
        tensors["blk.0.attn_q.weight"], stored["midlayer.self_attn.q_proj.weight"][pairs]
    )
    np.testing.assert_array_equal(tensors["d2t"], stored["d2t"] + np.arange(120))
    same = {
        "fc.weight": "fc.weight",
        "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
        "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
        "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
        "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
        "output_norm.weight": "norm.weight",
        "output.weight": "lm_head.weight",
        "token_embd.weight": "embed_tokens.weight",
    }
    for theirs, ours in same.items():
        np.testing.assert_array_equal(tensors[theirs], stored[ours], ours)
    assert len(tensors) == len(stored) - 1  # all but t2d


def test_a_dflash_file_holds_the_export_as_it_is(run: Path, tmp_path: Path) -> None:
    write_draft(run / "dflash/export", run / "target", file := tmp_path / "draft.gguf")
    (keys, tensors), stored = read(file), load_file(run / "dflash/export/model.safetensors")
    config = json.loads((run / "dflash/export/config.json").read_text())
    assert keys["dflash.target_layers"] == [2, 4]
    assert (keys["dflash.block_size"], keys["dflash.attention.causal"]) == (5, True)
    assert keys["dflash.attention.sliding_window_pattern"] == [False, True]
    assert keys["dflash.attention.sliding_window"] == 8
    mask = config["dflash_config"]["mask_token_id"]
    assert keys["tokenizer.ggml.mask_token_id"] == mask
    same = {
        "blk.1.attn_q.weight": "layers.1.self_attn.q_proj.weight",
        "blk.1.attn_k_norm.weight": "layers.1.self_attn.k_norm.weight",
        "blk.0.ffn_down.weight": "layers.0.mlp.down_proj.weight",
        "enc.output_norm.weight": "hidden_norm.weight",
    }
    for theirs, ours in same.items():
        np.testing.assert_array_equal(tensors[theirs], stored[ours], ours)
    assert len(tensors) == len(stored)


def test_a_dflash2_file_is_one_of_dflash_with_convolutions_whose_kernels_stay_exact_and_a_selector(
    run: Path, tmp_path: Path
) -> None:
    write_draft(run / "dflash2/export", run / "target", file := tmp_path / "draft.gguf", "bf16")
    (keys, tensors), stored = read(file), load_file(run / "dflash2/export/model.safetensors")
    sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    assert keys["general.architecture"] == "dflash"
    assert [keys[f"dflash.{name}"] for name in sizes] == [2, 16, 8, 6]
    for theirs, ours in {
        "blk.1.attn_conv_base": "layers.1.attention_conv.base_kernel",
        "blk.0.ffn_conv_base": "layers.0.mlp_conv.base_kernel",
    }.items():
        np.testing.assert_array_equal(tensors[theirs], stored[ours], ours)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes["blk.1.ffn_conv_proj.weight"] == (12, 48)
    assert shapes["selector_hidden.weight"] == (8, 48)
    assert shapes["selector_predecessor.weight"] == shapes["selector_successor.weight"] == (259, 8)
    assert len(tensors) == len(stored)


@pytest.mark.parametrize(("kind", "bound"), [("f16", 1e-3), ("bf16", 8e-3), ("q8_0", 1e-2)])
def test_matrices_of_a_smaller_type_are_near_and_vectors_are_exact(
    run: Path, tmp_path: Path, kind: str, bound: float
) -> None:
    target, file = run / "target", tmp_path / "target.gguf"
    asked = ("gguf", run / "run.yaml", "--target", "--out", file, "--type", kind)
    result = run_cli(*asked)
    assert result.exit_code == 0, result.output
    (keys, tensors), stored = read(file), load_file(target / "model.safetensors")
    assert keys["general.architecture"] == "qwen3"
    up = stored["model.layers.5.mlp.up_proj.weight"]
    np.testing.assert_allclose(tensors["blk.5.ffn_up.weight"], up, atol=bound * abs(up).max())
    assert not np.array_equal(tensors["blk.5.ffn_up.weight"], up)
    np.testing.assert_array_equal(tensors["output_norm.weight"], stored["model.norm.weight"])


Edit = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def nested(**fields: Any) -> Edit:
    return lambda config, tensors: config["dflash_config"].update(fields)


@pytest.mark.parametrize(
    ("draft", "edit", "problem"),
    [
        ("eagle3", lambda config, _: config.update(fc_norm=True), "has fc_norm: True"),
        ("eagle3", lambda config, _: config.update(norm_output=True), "has norm_output: True"),
        ("eagle3", lambda config, _: config["eagle_config"].update(norm_before_fc=True), "before_fc"),
        ("eagle3", lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=[2, 3]),
         "reads 2 layers of the target, and llama.cpp three"),
        ("eagle3", lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=[2, 3, 6]),
         r"layers \[2, 3, 6\], and of 6 layers llama.cpp gives those of 1 to 5"),
        ("eagle3", lambda _, tensors: tensors.pop("d2t"), "missing d2t"),
        ("eagle3", lambda config, _: config.update(vocab_size=300), "target of vocab_size 300"),
        ("eagle3", lambda config, _: config.update(architectures=["Other"]), "not known to serve"),
        ("eagle3", lambda config, _: config.update(rope_scaling=LINEAR), "RoPE of type linear"),
        ("dflash", lambda config, _: config.pop("is_causal"), "llama.cpp knows one value for all"),
        ("dflash", nested(target_layer_ids=[1, 5]), "gives those of 1 to 5"),
        ("dflash", nested(mask_token_id=None), "lacks mask_token_id"),
        ("dflash", lambda _, tensors: tensors.update(more=tensors["norm.weight"].clone()), "unknown more"),
        ("dflash2", nested(selector_top_k=7), "selector_top_k at most 6"),
        ("dflash2", nested(selector_rank=None), "lacks selector_rank"),
        ("dflash2", nested(output_multiplier=0.5), "has output_multiplier: 0.5"),
        ("domino", nested(), DOMINO),
        ("dspark", nested(markov_head_type="gated"), "serve it with markov_head_type: 'vanilla'"),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_serve_otherwise_than_trained_is_refused(
    run: Path, tmp_path: Path, draft: str, edit: Edit, problem: str
) -> None:
    export = shutil.copytree(run / draft / "export", tmp_path / "export")
    (export / EXPORT).unlink()
    change(export, edit)
    with pytest.raises(UsageError, match=problem) as refused:
        write_draft(export, run / "target", tmp_path / "draft.gguf")
    assert str(refused.value).splitlines()[-1].startswith("  ")  # what to do
    assert not [*tmp_path.glob("*.gguf")]


def test_a_target_that_is_not_written_here_is_refused_with_the_command_that_writes_it(
    run: Path, tmp_path: Path
) -> None:
    """And a draft takes the tokenizer, which is not written here either, from the file that it wrote."""
    target = shutil.copytree(run / "target", tmp_path / "target")
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    export, file = run / "eagle3/export", tmp_path / "draft.gguf"
    command = rf"convert_hf_to_gguf.py {target} --outfile target.gguf --outtype bf16"
    with pytest.raises(UsageError, match=command):
        write_draft(export, target, file)
    run_cli("gguf", run / "run.yaml", "--target", "--out", whole := tmp_path / "target.gguf")
    write_draft(export, target, file, tokenizer=whole)
    keys, theirs = read(file)[0], read(whole)[0]
    names = [name for name in theirs if name.startswith("tokenizer.")]
    assert len(names) >= 7
    assert all(keys[name] == theirs[name] for name in names)
    llama = tiny_target(tmp_path / "llama", "llama")
    asked = ("gguf", run / "run.yaml", "--target", "--out", file, f"target.path={llama}")
    assert f"convert_hf_to_gguf.py {llama} --outfile target.gguf" in run_cli(*asked).output


def test_a_dist_brings_the_table_of_its_own_method(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs-1.dist-info").mkdir()
    points = "[draftcore.gguf]\nTheirDraftModel = their_gguf:method\n"
    (tmp_path / "theirs-1.dist-info" / "entry_points.txt").write_text(points)
    (tmp_path / "theirs-1.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (tmp_path / "their_gguf.py").write_text(
        "from draftcore_llamacpp.methods import DFlash\n"
        "class Theirs(DFlash):\n"
        "    name = 'theirs'\n"
        "    outer = {**DFlash.outer, 'gate.weight': 'gate.weight'}\n"
        "method = Theirs()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    export = shutil.copytree(run / "dflash" / "export", tmp_path / "export")
    (export / EXPORT).unlink()

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.update(architectures=["TheirDraftModel"])
        tensors["gate.weight"] = tensors["fc.weight"].clone()

    change(export, edit)
    write_draft(export, run / "target", file := tmp_path / "draft.gguf")
    keys, tensors = read(file)
    assert (keys["general.architecture"], keys["theirs.block_size"]) == ("theirs", 5)
    assert "gate.weight" in tensors
