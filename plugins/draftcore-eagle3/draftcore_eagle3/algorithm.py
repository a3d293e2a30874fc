"""EAGLE-3 as training, evaluation and servers call it; P-EAGLE derives from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from draftcore_nn import batches, vocabulary
from draftcore_nn import serving as files
from draftcore_nn.served import ServedDraft
from draftcore_nn.target import dtype_name
from torch import Tensor
from torch.nn.functional import pad

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
from draftcore.contracts.serving import DisaggBatch, DraftInput, RowPart
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore_eagle3 import config, model, served, serving
from draftcore_eagle3.drafter import Eagle3Drafter


class Eagle3(Algorithm):
    """Trains a small draft on three of the target's layers, unrolled over its own states.

    An algorithm with this network derives from it and names its own parts.
    """

    options: Any  # Eagle3Options, or those of an algorithm that derives from this one
    module: type[model.Backbone] = model.Eagle3Draft
    decoder: type[Eagle3Drafter] = Eagle3Drafter
    # Modules: one with `read_config`, `fill`, `serving_config` and `serving_tensors`, one with `read`.
    serving: Any = serving
    served: Any = served

    def shape(self, target: TargetSpec) -> config.DraftConfig:
        """Return a fresh draft's shape."""
        return config.from_target(target, self.options)

    def feature_request(self, target: TargetSpec) -> FeatureRequest:
        if self.options.warm_start is not None:
            folder = Path(self.options.warm_start)
            shape = self.serving.read_config(folder, target, self.options)
        else:
            # What more a shape has may need the target's weights.
            shape = config.DraftConfig(**config.backbone(target, self.options))
        return FeatureRequest(shape.layers, last_hidden=True, dtype=dtype_name(target.dtype))

    def build_draft(self, target: TargetSpec, data: DataSummary) -> Draft:
        if self.options.warm_start is not None:
            return self.import_draft(Path(self.options.warm_start), target)
        shape, ids_U = self.shape(target), None
        if not shape.full_vocabulary:
            sizes = (shape.draft_vocab_size, shape.vocab_size)
            ids_U = vocabulary.select_tokens(data.token_counts, *sizes)
        return self.fresh(target, shape, ids_U)

    def fresh(self, target: TargetSpec, shape: config.DraftConfig, ids_U: Tensor | None) -> Draft:
        """Build a draft of this shape with fresh weights."""
        return model.build(target, shape, self.options, ids_U, self.module)

    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        """Pad on the right; `loss_mask_BT` marks the *rows* that are supervised, not the tokens.

        Row t predicts token t+2 from token t+1. The published weight of row t is the mask of token t
        (`supervise: reference`), without the last row, whose next token does not exist.
        """

        def rows(mask_T: Tensor) -> Tensor:
            if self.options.supervise == "predicted":
                return pad(mask_T[2:], (0, min(2, len(mask_T))))
            return pad(mask_T[:-1], (0, 1))

        return batches.collate([replace(s, loss_mask_T=rows(s.loss_mask_T)) for s in samples])

    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        assert isinstance(draft.module, model.Eagle3Draft)
        return draft.module.loss(batch)

    def eval_metrics(self, report: Mapping[str, Any]) -> dict[str, float]:
        """Add what a round of decoding would yield by the held-out accuracies: 1 + a0 + a0*a1 + ..."""
        names = (f"accuracy_{k}" for k in range(len(report)))
        accuracies = (report[name] for name in names if name in report)
        length = 1 + sum(accumulate(accuracies, mul))
        return {"simulated_acceptance_length": length} if length > 1 else {}

    def disagg_row(self) -> Sequence[RowPart]:
        """Send the draft's own state, not the target's features, and its proposals in its own ids."""
        return ("hidden", "topk")

    def build_disagg_draft_input(self, batch: DisaggBatch, last_tokens: Tensor) -> DraftInput:
        return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)

    def drafter(self, draft: Draft, target: TargetModel) -> Drafter:
        assert isinstance(draft.module, model.Backbone)
        return self.decoder(draft.module, self.options.num_drafts, dtype_name(target.dtype))

    def export_draft(self, draft: Draft, folder: Path, layout: str) -> None:
        config = self.serving.serving_config(draft.module)
        files.write_export(folder, layout, config, self.serving.serving_tensors(draft.module))

    def import_draft(self, folder: Path, target: TargetSpec) -> Draft:
        shape = self.serving.read_config(folder, target, self.options)
        ids_U, tensors = serving.read_tensors(folder, shape)
        draft = self.fresh(target, shape, ids_U)
        self.serving.fill(draft.module, tensors, folder)
        return draft

    def read_export(self, folder: Path, server: str) -> ServedDraft:
        found: ServedDraft = self.served.read(folder, server)
        return found
