"""Capture in this process: the target runs through transformers, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftcore.contracts.capture import CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore_hf.target import TransformersTarget


class LocalCapture:
    """Runs batches through the target, right-padded, without a cache; rows with images one by one."""

    def __init__(self, target: TargetSpec, request: FeatureRequest) -> None:
        if not isinstance(target, TransformersTarget):
            raise UsageError(
                f"the capture 'hf' runs targets by transformers, and {target.path!r} is none\n"
                "  set capture.name to that of the target's own plugin"
            )
        target.require_layers(request)
        self.model, self.request = target.load_model(), request
        self.images = target.images
        self.runner = target.prefill_with(target.load_model())
        self.model.check()

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        """Yield features of the request's dtype on the target's device, which is not waited for.

        Raises BadRows for rows with images that cannot be read.
        """
        device = self.model.device
        for batch in batches:
            by_row: dict[int, dict[str, Tensor]] = {}
            for at, inputs in batch.image_inputs(self.images).items():
                features = self.model.forward_images(inputs, self.request)
                by_row[at] = {name: value_1TH[0] for name, value_1TH in features.items()}
            text = [at for at in range(len(batch.rows)) if at not in by_row]
            if text:
                rows = [torch.as_tensor(batch.token_ids[at]).long() for at in text]
                lengths = [len(row_T) for row_T in rows]
                tokens_BT = pad_sequence(rows, batch_first=True).to(device)
                lengths_B = torch.tensor(lengths, device=device)
                features = self.runner.features(tokens_BT, lengths_B, self.request)
                for row, (at, length) in enumerate(zip(text, lengths, strict=True)):
                    by_row[at] = {
                        name: value_BTH[row, :length] for name, value_BTH in features.items()
                    }
            yield CapturedBatch(batch, tuple(by_row[at] for at in range(len(batch.rows))))

    def close(self) -> None:
        """Nothing to release: the model belongs to the target's description."""
