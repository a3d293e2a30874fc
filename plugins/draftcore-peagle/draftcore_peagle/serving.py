"""The serving layout `serving`: an EAGLE-3 export that drafts in parallel, as vLLM alone reads it.

What makes it P-EAGLE is `parallel_drafting`, the mask token under vLLM's two names for it, the tensor
`mask_hidden`, and an embedding of the draft's own. sglang knows none of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore_eagle3 import serving as eagle3
from draftcore_nn import serving

from draftcore.errors import UsageError
from draftcore_peagle.config import PEagleConfig

if TYPE_CHECKING:
    from torch import Tensor

    from draftcore.contracts.target import TargetSpec
    from draftcore_peagle.model import PEagleDraft
    from draftcore_peagle.options import PEagleOptions

# The others are of published drafts; vLLM takes them for the same.
ARCHITECTURES = eagle3.ARCHITECTURE, "PEagleDraftModel", "PeagleLlamaForCausalLM"
FIXED = {**eagle3.FIXED, "parallel_drafting": True}
MASK = "pard_token", "ptd_token_id"
EMBEDDING = "embed_tokens"


def serving_config(module: PEagleDraft) -> dict[str, Any]:
    """Return config.json's content."""
    mask = dict.fromkeys(MASK, module.config.mask_token_id)
    return {**eagle3.serving_config(module), "parallel_drafting": True, **mask}


def serving_tensors(module: PEagleDraft) -> dict[str, Tensor]:
    """Return EAGLE-3's tensors and `mask_hidden`."""
    tensors = eagle3.serving_tensors(module)
    del tensors[EMBEDDING]  # there as `embed_tokens.weight`
    return tensors


def fill(module: PEagleDraft, tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill a draft. Raises UsageError for a head that was trained, where it is to stay the target's."""
    if f"{EMBEDDING}.weight" in tensors:
        tensors[EMBEDDING] = tensors.pop(f"{EMBEDDING}.weight")
    head_UH = module.lm_head.weight
    if not head_UH.requires_grad and not eagle3.same(tensors["lm_head.weight"], head_UH):
        raise UsageError(
            f"the LM head in {folder} was trained: it is not the target's\n"
            "  set train_head to true, or use another draft"
        )
    serving.fill(module, tensors, folder)


def read_config(folder: Path, target: TargetSpec, options: PEagleOptions) -> PEagleConfig:
    """Read the shape of a draft from its config.json, and check it against target and options."""
    config = parse_config(serving.read_config(folder), folder, target.num_layers)
    eagle3.check(config, folder, target, options)
    return config


def parse_config(data: Mapping[str, Any], folder: Path, num_target_layers: int) -> PEagleConfig:
    """Turn a config.json's content into a PEagleConfig; raises UsageError for what differs."""
    serving.require_architecture(data, folder, *ARCHITECTURES)
    fields = eagle3.config_fields(data, folder, num_target_layers, FIXED)
    mask = next((data[name] for name in MASK if data.get(name) is not None), None)
    if mask is None:
        raise UsageError(
            f"config.json in {folder} lacks {MASK[0]!r}, the token that stands for one to be drafted\n"
            "  add the field, or read an EAGLE-3 draft with the algorithm eagle3"
        )
    return PEagleConfig(**fields, mask_token_id=int(mask))
