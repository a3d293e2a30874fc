"""Capture in this process: the target reads batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.nn.utils.rnn import pad_sequence

from draftcore.contracts.capture import CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.target import TargetSpec


class TinyCapture:
    """Runs batches through the target, right-padded: no token sees what comes behind it."""

    def __init__(self, target: TargetSpec, request: FeatureRequest) -> None:
        target.require_layers(request)
        self.model, self.request = target.load_model(), request
        self.model.check()

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        for batch in batches:
            lengths = [len(ids) for ids in batch.token_ids]
            rows = [torch.as_tensor(ids) for ids in batch.token_ids]
            tokens_BT = pad_sequence(rows, batch_first=True).to(self.model.device)
            features = self.model.features(tokens_BT, torch.tensor(lengths), self.request)
            by_row = (
                {name: value_BTH[row, :length] for name, value_BTH in features.items()}
                for row, length in enumerate(lengths)
            )
            yield CapturedBatch(batch, tuple(by_row))

    def close(self) -> None:
        """Nothing to release: the model belongs to the target."""
