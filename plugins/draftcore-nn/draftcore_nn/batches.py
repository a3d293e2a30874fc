"""Collation: samples of several lengths as one batch; what is known of it without a wait."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftcore.contracts.algorithm import DraftBatch, Sample, SampleId


@dataclass(frozen=True)
class PaddedBatch(DraftBatch):
    """A batch that knows the `lengths` of its rows, wherever its tensors lie."""

    lengths: tuple[int, ...] = ()


def collate(samples: Sequence[Sample]) -> DraftBatch:
    """Pad on the right, with zeros; masks are false there."""
    masks = [sample.loss_mask_T for sample in samples]
    return PaddedBatch(
        ids=tuple(sample.id for sample in samples),
        token_ids_BT=pad_sequence([sample.token_ids_T for sample in samples], batch_first=True),
        loss_mask_BT=pad_sequence(masks, batch_first=True),
        attention_mask_BT=pad_sequence([mask.new_ones(len(mask)) for mask in masks], True),
        features={
            name: pad_sequence([sample.features[name] for sample in samples], batch_first=True)
            for name in samples[0].features
        },
        lengths=tuple(map(len, masks)),
    )


def host_mask(batch: DraftBatch) -> Tensor:
    """Return the loss mask [B, T] on the CPU; a batch that no trainer made may have to be waited for."""
    return batch.loss_mask_BT.cpu() if batch.host_mask_BT is None else batch.host_mask_BT


def host_lengths(batch: DraftBatch) -> tuple[int, ...]:
    """Return how many tokens each row has; for a batch that `collate` did not make it may wait.

    Ask outside of what `train.compile` compiles, which would be compiled anew for others.
    """
    if isinstance(batch, PaddedBatch):
        return batch.lengths
    return tuple(batch.attention_mask_BT.sum(1).tolist())


def generator_of(sample: SampleId, seed: int) -> torch.Generator:
    """Return the generator of one use of a sample, on the CPU; `seed` is `StepContext.seed`.

    What it draws depends neither on the batch nor on what was drawn before, and is the same after a
    resume. A loss that draws several things draws them from one generator, in one order.
    """
    key = f"{seed}/{sample.feature_id}/{sample.epoch - 1}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
