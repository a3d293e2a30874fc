"""The hooks of EAGLE-3. What is slow to import is imported inside them."""

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
    from draftcore.contracts.serving import DisaggBatch, DraftInput, DraftShape, RowField
    from draftcore.contracts.target import TargetModel, TargetSpec
    from draftcore_eagle3.options import Eagle3Options
    from draftcore_eagle3.served import ServedEagle3


@hookimpl
def describe() -> Sequence[Offer]:
    # Not `split_dependent`: the default loss is a ratio of sums; only the LK losses are not.
    capabilities = frozenset(
        {"compile", "disagg", "layout:serving", "served:sglang", "served:vllm", "sglang:EAGLE3"}
    )
    options = "draftcore_eagle3.options:Eagle3Options"
    return [Offer("algorithm", "eagle3", capabilities, options)]


@hookimpl
def feature_request(target: TargetSpec, options: Eagle3Options) -> FeatureRequest:
    from draftcore.contracts.capture import FeatureRequest
    from draftcore_eagle3 import config, serving

    if options.warm_start is not None:
        shape = serving.read_config(Path(options.warm_start), target, options)
    else:
        shape = config.from_target(target, options)
    dtype = str(target.dtype).removeprefix("torch.")
    return FeatureRequest(shape.layers, last_hidden=True, dtype=dtype)


@hookimpl
def build_draft(target: TargetSpec, data: DataSummary, options: Eagle3Options) -> Draft:
    from draftcore_eagle3 import config, model, serving, vocabulary

    if options.warm_start is not None:
        return serving.load(Path(options.warm_start), target, options)
    shape, ids_U = config.from_target(target, options), None
    if not shape.full_vocabulary:
        sizes = (shape.draft_vocab_size, shape.vocab_size)
        ids_U = vocabulary.select_tokens(data.token_counts, *sizes)
    return model.build(target, shape, options, ids_U)


@hookimpl
def collate(samples: Sequence[Sample], options: Eagle3Options) -> DraftBatch:
    """Pad on the right; `loss_mask_BT` marks the *rows* that are supervised, not the tokens.

    Row t predicts token t+2 from token t+1. The published weight of row t is the mask of token t
    (`supervise: reference`), without the last row, whose next token does not exist.
    """
    import torch

    from draftcore.contracts.algorithm import DraftBatch

    def rows(mask_T: Tensor) -> Tensor:
        if options.supervise == "predicted":
            return torch.cat([mask_T[2:], mask_T.new_zeros(min(2, len(mask_T)))])
        return torch.cat([mask_T[:-1], mask_T.new_zeros(1)])

    def pad(parts: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)

    return DraftBatch(
        ids=tuple(sample.id for sample in samples),
        token_ids_BT=pad([sample.token_ids_T for sample in samples]),
        loss_mask_BT=pad([rows(sample.loss_mask_T) for sample in samples]),
        attention_mask_BT=pad([torch.ones_like(sample.loss_mask_T) for sample in samples]),
        features={name: pad([s.features[name] for s in samples]) for name in samples[0].features},
    )


@hookimpl
def forward_loss(draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
    output: StepOutput = draft.module(batch, context)
    return output


@hookimpl
def disagg_row(shape: DraftShape) -> Sequence[RowField]:
    """Send the draft's own state, not the target's features, and its proposals in its own ids."""
    from draftcore.contracts.serving import hidden_field, topk_fields

    return (hidden_field(shape), *topk_fields(shape))


@hookimpl
def build_disagg_draft_input(batch: DisaggBatch, last_tokens: Tensor) -> DraftInput:
    from draftcore.contracts.serving import DraftInput

    return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)


@hookimpl
def drafter(draft: Draft, target: TargetModel, options: Eagle3Options) -> Drafter:
    from draftcore_eagle3.drafter import Eagle3Drafter
    from draftcore_eagle3.model import Eagle3Draft

    assert isinstance(draft.module, Eagle3Draft)
    dtype = str(target.dtype).removeprefix("torch.")
    return Eagle3Drafter(draft.module, options.num_drafts, dtype)


@hookimpl
def export_draft(draft: Draft, folder: Path, layout: str) -> None:
    from draftcore_eagle3 import serving

    serving.export(draft, folder, layout)


@hookimpl
def import_draft(folder: Path, target: TargetSpec, options: Eagle3Options) -> Draft:
    from draftcore_eagle3 import serving

    return serving.load(folder, target, options)


@hookimpl
def read_export(folder: Path, server: str) -> ServedEagle3:
    if importlib.util.find_spec("draftcore_tools") is None:
        raise UsageError(
            f"reading an export as {server} does needs draftcore-tools, which is not installed\n"
            "  pip install draftcore-tools"
        )
    from draftcore_eagle3 import served

    return served.read(folder, server)
