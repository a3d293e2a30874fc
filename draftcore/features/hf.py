"""Capture in this process: the target runs through transformers, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from draftcore.contracts.capture import BadRows, CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.data.conversations import RowError
from draftcore.data.images import ImageProcessor


class LocalCapture:
    """Runs batches through the target, right-padded, without a cache; rows with images one by one."""

    def __init__(self, target: TargetSpec, request: FeatureRequest) -> None:
        target.require_layers(request)
        self.model, self.request = target.model, request
        self.processor = ImageProcessor(target.path, target.source)
        self.runner = target.prefill_with(target.model)
        self.model.check()

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        """Yield features of the request's dtype on the target's device, which is not waited for."""
        for batch in batches:
            yield CapturedBatch(batch, self._rows(batch))

    def _rows(self, batch: CaptureBatch) -> tuple[dict[str, Tensor], ...]:
        found: dict[int, dict[str, Tensor]] = {}
        bad: dict[int, str] = {}
        for at, images in enumerate(batch.images):
            if not images:
                continue
            try:
                inputs = self.processor.inputs(batch.token_ids[at], images)
            except RowError as error:
                bad[at] = f"dataset row {batch.rows[at]}: {error}"
                continue
            taken = self.model.see(inputs, self.request)
            found[at] = {name: value_1TH[0] for name, value_1TH in taken.items()}
        if bad:
            raise BadRows(bad)
        text = [at for at in range(len(batch.rows)) if at not in found]
        if text:
            found |= zip(text, self._text([batch.token_ids[at] for at in text]), strict=True)
        return tuple(found[at] for at in range(len(batch.rows)))

    def _text(self, rows: Sequence[Sequence[int]]) -> Iterator[dict[str, Tensor]]:
        lengths = [len(tokens) for tokens in rows]
        tokens_BT = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, tokens in enumerate(rows):
            tokens_BT[row, : lengths[row]] = torch.as_tensor(tokens)
        device = self.model.device
        lengths_B = torch.tensor(lengths, device=device)
        taken = self.runner.features(tokens_BT.to(device), lengths_B, self.request)
        for row, length in enumerate(lengths):
            yield {name: value_BTH[row, :length] for name, value_BTH in taken.items()}

    def close(self) -> None:
        """Nothing to release: the model belongs to the target's description."""
