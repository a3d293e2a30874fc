"""Every check of features: tensors that a capture yields, and refs that producers publish.

`specs` are what was asked for: the size and dtype of a token's features, by name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from draftcore.contracts import capture as contract
from draftcore.contracts.capture import BadRows, CaptureBatch, CapturedBatch, StoringCapture
from draftcore.contracts.store import FeatureStore, SampleRef, StoreItem, TensorSpec
from draftcore.errors import DraftcoreError
from draftcore.tensors import all_finite

Specs = Mapping[str, tuple[int, str]]
AUTHORS = "tell its authors of this"
SHORT = "a short capture comes from chunked prefill or a prefix cache"
TEXT = ("token_ids", "loss_mask")  # stored beside the features, so that a store is all one needs


class CheckedCapture:
    """The capture of a plugin, of which each batch is compared with what was asked for.

    Raises BadRows for rows of another shape or dtype, DraftcoreError for other rows or batches.
    """

    def __init__(self, capture: contract.Capture, plugin_name: str, specs: Specs) -> None:
        self.capture, self.specs, self.close = capture, specs, capture.close
        self.yielded = f"the capture of {plugin_name} yielded"

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        asked = list(batches)
        for batch, captured in itertools.zip_longest(asked, self.capture.features(asked)):
            same = batch and isinstance(captured, CapturedBatch) and captured.batch == batch
            if not same or len(captured.features) != len(batch.ids):
                problem = f"{self.yielded} other batches or rows than were asked for"
                raise DraftcoreError(f"{problem}\n  {AUTHORS}")
            bad: dict[int, str] = {}
            rows = zip(batch.ids, batch.token_ids, captured.features, strict=True)
            for at, (sample, ids, row) in enumerate(rows):
                if error := shape_error(row, len(ids), self.specs):
                    bad[at] = f"{self.yielded} {error}, for sample {sample}\n  {AUTHORS}; {SHORT}"
            if bad:
                raise BadRows(bad)
            yield captured

    def begin(
        self, batch: CaptureBatch, loss_masks: Sequence[Sequence[bool]], store: FeatureStore,
        provenance: str,
    ) -> Callable[[], tuple[SampleRef, ...]]:  # fmt: skip
        """Capture a batch into the CPU's memory; what is returned puts it, in any thread.

        Raises BadRows for features that are not finite.
        """
        text: list[dict[str, Tensor]] = []
        for ids, mask in zip(batch.token_ids, loss_masks, strict=True):
            parts = torch.as_tensor(ids, dtype=torch.long), torch.as_tensor(mask, dtype=torch.bool)
            text.append(dict(zip(TEXT, parts, strict=True)))
        if isinstance(self.capture, StoringCapture) and self.capture.reaches(store):
            return functools.partial(self.capture.deliver, batch, text, provenance, store)
        (captured,), items = self.features([batch]), list[StoreItem]()
        for sample, features, t in zip(batch.ids, captured.features, text, strict=True):
            # Pinned, if they come from a device.
            moved = {name: value.to("cpu", non_blocking=True) for name, value in features.items()}
            items.append(StoreItem(sample, moved | t, len(t["token_ids"]), provenance))
        require_finite(captured)  # which waits for the copies, too
        return functools.partial(store.put_many, items)


def ref_error(
    batch: CaptureBatch, refs: Sequence[SampleRef], specs: Specs, provenance: str
) -> DraftcoreError | None:
    """Say what is wrong with published refs, by row where rows are to blame."""
    if tuple(ref.feature_id for ref in refs) != batch.ids:
        return DraftcoreError(f"refs of other samples than batch {batch.index} has were published")
    bad: dict[int, str] = {}
    for at, (ref, ids) in enumerate(zip(refs, batch.token_ids, strict=True)):
        stored = {spec.name: spec for spec in ref.tensors}
        text = [n for n in TEXT if n not in stored or stored[n].shape != (len(ids),)]
        if ref.provenance != provenance:
            bad[at] = f"sample {ref.feature_id} was captured as {ref.provenance}, not {provenance}"
        elif text:
            bad[at] = f"sample {ref.feature_id} lacks {', '.join(text)} of {len(ids)} tokens"
        elif error := shape_error(stored, len(ids), specs):
            bad[at] = f"sample {ref.feature_id} has {error}\n  {SHORT}"
    return BadRows(bad) if bad else None


def shape_error(
    features: Mapping[str, Tensor] | Mapping[str, TensorSpec], tokens: int, specs: Specs
) -> str:
    """Name the first feature of a row that has another shape or dtype than was asked for, or ''."""
    for name, (size, dtype) in specs.items():
        value, actual = features.get(name), None
        if isinstance(value, Tensor | TensorSpec):
            actual = (*value.shape, str(value.dtype).removeprefix("torch."))
        if actual != (tokens, size, dtype):
            return f"{name!r} of {actual}, not {(tokens, size, dtype)}"
    return ""


def require_finite(captured: CapturedBatch) -> None:
    """Raise BadRows for rows of which a feature holds inf or nan; waits for the device."""
    if all_finite([value for features in captured.features for value in features.values()]):
        return
    bad: dict[int, str] = {}
    for at, features in enumerate(captured.features):
        for name, value_TH in features.items():
            if not bool(value_TH.isfinite().all()):
                bad[at] = (
                    f"feature {name!r} of dataset row {captured.batch.rows[at]} (sample "
                    f"{captured.batch.ids[at]}) holds inf or nan in {value_TH.dtype}\n"
                    "  capture in a wider type (capture.dtype=float32), or leave the row out"
                )
    raise BadRows(bad)
