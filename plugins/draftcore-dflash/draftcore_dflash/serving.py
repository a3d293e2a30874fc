"""The serving layout `serving`: the z-lab layout, one folder that sglang, vLLM and llama.cpp read.

Bare tensor names, no embedding and no head (servers borrow the target's), captured layers as
0-based outputs in `dflash_config.target_layer_ids`. Inside a block servers take full layers for
bidirectional and sliding ones for causal, unless a top-level `is_causal` says otherwise for all; it
is written wherever one value is true of all layers. Weights are the fp32 masters, so an export
reloads exactly; servers cast to `dtype`.

Importing refuses whatever this draft does not compute, rather than loading it approximately.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from draftcore.contracts.algorithm import Draft
from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore_dflash.config import FULL, DraftConfig, captured_layers, mask_token, rope_of
from draftcore_dflash.model import Backbone, build

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_dflash.options import BackboneOptions, DFlashOptions

LAYOUTS = ("serving",)
ARCHITECTURE = "DFlashDraftModel"
# Config fields whose other values change the computation, with the one value that we compute.
FIXED = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
# Names that other writers give our tensors.
ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


# ---------------------------------------------------------------- export


def export(draft: Draft, folder: Path, layout: str) -> None:
    """Write config.json and model.safetensors of a DFlash draft.

    Raises UsageError for an unknown layout, DraftcoreError for weights that are not finite.
    """
    assert isinstance(draft.module, Backbone)
    write(draft.module, serving_config(draft.module), folder, layout)


def write(module: Backbone, config: Mapping[str, Any], folder: Path, layout: str) -> None:
    """Write a module's parameters and this config."""
    if layout not in LAYOUTS:
        raise UsageError(
            f"unknown layout {layout!r}{nearest(layout, LAYOUTS)}\n"
            f"  there is: {', '.join(LAYOUTS)} (read by sglang, vLLM and llama.cpp)\n"
            f"  ask for layout {LAYOUTS[0]}"
        )
    tensors = {name: p.detach().cpu().contiguous() for name, p in module.named_parameters()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise DraftcoreError(
                f"tensor {name} is not finite: the training run diverged\n"
                "  export an earlier checkpoint, or train with a lower learning rate"
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def serving_config(module: Backbone) -> dict[str, Any]:
    """Return config.json's content; its `dtype`, the target's, is what servers compute in."""
    config, name = module.config, str(module.embed_tokens.dtype).removeprefix("torch.")
    rope, factor = dict(config.rope), config.rope.get("partial_rotary_factor", 1.0)
    if factor != 1:
        rope["rope_dim"] = int(config.head_dim * factor)  # sglang's name for it
    causal = {config.causal(kind) for kind in config.layer_types}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **FIXED,
        "num_hidden_layers": len(config.layer_types),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.layers),
            "block_size": config.block_size,
        },
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": config.layer_types.count(FULL),
        **({"is_causal": causal.pop()} if len(causal) == 1 else {}),
        # Both spellings: transformers 5 reads the first, servers on transformers 4 the others.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "partial_rotary_factor": factor,
        "dtype": name,
        "torch_dtype": name,
    }


# ---------------------------------------------------------------- import


def load(folder: Path, target: TargetSpec, options: DFlashOptions) -> Draft:
    """Read a draft from this layout, exported here or published elsewhere.

    Raises UsageError naming what is not as this draft computes it.
    """
    draft = build(target, read_config(folder, target, options), options)
    load_tensors(draft, folder)
    return draft


def load_tensors(draft: Draft, folder: Path) -> None:
    """Fill a draft's parameters; raises UsageError naming tensors that are missing or wrong."""
    parameters, tensors = dict(draft.module.named_parameters()), _read_tensors(folder)
    _check_shapes(tensors, {name: tuple(p.shape) for name, p in parameters.items()}, folder)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def read_config(folder: Path, target: TargetSpec, options: BackboneOptions) -> DraftConfig:
    """Read the shape of a draft from its config.json, and check it against target and options."""
    data = read_json(folder)
    if "projector_type" in _nested(data):
        raise UsageError(
            f"the draft in {folder} has a head of its own: projector_type "
            f"{_nested(data)['projector_type']!r}\n  read it with the algorithm of that name"
        )
    config = DraftConfig(**parse_shape(data, folder, target, options))
    check_options(config, options, folder)
    return config


def read_json(folder: Path, architectures: tuple[str, ...] = (ARCHITECTURE,)) -> dict[str, Any]:
    """Return config.json's content; raises UsageError where there is none of these architectures."""
    file = folder / "config.json"
    if not file.is_file():
        raise UsageError(
            f"no draft at {folder}: it has no config.json\n"
            "  give the folder of an exported or published DFlash draft"
        )
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "transformer_layer_config" in data:
        raise UsageError(
            f"the draft in {folder} is in the speculators layout\n"
            "  convert it to the z-lab layout, with dflash_config.target_layer_ids, first"
        )
    if not set(architectures) & set(data.get("architectures") or []):
        raise UsageError(
            f"config.json in {folder} has architectures {data.get('architectures')}\n"
            f"  a draft of this kind says architectures: [{architectures[0]!r}]"
        )
    return data


def parse_shape(
    data: Mapping[str, Any], folder: Path, target: TargetSpec, options: BackboneOptions
) -> dict[str, Any]:
    """Turn a config.json's content into the fields of a DraftConfig, checked against the target.

    Captured layers that it does not name are the default ones. Raises UsageError for what this
    draft does not compute, or computes for another target.
    """
    shape = config_fields(data, folder)
    for name, theirs in (
        ("hidden_size", int(target.text_config.hidden_size)),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", target.num_layers),
    ):
        ours = shape.setdefault(name, theirs)
        if ours != theirs:
            raise UsageError(
                f"the draft in {folder} has {name} {ours}, the target {theirs}\n"
                "  use the draft with the target it was trained for"
            )
    depth = len(shape["layer_types"])
    shape["layers"] = captured_layers(shape.get("layers"), depth, target.num_layers)
    if "mask_token_id" not in shape:
        shape["mask_token_id"] = mask_token(target, options.mask_token_id)
    return shape


def config_fields(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a DraftConfig that a config.json's content states."""
    for name, value in FIXED.items():
        if data.get(name, value) not in (value, None):
            raise UsageError(
                f"config.json in {folder} says {name}: {data[name]!r}\n"
                f"  this plugin computes {name}: {value!r} only; the draft cannot be read"
            )
    nested = _nested(data)
    try:
        depth, heads = int(data["num_hidden_layers"]), int(data["num_attention_heads"])
        shape: dict[str, Any] = {
            "hidden_size": int(data["hidden_size"]),
            "intermediate_size": int(data["intermediate_size"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(data.get("num_key_value_heads") or heads),
            "head_dim": int(data.get("head_dim") or data["hidden_size"] // heads),
            "vocab_size": int(data["vocab_size"]),
            "rms_norm_eps": float(data["rms_norm_eps"]),
            "max_position_embeddings": int(data.get("max_position_embeddings") or 2048),
            "block_size": int(data.get("block_size") or nested["block_size"]),
        }
    except KeyError as error:
        raise UsageError(
            f"config.json in {folder} lacks {error}\n  add the field, or export the draft again"
        ) from None
    types = tuple(data.get("layer_types") or (FULL,) * depth)
    if len(types) != depth:
        raise UsageError(
            f"config.json in {folder} has num_hidden_layers {depth} and {len(types)} layer_types\n"
            "  make the two agree, or export the draft again"
        )
    windowed = set(types) != {FULL}
    shape |= {
        "rope": rope_of(Qwen3Config.from_dict(_plain_rope(data, shape["head_dim"]))),
        "layer_types": types,
        "sliding_window": data.get("sliding_window") if windowed else None,
        "is_causal": data.get("is_causal"),
    }
    if "num_target_layers" in data:
        shape["num_target_layers"] = int(data["num_target_layers"])
    if nested.get("target_layer_ids") is not None:
        shape["layers"] = tuple(nested["target_layer_ids"])
    if nested.get("mask_token_id") is not None:
        shape["mask_token_id"] = int(nested["mask_token_id"])
    return shape


def check_options(config: DraftConfig, options: BackboneOptions, folder: Path) -> None:
    """Refuse an option that was set to something other than what the folder holds."""
    found = {field.name: getattr(config, field.name) for field in fields(config)}
    found["num_layers"] = len(config.layer_types)
    for name in sorted(options.model_fields_set & set(found)):
        asked = getattr(options, name)
        if asked is not None and asked != found[name]:
            raise UsageError(
                f"option {name} is {asked}, but the draft in {folder} has {found[name]}\n"
                f"  leave {name} out: a draft that is read keeps its shape"
            )


def _nested(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return data.get("dflash_config") or {}


def _plain_rope(data: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Turn sglang's `rope_dim` into the partial rotary factor that transformers knows."""
    plain = {name: value for name, value in data.items() if name != "layer_types"}
    for name in ("rope_parameters", "rope_scaling"):
        if rope := dict(plain.get(name) or {}):
            if (dim := rope.pop("rope_dim", None)) is not None:
                rope.setdefault("partial_rotary_factor", dim / head_dim)
            plain[name] = rope
    return plain


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        remedy = "give the folder of an exported draft"
        if pickled := sorted(p.name for p in folder.glob("*.bin")):
            remedy = f"{pickled[0]} is a pickle, which could run code; convert it to safetensors"
        raise UsageError(f"the draft in {folder} has no model.safetensors\n  {remedy}")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        for theirs, ours in ALIASES.items():
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        if not name.endswith("rotary_emb.inv_freq"):
            found[name] = tensor
    return found


def _check_shapes(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"missing {name} {list(shapes[name])}" for name in shapes if name not in found]
    problems += [f"unknown {name} {list(found[name])}" for name in found if name not in shapes]
    problems += [
        f"{name} is {list(found[name])}, not {list(shapes[name])}"
        for name in shapes
        if name in found and found[name] != shapes[name]
    ]
    if problems:
        raise UsageError(
            f"the tensors in {folder} are not those its config.json describes:\n  "
            + "\n  ".join(problems)
            + "\n  use the complete draft; an embedding or a head of its own is not supported"
        )
