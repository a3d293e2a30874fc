"""Algorithm `usecount`: its one weight counts how often each sample was trained on.

A sample's scalar has the gradient -16 / batch in the steps that use it. With betas (0, 0), no
clipping and a constant rate of 1, AdamW moves it by lr * g / |g|: by exactly 1, whatever the
denominator, and everything else by 0. So the trained tensor is the number of uses, sample for
sample, and lies where every draft's weights lie: sharded over ranks, saved and rolled back with
the checkpoint. The row is read from the tokens that came with the features, so features that are
taken for another sample's show as well. The reported loss depends on every feature and weight to
the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore import hookimpl
from draftcore.contracts import algorithm
from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, StepContext, StepOutput
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.offers import Offer
from draftcore.contracts.target import TargetSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROWS = 512  # more than any run here has: the table does not depend on the data


def use_counts(tokenizer: Any) -> torch.nn.Module:
    """Return the module; made here, as the launcher loads this file too and has no use for torch."""
    import torch

    class UseCounts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.uses = torch.nn.Parameter(torch.zeros(ROWS))

        def rows(self, batch: DraftBatch) -> Tensor:
            """The number in `q17?`, with which every conversation of these runs begins."""
            texts = map(tokenizer.decode, batch.token_ids_BT)
            return torch.tensor([int(re.findall(r"q(\d+)\?", text)[0]) for text in texts])

        def forward(self, batch: DraftBatch, context: StepContext) -> StepOutput:
            counted_B = batch.loss_mask_BT.any(1).to(torch.float32)
            uses_B = self.uses[self.rows(batch)]
            features_B: Any = sum(value.double().sum((1, 2)) for value in batch.features.values())
            shown = (features_B * counted_B).sum().float()
            denominator = counted_B.sum()
            return StepOutput(shown - 16 * (uses_B * counted_B).sum(), denominator, {})

    return UseCounts()


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("algorithm", "usecount", frozenset({"layout:serving"}))]


@hookimpl
def feature_request(target: TargetSpec) -> FeatureRequest:
    return FeatureRequest((1, target.num_layers - 2), last_hidden=True, dtype="float32")


@hookimpl
def build_draft(target: TargetSpec) -> Draft:
    module = use_counts(target.load_tokenizer())
    defaults = algorithm.TrainingDefaults(lr=1.0, warmup_ratio=0.0, clip=1e12)
    return Draft(module, {}, defaults, [{"params": list(module.parameters())}])


@hookimpl
def collate(samples: Sequence[Sample]) -> DraftBatch:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def padded(parts: Iterable[Tensor]) -> Tensor:
        return pad_sequence(list(parts), batch_first=True)

    return DraftBatch(
        ids=tuple(s.id for s in samples),
        token_ids_BT=padded(s.token_ids_T for s in samples),
        loss_mask_BT=padded(s.loss_mask_T for s in samples),
        attention_mask_BT=padded(torch.ones_like(s.loss_mask_T) for s in samples),
        features={n: padded(s.features[n] for s in samples) for n in samples[0].features},
    )


@hookimpl
def export_draft(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


@hookimpl
def forward_loss(draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
    output: StepOutput = draft.module(batch, context)
    return output
