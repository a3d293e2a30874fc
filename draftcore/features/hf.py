"""Capture in this process: the target runs through transformers, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftcore.contracts.capture import BadRows, CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.data.conversations import RowError


class LocalCapture:
    """Runs batches through the target, right-padded, without a cache; rows with images one by one."""

    def __init__(self, target: TargetSpec, request: FeatureRequest) -> None:
        target.require_layers(request)
        self.model, self.request = target.model, request
        self.images = target.images
        self.runner = target.prefill_with(target.model)
        self.model.check()

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        """Yield features of the request's dtype on the target's device, which is not waited for."""
        device = self.model.device
        for batch in batches:
            found = self._seen(batch) if batch.images else {}
            text = [at for at in range(len(batch.rows)) if at not in found]
            if text:
                rows = [torch.as_tensor(batch.token_ids[at]).long() for at in text]
                lengths = [len(row_T) for row_T in rows]
                tokens_BT = pad_sequence(rows, batch_first=True).to(device)
                lengths_B = torch.tensor(lengths, device=device)
                taken = self.runner.features(tokens_BT, lengths_B, self.request)
                for row, (at, length) in enumerate(zip(text, lengths, strict=True)):
                    found[at] = {name: value_BTH[row, :length] for name, value_BTH in taken.items()}
            yield CapturedBatch(batch, tuple(found[at] for at in range(len(batch.rows))))

    def _seen(self, batch: CaptureBatch) -> dict[int, dict[str, Tensor]]:
        """Run the rows with images through the whole model, one by one; raises BadRows."""
        assert self.images is not None  # or the row would have none
        found: dict[int, dict[str, Tensor]] = {}
        bad: dict[int, str] = {}
        for at, images in enumerate(batch.images):
            if not images:
                continue
            try:
                inputs = self.images.inputs(batch.token_ids[at], images)
            except RowError as error:
                bad[at] = f"dataset row {batch.rows[at]}: {error}"
                continue
            taken = self.model.see(inputs, self.request)
            found[at] = {name: value_1TH[0] for name, value_1TH in taken.items()}
        if bad:
            raise BadRows(bad)
        return found

    def close(self) -> None:
        """Nothing to release: the model belongs to the target's description."""
