"""The serving layout `serving`: the z-lab layout, one folder that sglang, vLLM and llama.cpp read.

Bare tensor names, no embedding and no head (servers borrow the target's), captured layers as
0-based outputs in `dflash_config.target_layer_ids`. Inside a block servers take full layers for
bidirectional and sliding ones for causal, unless a top-level `is_causal` says otherwise for all; it
is written wherever one value is true of all layers. Weights are the fp32 masters, so an export
reloads exactly; servers cast to `dtype`.

Importing refuses whatever this draft does not compute, rather than loading it approximately.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore_nn import serving
from draftcore_nn.target import mask_token, shape_in_config, shape_of_config

from draftcore.errors import UsageError
from draftcore_dflash.config import FULL, DraftConfig, captured_layers
from draftcore_dflash.model import Backbone

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_dflash.options import BackboneOptions

ARCHITECTURE = "DFlashDraftModel"
# Config fields whose other values change the computation, with the one value that we compute.
FIXED = {
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "logit_scale": 1,
}  # fmt: skip
# Prefixes that other writers give our tensors' names.
RENAMED = {"model.": "", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


# ---------------------------------------------------------------- export


def serving_config(module: Backbone) -> dict[str, Any]:
    """Return config.json's content; its `dtype`, the target's, is what servers compute in."""
    config = module.config
    data = shape_in_config(config, module.embed_tokens.dtype)
    if (factor := data["partial_rotary_factor"]) != 1:
        data["rope_parameters"]["rope_dim"] = int(config.head_dim * factor)  # sglang's name for it
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **data,
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
        **({} if config.is_causal is None else {"is_causal": config.is_causal}),
    }


# ---------------------------------------------------------------- import


def read_config(folder: Path, target: TargetSpec, options: BackboneOptions) -> DraftConfig:
    """Read the shape of a draft from its config.json, and check it against target and options."""
    data = serving.read_config(folder)
    serving.require_architecture(data, folder, ARCHITECTURE)
    if "projector_type" in _nested(data):
        raise UsageError(
            f"the draft in {folder} has a head of its own: projector_type "
            f"{_nested(data)['projector_type']!r}\n  read it with the algorithm of that name"
        )
    config = DraftConfig(**parse_shape(data, folder, target, options))
    check_options(config, options, folder)
    return config


def parse_shape(
    data: Mapping[str, Any], folder: Path, target: TargetSpec, options: BackboneOptions
) -> dict[str, Any]:
    """Turn a config.json's content into the fields of a DraftConfig, checked against the target.

    Captured layers that it does not name are the default ones. Raises UsageError for what this
    draft does not compute, or computes for another target.
    """
    shape = config_fields(data, folder)
    shape.setdefault("num_target_layers", target.num_layers)
    serving.require_target(shape, target, folder)
    depth = len(shape["layer_types"])
    shape["layers"] = captured_layers(shape.get("layers"), depth, target.num_layers)
    if "mask_token_id" not in shape:
        shape["mask_token_id"] = mask_token(target, options.mask_token_id)
    return shape


def config_fields(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a DraftConfig that a config.json's content states."""
    serving.require_fixed(data, FIXED, folder)
    nested = _nested(data)
    depth = int(serving.required(data, "num_hidden_layers", folder))
    types = tuple(data.get("layer_types") or (FULL,) * depth)
    if len(types) != depth:
        raise UsageError(
            f"config.json in {folder} has num_hidden_layers {depth} and {len(types)} layer_types\n"
            "  make the two agree, or export the draft again"
        )
    windowed = set(types) != {FULL}
    shape = {
        **shape_of_config(data, folder),
        "block_size": int(serving.required({**nested, **data}, "block_size", folder)),
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
    found = {**vars(config), "num_layers": len(config.layer_types)}
    serving.require_options(found, options, folder)


def _nested(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return data.get("dflash_config") or {}
