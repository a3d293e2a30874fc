"""The hooks of Domino. What is slow to import is imported inside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# The first three are hooks: Domino collates, trains and takes a prefilled request over as DFlash does.
from draftcore_dflash.plugin import (
    build_disagg_draft_input,
    collate,
    forward_loss,
    require_tools,
)

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore.contracts.algorithm import DataSummary, Draft, Drafter
    from draftcore.contracts.capture import FeatureRequest
    from draftcore.contracts.target import TargetModel, TargetSpec
    from draftcore_domino.options import DominoOptions
    from draftcore_domino.served import ServedDomino

__all__ = [
    "build_disagg_draft_input",
    "build_draft",
    "collate",
    "describe",
    "drafter",
    "export_draft",
    "feature_request",
    "forward_loss",
    "import_draft",
    "read_export",
]


@hookimpl
def describe() -> Sequence[Offer]:
    # sglang runs Domino as DFLASH, by what the exported config says of its projector.
    capabilities = frozenset({"disagg", "layout:serving", "served:sglang", "sglang:DFLASH"})
    return [Offer("algorithm", "domino", capabilities, "draftcore_domino.options:DominoOptions")]


@hookimpl
def feature_request(target: TargetSpec, options: DominoOptions) -> FeatureRequest:
    from draftcore_dflash import config

    from draftcore.contracts.capture import FeatureRequest
    from draftcore_domino import serving

    dtype = str(target.dtype).removeprefix("torch.")
    if options.warm_start is not None:
        layers = serving.read_config(Path(options.warm_start), target, options).layers
    else:
        layers = config.captured_layers(options.layers, options.num_layers, target.num_layers)
    return FeatureRequest(layers, last_hidden=False, dtype=dtype)


@hookimpl
def build_draft(target: TargetSpec, data: DataSummary, options: DominoOptions) -> Draft:
    from draftcore_dflash import config as dflash

    from draftcore_domino import config, model, serving

    if options.warm_start is not None:
        return serving.load(Path(options.warm_start), target, options)
    shape = config.DominoConfig(
        **dflash.shape_from_target(target, options),
        gru_hidden_dim=options.gru_hidden_dim,
        emb_dim=options.emb_dim,
        shift_label=options.shift_label,
    )
    return model.build(target, shape, options)


@hookimpl
def drafter(draft: Draft, target: TargetModel, options: DominoOptions) -> Drafter:
    from draftcore_domino.drafter import DominoDrafter
    from draftcore_domino.model import DominoDraft

    assert isinstance(draft.module, DominoDraft)
    dtype = str(target.dtype).removeprefix("torch.")
    return DominoDrafter(draft.module, options.num_drafts, dtype)


@hookimpl
def export_draft(draft: Draft, folder: Path, layout: str) -> None:
    from draftcore_domino import serving

    serving.export(draft, folder, layout)


@hookimpl
def import_draft(folder: Path, target: TargetSpec, options: DominoOptions) -> Draft:
    from draftcore_domino import serving

    return serving.load(folder, target, options)


@hookimpl
def read_export(folder: Path, server: str) -> ServedDomino:
    require_tools(server)
    from draftcore_domino import served

    return served.read(folder, server)
