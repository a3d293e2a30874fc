"""The loader: yields a rank's batches in the plan's order, on the device that trains.

Features come from one of three sources: `Captured` here, by this rank's own target; `Stored` in a
store that holds them all; `Queued`, by producers elsewhere. What captures here works in the thread that
trains; on CUDA it launches one batch ahead, on a stream of its own, whose kernels fill what a step
leaves of the device. The others work ahead in a thread that reads, checks and copies to the device;
`ahead` batches lie ready at most.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftcore.contracts.algorithm import Sample, SampleId
from draftcore.contracts.capture import BadRows, Capture, CaptureBatch, CapturedBatch
from draftcore.contracts.channel import RunEnded, Task
from draftcore.contracts.store import FeatureStore, SampleRef, StoreAway, StoreError
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.samples import Samples, batch_of
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError
from draftcore.features.producer import AWAY, SHORT, TEXT, require_finite
from draftcore.features.queue import Queue, RemoteQueue
from draftcore.tensors import largest_magnitude

LOOK = 0.5  # seconds between two looks whether the run is asked to stop


@dataclass
class Loaded:
    """A batch as it is trained on, without skipped rows. Its tensors are valid until `handles` close."""

    planned: PlannedBatch
    samples: list[Sample]
    handles: ExitStack = field(default_factory=ExitStack)


class Source(Protocol):
    """Where batches come from."""

    captures: bool  # in this process, so that nothing works ahead

    def read(self, planned: PlannedBatch, stop: Callable[[], bool]) -> Loaded | None:
        """Return a batch; None when asked to stop while it was waited for."""
        ...

    def close(self) -> None: ...


class Loader:
    """An iterator over a rank's batches; ends early when asked to stop. The last one is closed by `next`."""

    def __init__(
        self,
        uses: Iterator[PlannedBatch],
        source: Source,
        *,
        ahead: int,
        device: torch.device,
        stop: Callable[[], bool],
    ) -> None:
        self.uses, self.source, self.device, self.stop = uses, source, device, stop
        self.current: Loaded | None = None
        self.upcoming: PlannedBatch | None = None  # taken from `uses` before its turn
        self.closing = threading.Event()
        self.ready: SimpleQueue[Loaded | BaseException | None] = SimpleQueue()
        self.room = threading.Semaphore(max(ahead, 1))  # for batches ready or on the way
        self.thread: threading.Thread | None = None
        if not source.captures:
            self.thread = threading.Thread(target=self._work, name="loader", daemon=True)
            self.thread.start()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Loaded:
        self.let_go()
        self.current = self._read_here() if self.thread is None else self._wait()
        if self.current is None:
            raise StopIteration
        return self.current

    def let_go(self) -> None:
        """Close the batch that was yielded last; nobody uses its tensors any more."""
        if self.current is not None:
            self.current.handles.close()
            self.current = None

    def close(self) -> None:
        self.closing.set()
        self.let_go()
        if self.thread is not None:
            self.room.release()
            self.thread.join()
            while not self.ready.empty():
                found = self.ready.get()
                if isinstance(found, Loaded):
                    found.handles.close()
        self.source.close()

    def _read_here(self) -> Loaded | None:
        planned, self.upcoming = self.upcoming or next(self.uses, None), None
        if planned is None:
            return None
        loaded = self.source.read(planned, self.stop)
        if isinstance(self.source, Captured):
            self.upcoming = next(self.uses, None)
            self.source.launch(self.upcoming)
        return loaded

    def _wait(self) -> Loaded | None:
        while True:
            try:
                found = self.ready.get(timeout=LOOK)
            except Empty:
                if self.stop():
                    return None
                continue
            self.room.release()
            if isinstance(found, BaseException):
                raise found
            return found

    def _work(self) -> None:
        """Read ahead, in the thread: a batch, an error, or None at the end."""
        found: Loaded | BaseException | None = None
        stop = lambda: self.closing.is_set() or self.stop()  # noqa: E731
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        while self.room.acquire() and not self.closing.is_set():
            try:
                planned = next(self.uses, None)
                found = None if planned is None else self.source.read(planned, stop)
                if found is not None and stream is not None:
                    found = self._on_device(found, stream)
            except BaseException as error:
                found = error
            self.ready.put(found)
            if not isinstance(found, Loaded):
                return

    def _on_device(self, loaded: Loaded, stream: torch.cuda.Stream) -> Loaded:
        """Copy features to the device through pinned memory, and let go of what they were read from."""
        with torch.cuda.stream(stream):
            samples = [
                Sample(
                    one.id,
                    one.token_ids_T.clone(),
                    one.loss_mask_T.clone(),
                    {
                        name: value.pin_memory().to(self.device, non_blocking=True)
                        for name, value in one.features.items()
                    },
                )
                for one in loaded.samples
            ]
        for value in (value for one in samples for value in one.features.values()):
            value.record_stream(torch.cuda.default_stream(self.device))  # that trains
        stream.synchronize()
        loaded.handles.close()
        return Loaded(loaded.planned, samples)


# ---------------------------------------------------------------- sources


@dataclass
class Launched:
    """A capture that the device may still be at: `largest` is the largest magnitude, on CUDA."""

    planned: PlannedBatch
    batch: CaptureBatch
    captured: CapturedBatch | None = None  # None: all rows are skipped
    largest: Tensor | None = None


class Captured:
    """Batches that this rank captures with its own target; features never leave the device."""

    captures = True

    def __init__(self, capture: Capture, samples: Samples, plan: Plan, skipped: Skipped) -> None:
        self.capture, self.samples, self.plan, self.skipped = capture, samples, plan, skipped
        self.ahead: Launched | None = None
        self.stream: torch.cuda.Stream | None = None  # of captures ahead, once one was on CUDA

    def read(self, planned: PlannedBatch, stop: Callable[[], bool]) -> Loaded | None:
        launched, self.ahead = self.ahead, None
        while True:
            rows = tuple(row for row in planned.rows if row not in self.skipped)
            try:
                if launched is None or (launched.planned, launched.batch.rows) != (planned, rows):
                    launched = self._launch(planned)
                if launched.captured is None:
                    return Loaded(planned, [])
                self._finish(launched, launched.captured)
                batch, features = launched.batch, launched.captured.features
                loaded = Loaded(planned, [])
                for at, row in enumerate(batch.rows):
                    token_ids = torch.as_tensor(batch.token_ids[at], dtype=torch.long)
                    mask = torch.from_numpy(self.samples.loss_mask(row))
                    use = SampleId(batch.ids[at], planned.epoch)
                    loaded.samples.append(Sample(use, token_ids, mask, features[at]))
                return loaded
            except BadRows as error:
                self.skipped.add({rows[at]: why for at, why in error.reasons.items()})
                launched = None
            except RunEnded:  # a capture that was waited for
                return None

    def launch(self, planned: PlannedBatch | None) -> None:
        """Launch the capture of the batch after this one; what stands in its way is met by `read`."""
        if planned is None or self.stream is None:
            return
        with suppress(DraftcoreError, torch.OutOfMemoryError), torch.cuda.stream(self.stream):
            self.ahead = self._launch(planned)

    def _launch(self, planned: PlannedBatch) -> Launched:
        batch = batch_of(planned, self.samples, self.plan.feature_ids, self.skipped)
        if not batch.rows:
            return Launched(planned, batch)
        (captured,) = self.capture.features([batch])
        found = [value for features in captured.features for value in features.values()]
        return Launched(
            planned, batch, captured, largest_magnitude(found) if found[0].is_cuda else None
        )

    def _finish(self, launched: Launched, captured: CapturedBatch) -> None:
        """Wait for a capture, and take it over to the stream that trains."""
        if launched.largest is None:
            return require_finite(captured)
        device = launched.largest.device
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            finite = bool(launched.largest.isfinite())
        current = torch.cuda.current_stream(device)
        current.wait_stream(self.stream)
        if not finite:
            require_finite(captured)
        for features in captured.features:
            for value in features.values():
                value.record_stream(current)
        return None

    def close(self) -> None:
        self.capture.close()


class Stored:
    """Batches that a store holds, row by row, whoever cut them."""

    captures = False

    def __init__(
        self, store: FeatureStore, plan: Plan, skipped: Skipped, names: Sequence[str]
    ) -> None:
        self.store, self.plan, self.skipped, self.names = store, plan, skipped, (*names, *TEXT)

    def read(self, planned: PlannedBatch, stop: Callable[[], bool]) -> Loaded | None:
        ids = [self.plan.feature_ids[row] for row in planned.rows if row not in self.skipped]
        held = self.store.lookup(ids)
        if lacking := [one for one in ids if one not in held]:
            raise DraftcoreError(
                f"sample {lacking[0]} is missing from the store {self.store.uri}, which held it\n"
                "  run `draftcore capture` again, or copy the store again"
            )
        return open_refs(planned, [held[one] for one in ids], self.store, self.names)

    def close(self) -> None:
        self.store.close()


class Queued:
    """Batches that producers capture: refs from the queue, features from the store."""

    captures = False

    def __init__(
        self,
        queue: Queue | RemoteQueue,
        store: FeatureStore,
        plan: Plan,
        names: Sequence[str],
        patience: float,
    ) -> None:
        self.queue, self.store, self.plan, self.patience = queue, store, plan, patience
        self.names = (*names, *TEXT)
        self.released = deque[int]()  # positions whose batches were closed, which the queue is told

    def read(self, planned: PlannedBatch, stop: Callable[[], bool]) -> Loaded | None:
        away = 0.0  # since when the store is
        while not stop():
            released = [self.released.popleft() for _ in range(len(self.released))]
            try:
                refs = self.queue.receive(planned.position, 1.0, released)
            except RunEnded:
                return None
            try:
                if refs is not None:
                    return self._open(planned, refs)
                # Is the store away? Producers wait for it as well, and publish nothing.
                self.store.lookup([self.plan.feature_ids[row] for row in planned.rows])
                away = 0.0
            except StoreAway:
                away = away or time.monotonic()
                if time.monotonic() - away > self.patience:
                    raise
                time.sleep(AWAY)
            except StoreError as error:
                self.queue.reject(planned.position, str(error))
        return None

    def _open(self, planned: PlannedBatch, refs: Sequence[SampleRef]) -> Loaded:
        loaded, handles = open_refs(planned, refs, self.store, self.names), ExitStack()
        handles.callback(self.released.append, planned.position)  # once its tensors are closed
        handles.enter_context(loaded.handles)
        loaded.handles = handles
        return loaded

    def close(self) -> None:
        """Leave the store open: the queue frees what it holds."""


def open_refs(
    planned: PlannedBatch, refs: Sequence[SampleRef], store: FeatureStore, names: Sequence[str]
) -> Loaded:
    """Open a batch's refs, which are those of its rows that are not skipped."""
    loaded = Loaded(planned, [])
    for handle in store.get_many(refs, names=names) if refs else ():
        loaded.handles.enter_context(handle)
        tensors = dict(handle.tensors)
        token_ids, loss_mask = (tensors.pop(name) for name in TEXT)
        use = SampleId(handle.ref.feature_id, planned.epoch)
        loaded.samples.append(Sample(use, token_ids, loss_mask, tensors))
    return loaded


# ---------------------------------------------------------------- batches and tasks


def tasks_of(
    uses: Iterator[PlannedBatch], samples: Samples, plan: Plan, token_bytes: int
) -> Iterator[Task]:
    """Yield what producers are asked for, in the plan's order."""
    for planned in uses:
        batch = batch_of(planned, samples, plan.feature_ids, {})
        masks: tuple[Any, ...] = tuple(samples.loss_mask(row) for row in batch.rows)
        lengths: NDArray[np.int64] = plan.lengths[list(batch.rows)]
        yield Task(planned.position, batch, masks, int(lengths.sum()) * token_bytes)


def misfit(
    task: Task, refs: Sequence[SampleRef], forms: Mapping[str, tuple[int, str]], origin: str
) -> DraftcoreError | None:
    """Say what is wrong with refs from elsewhere, by row where rows are to blame.

    `forms` are the size and dtype of a token's features, by name.
    """
    if tuple(ref.feature_id for ref in refs) != task.batch.ids:
        return DraftcoreError(
            f"refs of other samples than those of batch {task.batch.index} were published"
        )
    reasons = {}
    for at, (ref, ids) in enumerate(zip(refs, task.batch.token_ids, strict=True)):
        specs = {spec.name: spec for spec in ref.tensors}
        found = {spec.name: (spec.shape[1:], spec.dtype) for spec in ref.tensors}
        if ref.provenance != origin:
            why = f"was captured as {ref.provenance}, not {origin}"
        elif lacking := sorted({*forms, *TEXT} - specs.keys()):
            why = f"lacks {', '.join(lacking)}"
        elif short := [name for name, spec in specs.items() if spec.shape[:1] != (len(ids),)]:
            why = f"has not {len(ids)} rows of {', '.join(short)}\n  {SHORT}"
        elif odd := [name for name, (n, dtype) in forms.items() if found[name] != ((n,), dtype)]:
            why = f"has {odd[0]} of (shape, dtype) {found[odd[0]]}, not {forms[odd[0]]}"
        else:
            continue
        reasons[at] = f"sample {ref.feature_id} {why}"
    return BadRows(reasons) if reasons else None
