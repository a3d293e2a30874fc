"""The serving layout `serving`: what vLLM's Medusa model loads.

`config.json` has `model_type: medusa`; the tensors are `blocks.i.layers.j.{weight,bias}` and the
target's head, once, as `lm_head.weight`: `original_lm_head` tells vLLM that all heads share it, and
it does not borrow the running target's. vLLM takes *any* key of config.json that holds `num` and
`heads` (or `layers`) for the number of heads (or layers), so there must be one of each and no more.
Weights of the blocks are the fp32 masters, so an export reloads exactly; vLLM casts them.

Importing refuses whatever this draft does not compute, rather than loading it approximately.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from draftcore_nn import serving
from draftcore_nn.target import dtype_name

from draftcore.contracts.algorithm import Draft
from draftcore.errors import UsageError
from draftcore_medusa.model import DraftConfig, MedusaDraft, build

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_medusa.options import MedusaOptions

HEAD = "lm_head.weight"
# Fields whose other values change the computation, and what vLLM takes for those left out.
FIXED = {
    "model_type": "medusa",
    "medusa_fc_bias": True,
    "original_lm_head": True,
    "logit_scale": 1.0,
}
LEFT_OUT = {"model_type": "", "medusa_fc_bias": False, "original_lm_head": False}


def export(draft: Draft, folder: Path, layout: str) -> None:
    """Write config.json and model.safetensors; raises as `write_export` does."""
    module = draft.module
    assert isinstance(module, MedusaDraft)
    tensors = {**module.state_dict(), HEAD: module.target_head}
    serving.write_export(folder, layout, serving_config(module), tensors)


def serving_config(module: MedusaDraft) -> dict[str, Any]:
    """Return config.json's content; its `dtype` is the target's."""
    config, name = module.config, dtype_name(module.target_head.dtype)
    return {
        "architectures": ["MedusaModel"],
        **FIXED,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "dtype": name,
        "torch_dtype": name,
    }


def load(folder: Path, target: TargetSpec, options: MedusaOptions) -> Draft:
    """Read a draft from this layout; raises UsageError naming what is not as we compute it."""
    config = read_config(folder, target, options)
    draft = build(target, config, options.decay)
    # vLLM drops this prefix, which some writers leave in.
    tensors = serving.read_tensors(folder, {"medusa_heads.": ""})
    found_VH, head_VH = tensors.pop(HEAD, None), draft.module.get_buffer("target_head")
    if found_VH is None or not torch.equal(found_VH.to(head_VH.dtype), head_VH):
        raise UsageError(
            f"{HEAD} in {folder} is not the head of target {target.path!r}\n"
            "  use the target that the draft was trained for; a trained head cannot be read"
        )
    serving.fill(draft.module, tensors, folder)
    return draft


def read_config(folder: Path, target: TargetSpec, options: MedusaOptions) -> DraftConfig:
    """Read a draft's shape from config.json, and check it against the target and the options set."""
    data = serving.read_config(folder)
    serving.require_fixed({**LEFT_OUT, **data}, FIXED, folder)
    fields = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
    found = DraftConfig(*(int(serving.required(data, field, folder)) for field in fields))
    if data.get("truncated_vocab_size") not in (None, found.vocab_size):
        raise UsageError(
            f"the draft in {folder} has a vocabulary of {data['truncated_vocab_size']} tokens\n"
            f"  this plugin reads drafts of the target's whole vocabulary ({found.vocab_size}) only"
        )
    wanted = DraftConfig.of(target, options)
    chosen = options.model_fields_set & {"num_heads", "num_layers"}
    for name in ("hidden_size", "vocab_size", *sorted(chosen)):
        if getattr(found, name) != getattr(wanted, name):
            raise UsageError(
                f"the draft in {folder} has {name} {getattr(found, name)}, "
                f"the run {getattr(wanted, name)}\n"
                "  use it with the target it was trained for, and leave out options of its shape"
            )
    return found
