"""Captures batches into a store: the features of each row, with its token ids and loss mask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from draftcore.contracts.capture import BadRows, Capture, CaptureBatch, StoringCapture
from draftcore.contracts.store import FeatureStore, SampleRef, StoreItem
from draftcore.data.plan import PlannedBatch
from draftcore.data.samples import Samples, batch_of
from draftcore.data.skipped import Skipped
from draftcore.features.checks import CheckedCapture, require_finite


def fill(
    batches: Iterable[PlannedBatch],
    capture: Capture,
    store: FeatureStore,
    provenance: str,
    samples: Samples,
    skipped: Skipped,
) -> Iterator[None]:
    """Capture batches into a store, one at each turn of the iterator. Bad rows are skipped."""
    for planned in batches:
        while (batch := batch_of(planned, samples, samples.feature_ids, skipped)).rows:
            masks = [samples.loss_mask(row).tolist() for row in batch.rows]
            try:
                put_batch(batch, masks, capture, store, provenance)
                break
            except BadRows as error:
                skipped.add({batch.rows[at]: why for at, why in error.reasons.items()})
        yield


def put_batch(
    batch: CaptureBatch,
    loss_masks: Sequence[Sequence[bool]],
    capture: Capture,
    store: FeatureStore,
    provenance: str,
) -> tuple[SampleRef, ...]:
    """Capture a batch and put it. Raises BadRows for features that are not finite."""
    text: list[dict[str, Tensor]] = []
    for ids, mask in zip(batch.token_ids, loss_masks, strict=True):
        token_ids, loss_mask = torch.as_tensor(ids, dtype=torch.long), torch.as_tensor(mask)
        text.append({"token_ids": token_ids, "loss_mask": loss_mask.to(torch.bool)})
    backend = capture.capture if isinstance(capture, CheckedCapture) else capture
    if isinstance(backend, StoringCapture) and backend.reaches(store):
        return backend.deliver(batch, text, provenance, store)
    (captured,) = capture.features([batch])
    require_finite(captured)
    rows = zip(batch.ids, captured.features, text, strict=True)
    return store.put_many(
        [
            StoreItem(sample, {**features, **t}, len(t["token_ids"]), provenance)
            for sample, features, t in rows
        ]
    )
