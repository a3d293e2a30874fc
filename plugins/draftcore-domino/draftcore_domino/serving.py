"""The serving layout `serving`: a DFlash export with the causal head, as sglang reads it.

The architecture is DFlash's; what makes it Domino is `dflash_config.projector_type`, exactly
"domino", the head's sizes beside it, and the head's four tensors. Servers insist on all of them and
on `pure_draft_prefix_len` 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore_dflash import serving as dflash
from draftcore_nn import serving

from draftcore.errors import UsageError
from draftcore_domino.config import DominoConfig
from draftcore_domino.model import DominoDraft

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_domino.options import DominoOptions

PROJECTOR = "domino"
SIZES = "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"
# The second name is research code's; sglang does not know it, so it is read, but not written.
ARCHITECTURES = (dflash.ARCHITECTURE, "DominoDraftModel")


def serving_config(module: DominoDraft) -> dict[str, Any]:
    """Return config.json's content: that of the backbone, and the head's fields."""
    config, data = module.config, dflash.serving_config(module)
    head = {name: getattr(config, name) for name in ("shift_label", *SIZES)}
    data["dflash_config"] |= {"projector_type": PROJECTOR, **head}
    return {**data, "emb_dim": config.emb_dim}


def read_config(folder: Path, target: TargetSpec, options: DominoOptions) -> DominoConfig:
    """Read the shape of a draft from its config.json, and check it against target and options."""
    data = serving.read_config(folder)
    serving.require_architecture(data, folder, *ARCHITECTURES)
    shape = dflash.parse_shape(data, folder, target, options)
    config = DominoConfig(**shape, **head_fields(data, folder))
    if config.pure_draft_prefix_len != 1:
        raise UsageError(
            f"the draft in {folder} has pure_draft_prefix_len {config.pure_draft_prefix_len}\n"
            "  servers and this decoder correct from the second proposal on: it must be 1"
        )
    dflash.check_options(config, options, folder)
    return config


def head_fields(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a DominoConfig that describe its head; raises UsageError for a lack."""
    nested = data.get("dflash_config") or {}
    if nested.get("projector_type") != PROJECTOR:
        raise UsageError(
            f"the draft in {folder} has projector_type {nested.get('projector_type')!r}\n"
            f"  a Domino draft says dflash_config.projector_type: {PROJECTOR!r}"
        )
    given = {**data, **nested}
    head = {name: int(serving.required(given, name, folder)) for name in SIZES}
    head["shift_label"] = serving.required(given, "shift_label", folder)  # no text is made true
    if data.get("emb_dim", head["emb_dim"]) != head["emb_dim"]:
        raise UsageError(
            f"config.json in {folder} has two values of emb_dim: {data['emb_dim']} at the top level, "
            f"{head['emb_dim']} in dflash_config\n  make the two agree, or leave the first out"
        )
    return head
