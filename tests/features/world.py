"""A plan over made-up rows, and the batches of it that are captured here or read from a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftcore_file.store import FileStore
from numpy.typing import NDArray
from torch import Tensor

from draftcore.contracts import capture as contract
from draftcore.contracts.algorithm import DataSummary
from draftcore.contracts.capture import BadRows, CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.run import Loaded
from draftcore.contracts.store import FeatureStore, SampleRef, StoreItem
from draftcore.data.plan import Plan
from draftcore.data.skipped import Skipped
from draftcore.features.checks import CheckedCapture
from draftcore.features.loader import Captured, Loader, stored
from draftcore.run.capture import capture_batch
from draftcore.run.features import Features

SOON = 60.0  # seconds in which what must happen does, however slow the machine
NAMES, WIDTH, ORIGIN = ("hidden.1",), 2, "as always"
CPU = torch.device("cpu")
Batches = Iterable[Loaded | None]


class Rows:
    """The training samples: rows of 3 to 9 tokens."""

    def __init__(self, count: int) -> None:
        self.feature_ids = tuple(f"{row:064x}" for row in range(count))
        self.lengths: NDArray[np.int64] = np.array([3 + 5 * row % 7 for row in range(count)])
        tokens = int(self.lengths.sum())
        self.summary = DataSummary("f", count, tokens, tokens, 9, {})

    def tokens(self, row: int) -> NDArray[np.int64]:
        return np.arange(self.lengths[row]) + row

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return np.array([at % 3 != row % 3 for at in range(self.lengths[row])])

    def images(self, row: int) -> tuple[contract.Image, ...]:
        return ()


class Mixing:
    """A capture whose features depend on the batch that a row is in, as a real one's last bits do."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        self.bad, self.captured, self.closed = set(bad), list[int](), 0

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        for batch in batches:
            hit = [(at, row) for at, row in enumerate(batch.rows) if row in self.bad]
            if hit:
                raise BadRows({at: f"row {row} is bad" for at, row in hit})
            self.captured.append(batch.index)
            scale = max(map(len, batch.token_ids)) + 0.1 * len(batch.rows)
            rows = [torch.tensor(ids).float() * scale for ids in batch.token_ids]
            both = ({NAMES[0]: torch.stack([row, -row], dim=1)} for row in rows)
            yield CapturedBatch(batch, tuple(both))

    def close(self) -> None:
        self.closed += 1


class Delivering(Mixing):
    """One that puts features into the store by itself."""

    def reaches(self, store: FeatureStore) -> bool:
        return True

    def deliver(
        self, batch: CaptureBatch, text: Sequence[dict[str, Tensor]], origin: str, to: FeatureStore
    ) -> tuple[SampleRef, ...]:
        (captured,) = self.features([batch])
        rows = zip(batch.ids, captured.features, text, strict=True)
        return to.put_many(
            [StoreItem(one, {**own, **t}, len(t["token_ids"]), origin) for one, own, t in rows]
        )


class Far(Delivering):
    """One that could do so, but not into this store."""

    def reaches(self, store: FeatureStore) -> bool:
        return False

    def deliver(self, *args: Any) -> tuple[SampleRef, ...]:
        raise AssertionError("it does not reach the store")


class Infinite(Mixing):
    """One whose bad rows show by their features."""

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        bad, self.bad = self.bad, set()
        for one in super().features(batches):
            for row, features in zip(one.batch.rows, one.features, strict=True):
                if row in bad:
                    features[NAMES[0]][-1, 1] = torch.nan
            yield one
        self.bad = bad


KINDS = Mixing, Infinite, Delivering, Far


class World:
    """A plan, and the sources of its batches that need no other process."""

    def __init__(
        self, folder: Path, rows: int = 11, *, skipped: Sequence[int] = (), **plan: Any
    ) -> None:
        self.folder, self.samples = folder, Rows(rows)
        self.request, self.width = FeatureRequest((1,), False, "float32"), WIDTH
        settings = {"batch": 2, "accumulate": 2, "seed": 3, "epochs": 2, **plan}
        self.plan = Plan(self.samples.feature_ids, self.samples.lengths.tolist(), **settings)
        self.skipped_before = dict.fromkeys(skipped, "bad before")
        self.skipped = self.skips()  # of the batches that were opened last
        self.capture: Callable[[], contract.Capture] = Mixing
        self.closing = ExitStack()

    def skips(self) -> Skipped:
        return Skipped(self.skipped_before, rows=len(self.samples.feature_ids), share=1)

    def checked(self) -> CheckedCapture:
        """Open the capture as a run does."""
        return CheckedCapture(self.capture(), "mine", self.request.feature_specs(self.width))

    def captured(self) -> Batches:
        self.skipped = self.skips()
        return Captured(self.plan.uses(0), self.checked(), self.samples, self.skipped)

    def stored(self, plan: Plan | None = None) -> Batches:
        """Read a store, filled with all of a plan's batches as `draftcore capture` does."""
        self.store: FeatureStore = FileStore(self.folder / "features")
        features = Features(self.request, ORIGIN, None, self.store, keeps=True)
        skipped, capture = self.skips(), self.checked()
        self.skipped = skipped
        for at, rows in enumerate((plan or self.plan).batches):
            capture_batch(at, rows, capture, features, self.samples, skipped)
        return stored(self.plan.uses(0), self.store, self.plan, skipped, self.request.names)


def within(work: Callable[[], Any]) -> None:
    """Do something that must not take for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive(), "it hangs"


def loader(batches: Batches, ahead: int = 2) -> Loader:
    here = isinstance(batches, Captured)
    return Loader(batches, ahead=0 if here else ahead, device=CPU, stop=lambda: False)


Read = list[tuple[int, str, int, str, list[int], list[bool], dict[str, Tensor]]]


def read(source: Batches, ahead: int = 2) -> Read:
    """All that training sees of a run's samples, in order."""
    found: Read = []
    batches = loader(source, ahead)
    for batch in batches:
        for one in batch.samples:
            features = {name: value.clone() for name, value in one.features.items()}
            place = batch.planned.position, one.id.feature_id, one.id.epoch
            text = one.token_ids_T.tolist(), one.loss_mask_T.tolist()
            kinds = f"{one.token_ids_T.dtype} {one.loss_mask_T.dtype}"
            found.append((*place, kinds, *text, features))
    batches.close()
    return found


def require_equal(found: Read, wanted: Read) -> None:
    """Compare to the bit, types included."""
    assert [one[:6] for one in found] == [one[:6] for one in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours[6].keys() == theirs[6].keys()
        for name, value in theirs[6].items():
            assert ours[6][name].dtype == value.dtype
            assert torch.equal(ours[6][name], value), (ours[:2], name)
