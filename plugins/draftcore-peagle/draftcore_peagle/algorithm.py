"""P-EAGLE: EAGLE-3's network, features and rows, trained to draft all tokens of a round at once."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.config import DraftConfig, backbone
from draftcore_nn.target import mask_token
from torch import Tensor

from draftcore.contracts.algorithm import (
    Draft,
    DraftBatch,
    StepContext,
    StepOutput,
    TrainingDefaults,
)
from draftcore.contracts.target import TargetSpec
from draftcore_peagle import served, serving
from draftcore_peagle.config import PEagleConfig
from draftcore_peagle.drafter import PEagleDrafter
from draftcore_peagle.model import PEagleDraft
from draftcore_peagle.options import PEagleOptions

logger = logging.getLogger(__name__)


class PEagle(Eagle3):
    """Asks for features, collates and reads drafts as EAGLE-3 does; its draft is another."""

    options: PEagleOptions
    module = PEagleDraft
    decoder = PEagleDrafter
    serving = serving
    served = served

    def shape(self, target: TargetSpec) -> PEagleConfig:
        mask = mask_token(target, self.options.mask_token_id)
        return PEagleConfig(**backbone(target, self.options), mask_token_id=mask)

    def fresh(self, target: TargetSpec, shape: DraftConfig, ids_U: Tensor | None) -> Draft:
        """Build a draft as EAGLE-3's is, with the target's embedding to begin with.

        A head that is not trained is the target's, and in no checkpoint.
        """
        draft = super().fresh(target, shape, ids_U)
        assert isinstance(draft.module, PEagleDraft)
        return replace(
            draft,
            defaults=TrainingDefaults(lr=1e-4, warmup_ratio=0.0025, clip=1.0),
            frozen=frozenset(
                {"target_head", *([] if self.options.train_head else ["lm_head.weight"])}
            ),
            wrap_units=("midlayer", *(f"layers.{i}" for i in draft.module.layers)),
        )

    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        assert isinstance(draft.module, PEagleDraft)
        return draft.module.loss(batch, context)

    def export_draft(self, draft: Draft, folder: Path, layout: str) -> None:
        super().export_draft(draft, folder, layout)
        logger.warning(
            "vLLM alone serves this draft; sglang does not draft in parallel, and would serve it badly"
        )
