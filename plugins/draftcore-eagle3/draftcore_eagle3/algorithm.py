"""EAGLE-3 as training, evaluation and servers call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from draftcore_nn import batches, vocabulary
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
from draftcore_eagle3.options import Eagle3Options


class Eagle3(Algorithm):
    """Trains a one-layer draft on three of the target's layers, unrolled over its own states."""

    options: Eagle3Options

    def feature_request(self, target: TargetSpec) -> FeatureRequest:
        if self.options.warm_start is not None:
            shape = serving.read_config(Path(self.options.warm_start), target, self.options)
        else:
            shape = config.from_target(target, self.options)
        return FeatureRequest(shape.layers, last_hidden=True, dtype=dtype_name(target.dtype))

    def build_draft(self, target: TargetSpec, data: DataSummary) -> Draft:
        if self.options.warm_start is not None:
            return self.import_draft(Path(self.options.warm_start), target)
        shape, ids_U = config.from_target(target, self.options), None
        if not shape.full_vocabulary:
            sizes = (shape.draft_vocab_size, shape.vocab_size)
            ids_U = vocabulary.select_tokens(data.token_counts, *sizes)
        return model.build(target, shape, self.options, ids_U)

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
        accuracies = (report.get(f"accuracy_{k}", 0.0) for k in range(len(report)))
        length = 1 + sum(accumulate(accuracies, mul))
        return {"simulated_acceptance_length": length} if length > 1 else {}

    def disagg_row(self) -> Sequence[RowPart]:
        """Send the draft's own state, not the target's features, and its proposals in its own ids."""
        return ("hidden", "topk")

    def build_disagg_draft_input(self, batch: DisaggBatch, last_tokens: Tensor) -> DraftInput:
        return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)

    def drafter(self, draft: Draft, target: TargetModel) -> Drafter:
        assert isinstance(draft.module, model.Eagle3Draft)
        return Eagle3Drafter(draft.module, self.options.num_drafts, dtype_name(target.dtype))

    def export_draft(self, draft: Draft, folder: Path, layout: str) -> None:
        serving.export(draft, folder, layout)

    def import_draft(self, folder: Path, target: TargetSpec) -> Draft:
        return serving.load(folder, target, self.options)

    def read_export(self, folder: Path, server: str) -> ServedDraft:
        return served.read(folder, server)
