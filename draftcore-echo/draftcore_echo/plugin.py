"""The hooks of echo.

What is heavy is imported inside them, so that `draftcore list-plugins` stays quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.offers import Offer

if TYPE_CHECKING:
    from draftcore.records import (
        DataSummary,
        Draft,
        DraftBatch,
        Drafter,
        FeatureRequest,
        Sample,
        StepContext,
        StepOutput,
    )
    from draftcore.target import TargetModel, TargetSpec

    from draftcore_echo.options import ChainOptions


@hookimpl
def describe() -> Sequence[Offer]:
    # A capability is a promise that the conformance suite holds you to; further ones are `compile`
    # (the loss compiles as one graph) and `disagg` (with the hook build_disagg_draft_input).
    capabilities = frozenset({"layout:serving"})
    options = "draftcore_echo.options:ChainOptions"
    return [Offer("algorithm", "echo", capabilities, options)]


@hookimpl
def feature_request(target: TargetSpec, options: ChainOptions) -> FeatureRequest:
    """Ask for the state after the final norm only; `layers` would add the outputs of layers."""
    from draftcore.records import FeatureRequest

    dtype = str(target.dtype).removeprefix("torch.")
    return FeatureRequest(layers=(), last_hidden=True, dtype=dtype)


@hookimpl
def build_draft(target: TargetSpec, data: DataSummary, options: ChainOptions) -> Draft:
    from draftcore_echo import model

    inner_size = options.inner_size or 2 * int(target.text_config.hidden_size)
    return model.build(target, inner_size, options)


@hookimpl
def collate(samples: Sequence[Sample], options: ChainOptions) -> DraftBatch:
    """Pad on the right; what is padded counts nowhere."""
    from draftcore.records import DraftBatch
    from torch.nn.utils.rnn import pad_sequence

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
    output: StepOutput = draft.module(batch)
    return output


@hookimpl
def drafter(draft: Draft, target: TargetModel, options: ChainOptions) -> Drafter:
    from draftcore_echo.drafter import ChainDrafter
    from draftcore_echo.model import ChainDraft

    assert isinstance(draft.module, ChainDraft)
    dtype = str(target.dtype).removeprefix("torch.")
    return ChainDrafter(draft.module, options.num_drafts or options.steps, dtype)


@hookimpl
def export_draft(draft: Draft, folder: Path, layout: str) -> None:
    from draftcore_echo import model

    model.save(draft, folder, layout)


@hookimpl
def import_draft(folder: Path, target: TargetSpec, options: ChainOptions) -> Draft:
    from draftcore_echo import model

    return model.load(folder, target, options)
