"""DFlash as training, evaluation and servers call it; Domino derives from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftcore_nn import batches
from draftcore_nn import serving as files
from draftcore_nn.layers import init_linears
from draftcore_nn.served import ServedDraft
from draftcore_nn.target import dtype_name, shape_of_target, target_tensors
from torch import Tensor, nn

from draftcore.contracts.algorithm import (
    Algorithm,
    DataSummary,
    Draft,
    DraftBatch,
    Drafter,
    Sample,
    StepContext,
    StepOutput,
    TrainingDefaults,
)
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.serving import DraftInput
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore_dflash import served, serving
from draftcore_dflash.config import DraftConfig, captured_layers
from draftcore_dflash.drafter import DFlashDrafter
from draftcore_dflash.model import Backbone, DFlashDraft


class DFlash(Algorithm):
    """Trains a draft that fills a block of masked tokens in one pass, on states of the target.

    An algorithm with this backbone derives from it and names its own parts.
    """

    options: Any  # DFlashOptions, or those of an algorithm that derives from this one
    shape: type[DraftConfig] = DraftConfig
    module: type[Backbone] = DFlashDraft
    decoder: type[DFlashDrafter] = DFlashDrafter
    serving: Any = serving  # a module with `serving_config` and `read_config`
    served: Any = served  # a module with `read`

    def feature_request(self, target: TargetSpec) -> FeatureRequest:
        options = self.options
        if options.warm_start is not None:
            folder = Path(options.warm_start)
            layers = self.serving.read_config(folder, target, options).layers
        else:
            shape_of_target(target, options)  # refuses what it must before anything is captured
            layers = captured_layers(options.layers, options.num_layers, target.num_layers)
        return FeatureRequest(layers, options.distils, dtype_name(target.dtype))

    def build_draft(self, target: TargetSpec, data: DataSummary) -> Draft:
        if self.options.warm_start is not None:
            return self.import_draft(Path(self.options.warm_start), target)
        return self.fresh(target, self.shape.of(target, self.options))

    def fresh(self, target: TargetSpec, config: DraftConfig) -> Draft:
        """Build a draft of this shape with fresh weights, N(0, 0.02) in linear layers, norms 1.

        Servers do not scale `W h` as the target does, so the last norm starts at its scale.
        """
        module = self.module(config, self.options, *target_tensors(target))
        init_linears(module)
        nn.init.constant_(module.norm.weight, target.logit_scale)
        module.target_logits = (target.logit_scale, target.logit_softcap)
        return Draft(
            module=module,
            config=asdict(config),
            defaults=TrainingDefaults(lr=6e-4, warmup_ratio=0.04, clip=1.0),
            parameter_groups=[{"params": list(module.parameters())}],
            frozen=Backbone.FROZEN,
            wrap_units=tuple(f"layers.{i}" for i in range(len(module.layers))),
            about=config.text(len(module.layers)),
        )

    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        """Pad on the right; `loss_mask_BT` marks tokens that are to be learned."""
        return batches.collate(samples)

    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        output: StepOutput = draft.module.loss(batch, context)  # type: ignore[operator]
        return output

    def build_disagg_draft_input(self, last_tokens: Tensor) -> DraftInput:
        """Start from the last token alone: the draft's states travel with the KV cache."""
        none = last_tokens.new_zeros(len(last_tokens), 0)
        return DraftInput(none.float(), none.float(), none.long(), last_tokens)

    def drafter(self, draft: Draft, target: TargetModel) -> Drafter:
        assert isinstance(draft.module, Backbone)
        return self.decoder(draft.module, self.options.num_drafts, dtype_name(target.dtype))

    def export_draft(self, draft: Draft, folder: Path, layout: str) -> None:
        config = self.serving.serving_config(draft.module)
        files.write_export(folder, layout, config, dict(draft.module.named_parameters()))

    def import_draft(self, folder: Path, target: TargetSpec) -> Draft:
        draft = self.fresh(target, self.serving.read_config(folder, target, self.options))
        files.fill(draft.module, files.read_tensors(folder, serving.RENAMED), folder)
        return draft

    def read_export(self, folder: Path, server: str) -> ServedDraft:
        served: ServedDraft = self.served.read(folder, server)
        return served
