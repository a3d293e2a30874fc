"""Collation: samples of several lengths as one batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftcore.contracts.algorithm import DraftBatch, Sample


def collate(samples: Sequence[Sample]) -> DraftBatch:
    """Pad on the right, with zeros; masks are false there."""
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


def host_mask(batch: DraftBatch) -> Tensor:
    """Return the loss mask [B, T] on the CPU; a batch that no trainer made may have to be waited for."""
    return batch.loss_mask_BT.cpu() if batch.host_mask_BT is None else batch.host_mask_BT
