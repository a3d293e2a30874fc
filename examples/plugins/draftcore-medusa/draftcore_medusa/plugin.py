"""The hooks of Medusa. What is slow to import is imported inside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
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
    from draftcore.contracts.target import TargetModel, TargetSpec
    from draftcore_medusa.options import MedusaOptions


@hookimpl
def describe() -> Sequence[Offer]:
    capabilities = frozenset({"cross_entropy", "layout:serving", "parallel"})
    options, example = "draftcore_medusa.options:MedusaOptions", {"num_heads": 2, "num_layers": 2}
    return [Offer("algorithm", "medusa", capabilities, options, examples=[example])]


@hookimpl
def feature_request(target: TargetSpec, options: MedusaOptions) -> FeatureRequest:
    from draftcore_medusa.model import request

    return request(target.dtype)


@hookimpl
def build_draft(target: TargetSpec, data: DataSummary, options: MedusaOptions) -> Draft:
    from draftcore_medusa.model import DraftConfig, build

    sizes = int(target.text_config.hidden_size), target.vocab_size
    return build(target, DraftConfig(*sizes, options.num_heads, options.num_layers), options.decay)


@hookimpl
def collate(samples: Sequence[Sample], options: MedusaOptions) -> DraftBatch:
    """Pad on the right; `loss_mask_BT` marks the tokens that are to be predicted."""
    from draftcore_nn import batches

    return batches.collate(samples)


@hookimpl
def forward_loss(draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
    output: StepOutput = draft.module(batch)
    return output


@hookimpl
def drafter(draft: Draft, target: TargetModel, options: MedusaOptions) -> Drafter:
    from draftcore_medusa.drafter import MedusaDrafter
    from draftcore_medusa.model import MedusaDraft, request

    assert isinstance(draft.module, MedusaDraft)
    return MedusaDrafter(draft.module, request(target.dtype))


@hookimpl
def export_draft(draft: Draft, folder: Path, layout: str) -> None:
    from draftcore_medusa import serving

    serving.export(draft, folder, layout)


@hookimpl
def import_draft(folder: Path, target: TargetSpec, options: MedusaOptions) -> Draft:
    from draftcore_medusa import serving

    return serving.load(folder, target, options)
