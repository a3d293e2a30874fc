"""Rows as the manifest of a complete capture describes them, and batches of any rows."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.algorithm import DataSummary
from draftcore.contracts.capture import CaptureBatch, Image
from draftcore.contracts.run import Samples
from draftcore.errors import DraftcoreError


class StoredSamples:
    """The rows of a run that has no data: the manifest of a complete capture describes them."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.feature_ids: tuple[str, ...] = tuple(manifest["feature_ids"])
        self.lengths: NDArray[np.int64] = np.array(manifest["lengths"], dtype=np.int64)
        self.summary = DataSummary.from_json(manifest["summary"])

    def tokens(self, row: int) -> NDArray[np.int64]:
        problem = f"sample {self.feature_ids[row]} is missing from the store, which was complete"
        remedy = "its files were changed: copy the store again, or set data.train to recapture"
        raise DraftcoreError(f"{problem}\n  {remedy}")

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return self.tokens(row).astype(np.bool_)

    def images(self, row: int) -> tuple[Image, ...]:
        return ()


def batch_of(
    index: int, rows: Sequence[int], samples: Samples, skipped: Container[int] = ()
) -> CaptureBatch:
    """Return the batch of this number in the cut, of these rows but for skipped ones."""
    rows = tuple(row for row in rows if row not in skipped)
    token_ids = tuple(samples.tokens(row).tolist() for row in rows)
    images = tuple(samples.images(row) for row in rows)
    ids = tuple(samples.feature_ids[row] for row in rows)
    return CaptureBatch(index, rows, ids, token_ids, images if any(images) else ())
