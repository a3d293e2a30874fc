"""The loader: yields a rank's batches in the plan's order, on the device that trains.

Features come from one of three places: `Captured` captures here, with this rank's own target; `stored`
reads a store that holds them all; a plugin (hook `batches`) brings what other processes capture. What
captures here works in the thread that trains; on CUDA it launches one batch ahead, on a stream of its
own, whose kernels fill what a step leaves of the device. The others work ahead in a thread that reads,
checks and copies to the device; `ahead` batches lie ready at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import torch
from torch import Tensor

from draftcore.contracts.algorithm import Sample, SampleId
from draftcore.contracts.capture import BadRows, Capture, CapturedBatch
from draftcore.contracts.run import Loaded, PlannedBatch, RunEnded, Samples
from draftcore.contracts.store import FeatureStore, SampleRef
from draftcore.data.plan import Plan
from draftcore.data.samples import batch_of
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError
from draftcore.features.checks import TEXT, require_finite
from draftcore.tensors import largest_magnitude

STOP_CHECK = 0.5  # seconds between two looks whether the run is asked to stop


class Loader:
    """An iterator over a rank's batches; ends early when asked to stop. The last one is closed by `next`.

    `batches` yields None while it waits for one. With `ahead` 0 it is read in the thread that trains.
    """

    def __init__(
        self, batches: Iterable[Loaded | None], *, ahead: int, device: torch.device,
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.batches, self.device, self.stop = iter(batches), device, stop
        self.current: Loaded | None = None
        self.closing = False
        copies = ahead and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if copies else None  # type: ignore[no-untyped-call]
        self.thread = ThreadPoolExecutor(1, "loader")
        self.ahead = deque(self.thread.submit(self._read) for _ in range(ahead))

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Loaded:
        self.release_batch()
        if not self.ahead:
            self.current = next(self.batches, None)
        else:
            while not wait([self.ahead[0]], STOP_CHECK).done:
                if self.stop():
                    raise StopIteration
            self.ahead.append(self.thread.submit(self._read))
            self.current = self.ahead.popleft().result()
        if self.current is None:
            raise StopIteration
        return self.current

    def release_batch(self) -> None:
        """Close the batch that was yielded last; nobody uses its tensors any more."""
        if self.current is not None:
            self.current.handles.close()
            self.current = None

    def close(self) -> None:
        self.closing = True
        self.release_batch()
        self.thread.shutdown(cancel_futures=True)
        for read in self.ahead:
            if not read.cancelled() and not read.exception() and (loaded := read.result()):
                loaded.handles.close()

    def _read(self) -> Loaded | None:
        """Return the next batch, in the thread; None at the end, and where a wait is to end."""
        for loaded in self.batches:
            if loaded is not None:
                return loaded if self.stream is None else self._on_device(loaded, self.stream)
            if self.closing or self.stop():
                break
        return None

    def _on_device(self, loaded: Loaded, stream: torch.cuda.Stream) -> Loaded:
        """Copy features to the device through pinned memory, and close what they were read from."""
        samples = []
        with torch.cuda.stream(stream):
            for sample in loaded.samples:
                text = sample.token_ids_T.clone(), sample.loss_mask_T.clone()
                pinned = {name: value.pin_memory() for name, value in sample.features.items()}
                features = {n: x.to(self.device, non_blocking=True) for n, x in pinned.items()}
                samples.append(Sample(sample.id, *text, features))
        for value in (value for sample in samples for value in sample.features.values()):
            value.record_stream(torch.cuda.default_stream(self.device))  # that trains
        stream.synchronize()
        loaded.handles.close()
        return Loaded(loaded.planned, samples)


# ---------------------------------------------------------------- where batches come from


class Captured:
    """Batches that this rank captures with its own target; features never leave the device."""

    def __init__(
        self, uses: Iterator[PlannedBatch], capture: Capture, samples: Samples, skipped: Skipped
    ) -> None:
        self.uses, self.capture, self.samples, self.skipped = uses, capture, samples, skipped
        self.stream: torch.cuda.Stream | None = None  # of captures ahead, once one was on CUDA

    def __iter__(self) -> Iterator[Loaded]:
        planned, launched = next(self.uses, None), None
        while planned is not None:
            try:
                loaded = self._load(planned, launched)
            except RunEnded:  # a capture that was waited for
                return
            planned, launched = next(self.uses, None), None
            if planned is not None and (stream := self.stream) is not None:
                # What stands in its way is met when the batch is loaded.
                with suppress(DraftcoreError, torch.OutOfMemoryError), torch.cuda.stream(stream):
                    launched = self._launch(planned)
            yield loaded

    def _load(
        self, planned: PlannedBatch, launched: tuple[CapturedBatch, Tensor | None] | None
    ) -> Loaded:
        """Return a batch without bad rows: the capture that was launched, or one begun now."""
        while True:
            rows = tuple(row for row in planned.rows if row not in self.skipped)
            try:
                if launched is None or launched[0].batch.rows != rows:
                    launched = self._launch(planned)
                captured, largest = launched
                self._finish(captured, largest)
                return Loaded(planned, samples_of(captured, self.samples, planned.epoch))
            except BadRows as error:
                self.skipped.add({rows[at]: why for at, why in error.reasons.items()})
                launched = None

    def _launch(self, planned: PlannedBatch) -> tuple[CapturedBatch, Tensor | None]:
        """Begin a capture; on CUDA it comes with the largest magnitude of its features."""
        batch = batch_of(planned.index, planned.rows, self.samples, self.skipped)
        if not batch.rows:
            return CapturedBatch(batch, ()), None
        (captured,) = self.capture.features([batch])
        values = [value for features in captured.features for value in features.values()]
        return captured, largest_magnitude(values) if values[0].is_cuda else None

    def _finish(self, captured: CapturedBatch, largest: Tensor | None) -> None:
        """Wait for a capture, and hand it over to the stream that trains."""
        if largest is None:
            require_finite(captured)
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream(largest.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            finite = bool(largest.isfinite())
        current = torch.cuda.current_stream(largest.device)
        current.wait_stream(self.stream)
        if not finite:
            require_finite(captured)
        for value in (value for features in captured.features for value in features.values()):
            value.record_stream(current)


def samples_of(captured: CapturedBatch, samples: Samples, epoch: int) -> list[Sample]:
    """Return the rows of a captured batch as they are trained on."""
    batch, trained = captured.batch, []
    for at, row in enumerate(batch.rows):
        token_ids = torch.as_tensor(batch.token_ids[at], dtype=torch.long)
        mask, features = torch.from_numpy(samples.loss_mask(row)), captured.features[at]
        trained.append(Sample(SampleId(batch.ids[at], epoch), token_ids, mask, features))
    return trained


def stored(
    uses: Iterator[PlannedBatch], store: FeatureStore, plan: Plan, skipped: Skipped,
    names: Sequence[str],
) -> Iterator[Loaded]:  # fmt: skip
    """Yield batches that a store holds, row by row, whoever cut them."""
    for planned in uses:
        ids = [plan.feature_ids[row] for row in planned.rows if row not in skipped]
        refs = store.lookup(ids)
        if lacking := [feature_id for feature_id in ids if feature_id not in refs]:
            problem = f"sample {lacking[0]} is missing from the store {store.uri}, which held it"
            remedy = "run `draftcore capture` again, or copy the store again"
            raise DraftcoreError(f"{problem}\n  {remedy}")
        yield open_refs(planned, [refs[i] for i in ids], lambda at: None, store=store, names=names)


def open_refs(
    planned: PlannedBatch, refs: Sequence[SampleRef], on_close: Callable[[int], None], *,
    store: FeatureStore, names: Sequence[str],
) -> Loaded:  # fmt: skip
    """Open a batch's refs, which are those of its rows that are not skipped.

    `on_close` is told the batch's position once its tensors are closed.
    """
    handles = store.get_many(refs, names=(*names, *TEXT)) if refs else ()
    loaded = Loaded(planned, [])
    loaded.handles.callback(on_close, planned.position)
    for handle in handles:
        loaded.handles.enter_context(handle)
        tensors = dict(handle.tensors)
        token_ids, loss_mask = (tensors.pop(name) for name in TEXT)
        sample_id = SampleId(handle.ref.feature_id, planned.epoch)
        loaded.samples.append(Sample(sample_id, token_ids, loss_mask, tensors))
    return loaded
