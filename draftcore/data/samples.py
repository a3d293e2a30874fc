"""The training samples as a run sees them, and as JSON data.

They are rendered here (`dataset`), or described by the manifest of a complete capture, which holds all
that training needs of them. Each rank opens them by itself.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftcore.contracts.algorithm import DataSummary
from draftcore.contracts.capture import BadRows, CaptureBatch, Image
from draftcore.contracts.target import ImageProcessor
from draftcore.data.conversations import RowError
from draftcore.data.plan import PlannedBatch
from draftcore.errors import DraftcoreError


class Samples(Protocol):
    """The training samples: rendered here, or described by the manifest of a store."""

    @property
    def feature_ids(self) -> tuple[str, ...]: ...
    @property
    def lengths(self) -> NDArray[np.int64]: ...
    @property
    def summary(self) -> DataSummary: ...
    def tokens(self, row: int) -> NDArray[np.int64]: ...
    def loss_mask(self, row: int) -> NDArray[np.bool_]: ...
    def images(self, row: int) -> tuple[Image, ...]: ...


class StoredSamples:
    """The training samples as the manifest of a complete capture, or rank 0, describes them."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.feature_ids: tuple[str, ...] = tuple(manifest["feature_ids"])
        self.lengths: NDArray[np.int64] = np.array(manifest["lengths"], dtype=np.int64)
        self.summary = read_summary(manifest["summary"])

    def tokens(self, row: int) -> NDArray[np.int64]:
        raise DraftcoreError(
            f"sample {self.feature_ids[row]} is missing from the store, whose capture was complete\n"
            "  its files were changed since: copy the store again, or set data.train to recapture"
        )

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return self.tokens(row).astype(np.bool_)

    def images(self, row: int) -> tuple[Image, ...]:
        self.tokens(row)
        return ()


def batch_of(
    planned: PlannedBatch, samples: Samples, ids: Sequence[str], skipped: Container[int]
) -> CaptureBatch:
    """Return a planned batch without skipped rows."""
    rows = tuple(row for row in planned.rows if row not in skipped)
    token_ids = tuple(samples.tokens(row).tolist() for row in rows)
    images = tuple(samples.images(row) for row in rows)
    feature_ids = tuple(ids[row] for row in rows)
    return CaptureBatch(planned.index, rows, feature_ids, token_ids, images if any(images) else ())


def image_inputs(batch: CaptureBatch, processor: ImageProcessor | None) -> dict[int, Any]:
    """Return what the target's forward is given of each row with images, by its number in the batch.

    Raises BadRows for rows whose images cannot be read, or are others than when they were rendered.
    """
    assert processor is not None  # or no row would have any
    inputs: dict[int, Any] = {}
    bad: dict[int, str] = {}
    for number, images in enumerate(batch.images):
        try:
            if images:
                inputs[number] = processor.inputs(batch.token_ids[number], images)
        except RowError as error:
            bad[number] = f"dataset row {batch.rows[number]}: {error}"
    if bad:
        raise BadRows(bad)
    return inputs


def samples_data(samples: Samples) -> dict[str, Any]:
    """Describe samples as JSON data, for `StoredSamples`."""
    return {
        "feature_ids": list(samples.feature_ids),
        "lengths": samples.lengths.tolist(),
        "summary": summary_data(samples.summary),
    }


def summary_data(summary: DataSummary) -> dict[str, Any]:
    """Turn a DataSummary into JSON data, where token counts are pairs: their keys are numbers."""
    return {**vars(summary), "token_counts": list(summary.token_counts.items())}


def read_summary(data: Mapping[str, Any]) -> DataSummary:
    """Read a DataSummary from its JSON form, where token counts are pairs."""
    return DataSummary(**{**data, "token_counts": dict(data["token_counts"])})
