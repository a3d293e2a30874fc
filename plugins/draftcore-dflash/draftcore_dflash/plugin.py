"""The hooks of DFlash. What is slow to import is imported inside them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer
from draftcore.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from draftcore.contracts.algorithm import (
        DataSummary,
        Draft,
        DraftBatch,
        Drafter,
        Sample,
        StepContext,
        StepOutput,
    )
    from draftcore.contracts.capture import FeatureRequest
    from draftcore.contracts.serving import DraftInput
    from draftcore.contracts.target import TargetModel, TargetSpec
    from draftcore_dflash.options import BackboneOptions, DFlashOptions
    from draftcore_dflash.served import ServedBackbone


@hookimpl
def describe() -> Sequence[Offer]:
    capabilities = frozenset(
        {"disagg", "layout:serving", "served:sglang", "served:vllm", "sglang:DFLASH"}
    )
    return [Offer("algorithm", "dflash", capabilities, "draftcore_dflash.options:DFlashOptions")]


@hookimpl
def feature_request(target: TargetSpec, options: BackboneOptions) -> FeatureRequest:
    from draftcore.contracts.capture import FeatureRequest
    from draftcore_dflash import config, serving

    dtype = str(target.dtype).removeprefix("torch.")
    if options.warm_start is not None:
        layers = serving.read_config(Path(options.warm_start), target, options).layers
    else:
        layers = config.captured_layers(options.layers, options.num_layers, target.num_layers)
    return FeatureRequest(layers, last_hidden=False, dtype=dtype)


@hookimpl
def build_draft(target: TargetSpec, data: DataSummary, options: DFlashOptions) -> Draft:
    from draftcore_dflash import config, model, serving

    if options.warm_start is not None:
        return serving.load(Path(options.warm_start), target, options)
    shape = config.DraftConfig(**config.shape_from_target(target, options))
    return model.build(target, shape, options)


@hookimpl
def collate(samples: Sequence[Sample], options: BackboneOptions) -> DraftBatch:
    """Pad on the right; `loss_mask_BT` marks tokens that are to be learned."""
    from torch.nn.utils.rnn import pad_sequence

    from draftcore.contracts.algorithm import DraftBatch

    masks = [sample.loss_mask_T for sample in samples]
    return DraftBatch(
        ids=tuple(sample.id for sample in samples),
        token_ids_BT=pad_sequence([sample.token_ids_T for sample in samples], batch_first=True),
        loss_mask_BT=pad_sequence(masks, batch_first=True),
        attention_mask_BT=pad_sequence([mask.new_ones(len(mask)) for mask in masks], True),
        features={
            name: pad_sequence([sample.features[name] for sample in samples], batch_first=True)
            for name in samples[0].features
        },
    )


@hookimpl
def forward_loss(draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
    output: StepOutput = draft.module(batch, context)
    return output


@hookimpl
def build_disagg_draft_input(last_tokens: Tensor) -> DraftInput:
    """Start from the last token alone: the draft's states travel with the KV cache."""
    from draftcore.contracts.serving import nothing_to_go_on

    return nothing_to_go_on(last_tokens)


@hookimpl
def drafter(draft: Draft, target: TargetModel, options: BackboneOptions) -> Drafter:
    from draftcore_dflash.drafter import DFlashDrafter
    from draftcore_dflash.model import Backbone

    assert isinstance(draft.module, Backbone)
    dtype = str(target.dtype).removeprefix("torch.")
    return DFlashDrafter(draft.module, options.num_drafts, dtype)


@hookimpl
def export_draft(draft: Draft, folder: Path, layout: str) -> None:
    from draftcore_dflash import serving

    serving.export(draft, folder, layout)


@hookimpl
def import_draft(folder: Path, target: TargetSpec, options: DFlashOptions) -> Draft:
    from draftcore_dflash import serving

    return serving.load(folder, target, options)


@hookimpl
def read_export(folder: Path, server: str) -> ServedBackbone:
    require_tools(server)
    from draftcore_dflash import served

    return served.read(folder, server)


def require_tools(server: str) -> None:
    """Raise UsageError where draftcore-tools is missing, which readers of exports are built on."""
    if importlib.util.find_spec("draftcore_tools") is None:
        raise UsageError(
            f"reading an export as {server} does needs draftcore-tools, which is not installed\n"
            "  pip install draftcore-tools"
        )
