"""Capture in this process: the target runs through transformers, group by group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from draftcore.contracts.capture import CapturedGroup, CaptureInput, FeatureRequest
from draftcore.contracts.target import TargetSpec


class LocalCapture:
    """Runs capture groups through the target, right-padded, without a cache."""

    def __init__(self, target: TargetSpec, request: FeatureRequest) -> None:
        target.require_layers(request)
        self.model, self.request = target.model, request
        self.runner = target.prefill_with(target.model)
        self.checked = False

    def features(self, groups: Iterable[CaptureInput]) -> Iterator[CapturedGroup]:
        """Yield features of the request's dtype on the target's device, which is not waited for.

        Before the first group, checks that last hidden x head is the model's own prediction.
        """
        for group in groups:
            if not self.checked:
                self.model.check(self.request, list(group.token_ids[0])[:32])
                self.checked = True
            yield CapturedGroup(group.group, self._rows(group))

    def _rows(self, group: CaptureInput) -> tuple[dict[str, Tensor], ...]:
        lengths = [len(tokens) for tokens in group.token_ids]
        tokens_BT = torch.zeros(len(lengths), group.group.padded_length, dtype=torch.long)
        for row, tokens in enumerate(group.token_ids):
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
