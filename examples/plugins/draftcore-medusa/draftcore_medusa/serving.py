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
from typing import TYPE_CHECKING

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
# Fields of a shape, by their names in config.json.
FIELDS = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_heads": "num_heads",
    "num_hidden_layers": "num_layers",
}
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
    dtype = dtype_name(module.target_head.dtype)
    config = {
        "architectures": ["MedusaModel"],
        **FIXED,
        **{theirs: draft.config[ours] for theirs, ours in FIELDS.items()},
        "truncated_vocab_size": draft.config["vocab_size"],
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    serving.write_export(folder, layout, config, {**module.state_dict(), HEAD: module.target_head})


def load(folder: Path, target: TargetSpec, options: MedusaOptions) -> Draft:
    """Read a draft from this layout; raises UsageError naming what is not as we compute it."""
    data = serving.read_config(folder)
    serving.require_fixed({**LEFT_OUT, **data}, FIXED, folder)
    shape = {ours: serving.required(data, name, folder) for name, ours in FIELDS.items()}
    serving.require_fixed(data, {"truncated_vocab_size": shape["vocab_size"]}, folder)
    serving.require_target(shape, target, folder)
    serving.require_options(shape, options, folder)
    draft = build(target, DraftConfig(**shape), options.decay)
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
