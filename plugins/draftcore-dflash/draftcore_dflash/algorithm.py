"""DFlash as training, evaluation and servers call it; Domino derives from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore_nn import batches
from draftcore_nn.serving import require_tools
from draftcore_nn.target import dtype_name
from torch import Tensor

from draftcore.contracts.algorithm import (
    Algorithm,
    DataSummary,
    Draft,
    DraftBatch,
    Drafter,
    Sample,
    StepContext,
    StepOutput,
)
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.serving import DraftInput, nothing_to_go_on
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore_dflash import config, model, serving
from draftcore_dflash.drafter import DFlashDrafter

if TYPE_CHECKING:
    from draftcore_dflash.served import ServedBackbone


class DFlash(Algorithm):
    """Trains a draft that fills a block of masked tokens in one pass, on states of the target."""

    options: Any  # DFlashOptions, or those of an algorithm that derives from this one
    serving: Any = serving  # the module that exports and loads

    def feature_request(self, target: TargetSpec) -> FeatureRequest:
        options = self.options
        if options.warm_start is not None:
            folder = Path(options.warm_start)
            layers = self.serving.read_config(folder, target, options).layers
        else:
            layers = config.captured_layers(options.layers, options.num_layers, target.num_layers)
        return FeatureRequest(layers, last_hidden=False, dtype=dtype_name(target.dtype))

    def build_draft(self, target: TargetSpec, data: DataSummary) -> Draft:
        if self.options.warm_start is not None:
            return self.import_draft(Path(self.options.warm_start), target)
        shape = config.DraftConfig(**config.shape_from_target(target, self.options))
        return model.build(target, shape, self.options)

    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        """Pad on the right; `loss_mask_BT` marks tokens that are to be learned."""
        return batches.collate(samples)

    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        output: StepOutput = draft.module(batch, context)
        return output

    def build_disagg_draft_input(self, last_tokens: Tensor) -> DraftInput:
        """Start from the last token alone: the draft's states travel with the KV cache."""
        return nothing_to_go_on(last_tokens)

    def drafter(self, draft: Draft, target: TargetModel) -> Drafter:
        assert isinstance(draft.module, model.Backbone)
        return DFlashDrafter(draft.module, self.options.num_drafts, dtype_name(target.dtype))

    def export_draft(self, draft: Draft, folder: Path, layout: str) -> None:
        self.serving.export(draft, folder, layout)

    def import_draft(self, folder: Path, target: TargetSpec) -> Draft:
        found: Draft = self.serving.load(folder, target, self.options)
        return found

    def read_export(self, folder: Path, server: str) -> ServedBackbone:
        require_tools(server)
        from draftcore_dflash import served

        return served.read(folder, server)
