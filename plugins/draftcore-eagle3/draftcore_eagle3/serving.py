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

from draftcore.contracts.algorithm import Draft
from draftcore.errors import UsageError
from draftcore_eagle3.config import DraftConfig, captured_layers
from draftcore_eagle3.model import Eagle3Draft, build

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_eagle3.options import Eagle3Options

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Config fields whose other values change the computation, with the one value that we compute.
FIXED = {
    "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "bias": False, "norm_before_residual": False, "norm_before_fc": False,
    "parallel_drafting": False, "num_aux_hidden_states": 3, "use_aux_hidden_state": True,
    "logit_scale": 1, "final_logit_softcapping": None,  # of vLLM, and of sglang
}  # fmt: skip
# Prefixes of tensors' names; in published drafts the layer is `layers.0.`, or all have `model.`.
RENAMED = {"model.": "", "layers.0.": "midlayer."}


# ---------------------------------------------------------------- export


def export(draft: Draft, folder: Path, layout: str) -> None:
    """Write config.json and model.safetensors under bare names; raises as `write_export` does."""
    module = draft.module
    assert isinstance(module, Eagle3Draft)
    config = module.config
    tensors = {**dict(module.named_parameters()), "embed_tokens.weight": module.embed_tokens}
    if module.d2t is not None:
        t2d_V = known_tokens(module.d2t, config.vocab_size)
        tensors |= {"d2t": module.d2t, "t2d": t2d_V}
    data = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **shape_in_config(config, module.embed_tokens.dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "num_hidden_layers": 1,
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
    serving.write_export(folder, layout, data, tensors)


# ---------------------------------------------------------------- import


def load(folder: Path, target: TargetSpec, options: Eagle3Options) -> Draft:
    """Read a draft from this layout, exported here or published elsewhere.

    Accepts `midlayer.` and `layers.0.`, a `model.` prefix, a missing embedding (the target's is
    used), and a missing d2t where the vocabulary is full. Raises UsageError naming what is not as
    this draft computes it.
    """
    config = read_config(folder, target, options)
    tensors = serving.read_tensors(folder, RENAMED)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids_U, sizes = None, (config.draft_vocab_size, config.vocab_size)
    if d2t is not None or not config.full_vocabulary:
        ids_U = read_ids(d2t, t2d, *sizes, folder)
    draft = build(target, config, options, ids_U)
    target_VH = draft.module.get_buffer("embed_tokens")
    found_VH = tensors.pop("embed_tokens.weight", target_VH)
    same = found_VH is target_VH or (
        found_VH.shape == target_VH.shape
        and torch.allclose(found_VH.float(), target_VH.float(), rtol=0.01, atol=1e-4)
    )
    if not same:
        raise UsageError(
            f"embed_tokens in {folder} is not the target's embedding\n"
            "  the draft was trained for another target, or trained its own embedding, which is "
            "not supported\n  use the draft with the target it was trained for"
        )
    serving.fill(draft.module, tensors, folder)
    return draft


def read_config(folder: Path, target: TargetSpec, options: Eagle3Options) -> DraftConfig:
    """Read the shape of a draft from its config.json, and check it against target and options."""
    config = parse_config(serving.read_config(folder), folder, target.num_layers)
    serving.require_target(vars(config), target, folder)
    found = dict(vars(config))
    if sorted(options.layers or ()) == list(config.layers):
        found["layers"] = options.layers  # in any order
    serving.require_options(found, options, folder)
    return config


def parse_config(data: Mapping[str, Any], folder: Path, num_target_layers: int) -> DraftConfig:
    """Turn a config.json's content into a DraftConfig; raises UsageError for what differs."""
    serving.require_architecture(data, folder, ARCHITECTURE)
    serving.require_fixed({**(data.get("eagle_config") or {}), **data}, FIXED, folder)
    shape = shape_of_config(data, folder)
    return DraftConfig(
        **shape,
        draft_vocab_size=int(data.get("draft_vocab_size") or shape["vocab_size"]),
        layers=_read_layers(data, folder, num_target_layers),
        fc_norm=bool(data.get("fc_norm") or data.get("use_aux_norm")),
        norm_output=bool(data.get("norm_output")),
    )


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
