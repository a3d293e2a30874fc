"""The serving layout `serving`: a DFlash export with convolutions and a selector, as servers read it.

The architecture is of its own; sglang runs it by the method DFLASH, vLLM by `dflash`. In `dflash_config`
there are the sizes of convolutions and selector. Tensors have the names that they have here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore_dflash import serving as dflash
from draftcore_nn import serving

from draftcore_dflash2.config import DFlash2Config
from draftcore_dflash2.model import DFlash2Draft

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_dflash2.options import DFlash2Options

ARCHITECTURE = "DFlash2DraftModel"
SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# What servers do to the logits before the best are taken, with the one value that we compute.
FIXED = {"output_multiplier": 1, "final_logit_softcapping": None, "input_embedding_scale": 1}


def serving_config(module: DFlash2Draft) -> dict[str, Any]:
    """Return config.json's content: that of the backbone, and the sizes of what is added."""
    data = dflash.serving_config(module)
    data["dflash_config"] |= {name: getattr(module.config, name) for name in SIZES}
    return {**data, "architectures": [ARCHITECTURE]}


def read_config(folder: Path, target: TargetSpec, options: DFlash2Options) -> DFlash2Config:
    """Read the shape of a draft from its config.json, and check it against target and options."""
    data = serving.read_config(folder)
    serving.require_architecture(data, folder, ARCHITECTURE)
    nested = {**data, **(data.get("dflash_config") or {})}
    serving.require_fixed(nested, FIXED, folder)
    shape = dflash.parse_shape(data, folder, target, options)
    shape |= {name: int(serving.required(nested, name, folder)) for name in SIZES}
    config = DFlash2Config(**shape)
    dflash.check_options(config, options, folder)
    return config
