"""The serving layout `serving`: one folder that sglang and vLLM both read.

It is the research layout (`LlamaForCausalLMEagle3`, tensors under `midlayer.`). The two servers
read captured layers from different fields in different conventions: sglang 0-based outputs from
`eagle_config`, vLLM input-of-layer ids (one more) from the top level. This module is the only place
that converts. Weights are the fp32 masters, so an export reloads exactly; servers cast to `dtype`.

Importing refuses whatever this draft does not compute, rather than loading it approximately.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from draftcore_nn import serving
from draftcore_nn.target import shape_in_config, shape_of_config
from draftcore_nn.vocabulary import known_tokens, read_ids

from draftcore.errors import UsageError
from draftcore_eagle3.config import DraftConfig, captured_layers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from draftcore.contracts.target import TargetSpec
    from draftcore_eagle3.model import Backbone
    from draftcore_eagle3.options import BackboneOptions

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Config fields whose other values change the computation, with the one value that we compute.
FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "bias": False, "norm_before_residual": False, "norm_before_fc": False,
    "parallel_drafting": False, "num_aux_hidden_states": 3, "use_aux_hidden_state": True,
    "logit_scale": 1, "final_logit_softcapping": None,  # of vLLM, and of sglang
}  # fmt: skip
# Prefixes of tensors' names; in published drafts the layer is `layers.0.`, or all have `model.`.
RENAMED = {"model.": "", "layers.0.": "midlayer."}


# ---------------------------------------------------------------- export


def serving_config(module: Backbone) -> dict[str, Any]:
    """Return config.json's content."""
    config = module.config
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **shape_in_config(config, module.target_dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "num_hidden_layers": config.num_layers,
        "mlp_bias": False,
        "num_aux_hidden_states": len(config.layers),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.layers),
            "use_aux_hidden_state": True,
        },
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
    }


def serving_tensors(module: Backbone) -> dict[str, Tensor]:
    """Return the tensors under their bare names.

    Layers after the first have one norm before attention, which vLLM knows by the name it has here, and
    sglang as `hidden_norm`: both are written.
    """
    tensors = {**dict(module.named_parameters()), "embed_tokens.weight": module.embed_tokens}
    for norm, also in _twice(module.config):
        tensors[also] = tensors[norm].detach().clone()
    if module.d2t is not None:
        t2d_V = known_tokens(module.d2t, module.config.vocab_size)
        tensors |= {"d2t": module.d2t, "t2d": t2d_V}
    return tensors


def _twice(config: DraftConfig) -> list[tuple[str, str]]:
    """Name the norms that have a second name."""
    layers = [f"layers.{i}" for i in range(1, config.num_layers)]
    return [(f"{layer}.input_layernorm.weight", f"{layer}.hidden_norm.weight") for layer in layers]


# ---------------------------------------------------------------- import


def read_tensors(folder: Path, config: DraftConfig) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the target ids of the draft vocabulary, None where there is no d2t, and the other tensors.

    Accepts `midlayer.` and `layers.0.`, a `model.` prefix, and a missing d2t where the vocabulary is
    full. Raises UsageError naming what is not as this draft computes it.
    """
    tensors = serving.read_tensors(folder, RENAMED)
    for norm, also in _twice(config):
        other = tensors.pop(also, None)
        if other is not None and not torch.equal(tensors.setdefault(norm, other), other):
            raise UsageError(
                f"{norm} and {also} in {folder} differ\n"
                "  vLLM reads the first, sglang the second: use the complete published draft"
            )
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None and config.full_vocabulary:
        return None, tensors
    return read_ids(d2t, t2d, config.draft_vocab_size, config.vocab_size, folder), tensors


def fill(module: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill a draft; a missing embedding is the target's. Raises UsageError for another one."""
    target_VH = module.get_buffer("embed_tokens")
    found_VH = tensors.pop("embed_tokens.weight", target_VH)
    if not same(found_VH, target_VH):
        raise UsageError(
            f"embed_tokens in {folder} is not the target's embedding\n"
            "  the draft was trained for another target, or trained its own embedding, which is "
            "not supported\n  use the draft with the target it was trained for"
        )
    serving.fill(module, tensors, folder)


def same(found_VH: Tensor, target_VH: Tensor) -> bool:
    """Say whether a draft's tensor is the target's, but for the rounding of another dtype."""
    return found_VH is target_VH or (
        found_VH.shape == target_VH.shape
        and torch.allclose(found_VH.float(), target_VH.float(), rtol=0.01, atol=1e-4)
    )


def read_config(folder: Path, target: TargetSpec, options: BackboneOptions) -> DraftConfig:
    """Read the shape of a draft from its config.json, and check it against target and options."""
    data = serving.read_config(folder)
    config = parse_config(data, folder, target.num_layers)
    check(config, folder, target, options)
    return config


def check(config: DraftConfig, folder: Path, target: TargetSpec, options: BackboneOptions) -> None:
    """Raise UsageError where a draft is for another target, or has not what the options say."""
    serving.require_target(vars(config), target, folder)
    found = dict(vars(config))
    if sorted(options.layers or ()) == list(config.layers):
        found["layers"] = options.layers  # in any order
    serving.require_options(found, options, folder)


def parse_config(data: Mapping[str, Any], folder: Path, num_target_layers: int) -> DraftConfig:
    """Turn a config.json's content into a DraftConfig; raises UsageError for what differs."""
    serving.require_architecture(data, folder, ARCHITECTURE)
    fields = config_fields(data, folder, num_target_layers, FIXED)
    return DraftConfig(**fields, norm_output=bool(data.get("norm_output")))


def config_fields(
    data: Mapping[str, Any], folder: Path, num_target_layers: int, fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that any draft of this network has; `fixed` are values that must be so."""
    serving.require_fixed({**(data.get("eagle_config") or {}), **data}, fixed, folder)
    shape = shape_of_config(data, folder)
    return {
        **shape,
        "draft_vocab_size": int(data.get("draft_vocab_size") or shape["vocab_size"]),
        "layers": _read_layers(data, folder, num_target_layers),
        "num_layers": int(data.get("num_hidden_layers") or 1),
        "fc_norm": bool(data.get("fc_norm") or data.get("use_aux_norm")),
    }


def _read_layers(data: Mapping[str, Any], folder: Path, num_layers: int) -> tuple[int, ...]:
    """Return 0-based outputs from either convention; both, if given, must agree."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested, top = (data.get("eagle_config") or {}).get(name), data.get(name)
    from_top = None if top is None else [layer - 1 for layer in top]
    if nested is not None and from_top is not None and nested != from_top:
        raise UsageError(
            f"config.json in {folder} names two sets of captured layers: outputs {nested} in "
            f"eagle_config,\n  and {top} at the top level, which are the outputs {from_top}\n"
            f"  make the top-level ids one more than those in eagle_config"
        )
    asked = nested if nested is not None else from_top
    return captured_layers(None if asked is None else tuple(asked), num_layers)
