"""The serving layout `serving`: a DFlash export with the two heads, as sglang, vLLM and llama.cpp read it.

sglang builds the heads by the top level of config.json and checks them in `dflash_config`, so their
fields stand in both. A block has as many rows as it drafts: `sample_from_anchor` is always true.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore_dflash import serving as dflash
from draftcore_nn import serving

from draftcore.errors import UsageError
from draftcore_dspark.config import DSparkConfig
from draftcore_dspark.model import DSparkDraft

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_dspark.options import DSparkOptions

# The first is what all servers know, the second what SpecForge writes.
ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
TYPES = ("vanilla", "gated", "rnn")
FIELDS = {
    "markov_rank": int, "markov_head_type": str, "enable_confidence_head": bool,
    "confidence_head_with_markov": bool,
}  # fmt: skip


def serving_config(module: DSparkDraft) -> dict[str, Any]:
    """Return config.json's content: that of the backbone, and the heads' fields."""
    data = dflash.serving_config(module)
    heads = {name: getattr(module.config, name) for name in FIELDS} | {"sample_from_anchor": True}
    nested = {"dflash_config": data["dflash_config"] | heads}
    return {**data, "architectures": [ARCHITECTURES[0]], **heads, **nested}


def read_config(folder: Path, target: TargetSpec, options: DSparkOptions) -> DSparkConfig:
    """Read the shape of a draft from its config.json, and check it against target and options."""
    data = serving.read_config(folder)
    serving.require_architecture(data, folder, *ARCHITECTURES)
    shape = dflash.parse_shape(data, folder, target, options)
    config = DSparkConfig(**shape, **head_fields(data, folder))
    dflash.check_options(config, options, folder)
    return config


def head_fields(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a DSparkConfig that describe its heads; raises UsageError for a lack."""
    nested = data.get("dflash_config") or {}
    given = {**nested, **data}
    serving.require_fixed(given, {"sample_from_anchor": True}, folder)
    heads = {name: kind(serving.required(given, name, folder)) for name, kind in FIELDS.items()}
    for name, value in heads.items():
        if nested.get(name, value) != value:
            raise UsageError(
                f"config.json in {folder} has two values of {name}: {value} at the top level, "
                f"{nested[name]} in dflash_config\n  make the two agree, or leave the second out"
            )
    if heads["markov_head_type"] not in TYPES:
        raise UsageError(
            f"config.json in {folder} has markov_head_type {heads['markov_head_type']!r}\n"
            f"  a DSpark draft has one of {', '.join(TYPES)}"
        )
    return heads
