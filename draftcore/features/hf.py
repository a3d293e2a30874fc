"""Capture in this process: the target runs through transformers, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from draftcore.contracts.capture import CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.target import TargetSpec


class LocalCapture:
    """Runs batches through the target, right-padded, without a cache."""

    def __init__(self, target: TargetSpec, request: FeatureRequest) -> None:
        target.require_layers(request)
        self.model, self.request = target.model, request
        self.runner = target.prefill_with(target.model)
        self.model.check()

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        """Yield features of the request's dtype on the target's device, which is not waited for."""
        for batch in batches:
            yield CapturedBatch(batch, self._rows(batch))

    def _rows(self, batch: CaptureBatch) -> tuple[dict[str, Tensor], ...]:
        lengths = [len(tokens) for tokens in batch.token_ids]
        tokens_BT = torch.zeros(len(lengths), batch.padded_length, dtype=torch.long)
        for row, tokens in enumerate(batch.token_ids):
            tokens_BT[row, : lengths[row]] = torch.as_tensor(tokens)
        device = self.model.device
        lengths_B = torch.tensor(lengths, device=device)
        taken = self.runner.features(tokens_BT.to(device), lengths_B, self.request)
        return tuple(
            {name: value_BTH[row, :length] for name, value_BTH in taken.items()}
            for row, length in enumerate(lengths)
        )

    def close(self) -> None:
        """Nothing to release: the model belongs to the target's description."""
