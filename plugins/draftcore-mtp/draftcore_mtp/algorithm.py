"""MTP fine-tuning as training, evaluation and servers call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftcore_eagle3.algorithm import Eagle3
from draftcore_nn import batches
from draftcore_nn.served import ServedDraft
from draftcore_nn.target import dtype_name
from torch.nn.functional import pad

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
from draftcore_mtp import config, served, serving
from draftcore_mtp.drafter import MtpDrafter
from draftcore_mtp.model import MtpDraft


class Mtp(Eagle3):
    """Trains the layer that a target brings, on its last states.

    Requests that were prefilled are taken over as EAGLE-3's are.
    """

    options: Any  # MtpOptions

    def feature_request(self, target: TargetSpec) -> FeatureRequest:
        config.from_target(target, self.options.init == "fresh" or bool(self.options.warm_start))
        return FeatureRequest((), last_hidden=True, dtype=dtype_name(target.dtype))

    def build_draft(self, target: TargetSpec, data: DataSummary) -> Draft:
        start = self.options.warm_start
        return serving.build(target, self.options, None if start is None else Path(start))

    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        """Pad on the right; `loss_mask_BT` marks the *rows* whose token t+2 is to be learned."""
        masks = (pad(s.loss_mask_T[2:], (0, min(2, len(s.loss_mask_T)))) for s in samples)
        pairs = zip(samples, masks, strict=True)
        return batches.collate([replace(s, loss_mask_T=mask_T) for s, mask_T in pairs])

    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        assert isinstance(draft.module, MtpDraft)
        return draft.module.loss(batch)

    def drafter(self, draft: Draft, target: TargetModel) -> Drafter:
        assert isinstance(draft.module, MtpDraft)
        return MtpDrafter(draft.module, self.options.num_drafts, dtype_name(target.dtype))

    def export_draft(self, draft: Draft, folder: Path, layout: str) -> None:
        serving.export(draft, folder, layout)

    def import_draft(self, folder: Path, target: TargetSpec) -> Draft:
        return serving.build(target, self.options, folder)

    def read_export(self, folder: Path, server: str) -> ServedDraft:
        return served.read(folder, server)
