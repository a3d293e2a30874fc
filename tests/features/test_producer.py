"""A producer and a store that holds, or seems to hold, what it is to capture."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from draftcore_shm.store import ShmStore
from numpy.typing import NDArray
from torch import Tensor

from draftcore.channels.memory import MemoryChannel
from draftcore.contracts.capture import CapturedGroup, CaptureInput
from draftcore.contracts.channel import CaptureTask
from draftcore.contracts.store import FeatureStore, SampleRef, StoreError, StoreItem
from draftcore.data.plan import Plan
from draftcore.errors import DraftcoreError
from draftcore.feed import Producer

LENGTH = 3


class Counting:
    """A capture backend, and the samples' tokens: row, row, row."""

    def __init__(self) -> None:
        self.captured = 0

    def features(self, groups: Iterable[CaptureInput]) -> Iterator[CapturedGroup]:
        for group in groups:
            self.captured += 1
            rows = [torch.full((LENGTH, 4), float(tokens[0])) for tokens in group.token_ids]
            yield CapturedGroup(group.group, tuple({"hidden.1": row} for row in rows))

    def tokens(self, row: int) -> NDArray[np.int64]:
        return np.full(LENGTH, row)

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return np.ones(LENGTH, dtype=np.bool_)

    def close(self) -> None: ...


@pytest.fixture
def capture() -> Counting:
    return Counting()


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    return Path("/dev/shm", tmp_path.name)


@pytest.fixture
def producer(capture: Counting, ring: Path) -> Iterator[Producer]:
    channel = MemoryChannel("run")
    channel.offer(Plan(["s0", "s1"], [LENGTH] * 2, capture_batch=2, batch=2, seed=0).captures(0))
    store = ShmStore(str(ring), max_bytes=1 << 20)
    yield Producer(lambda: capture, capture, store, channel, "p")
    store.free(store.lookup(["s0", "s1"]).values())
    store.close()


@pytest.fixture
def task(producer: Producer) -> CaptureTask:
    claimed = producer.channel.claim("one")
    assert claimed is not None
    return claimed


def test_what_the_store_holds_is_not_captured_again(
    producer: Producer, capture: Counting, task: CaptureTask
) -> None:
    assert producer.refs(task) == producer.refs(task)
    assert capture.captured == 1


def test_what_a_lookup_finds_torn_is_captured_again(
    producer: Producer, capture: Counting, task: CaptureTask, ring: Path
) -> None:
    """Else every attempt of every producer would fail, and the sample be given up."""
    producer.refs(task)
    at = ring.read_bytes().index(b'"s0"')  # in the description of a sample, which has a seal
    with ring.open("r+b") as memory:
        memory.seek(at)
        memory.write(b'"x0"')
    with pytest.raises(StoreError, match="torn or altered"):
        producer.store.lookup(task.group.feature_ids)
    again = producer.refs(task)
    assert capture.captured == 2
    for ref, row in zip(again, task.group.rows, strict=True):
        with producer.store.get(ref) as handle:
            assert set(handle.tensors["hidden.1"].flatten().tolist()) == {row}


def test_what_was_captured_in_another_way_is_captured_again(
    producer: Producer, capture: Counting, task: CaptureTask
) -> None:
    producer.provenance = "another target"
    producer.refs(task)
    producer.provenance = "p"
    assert {ref.provenance for ref in producer.refs(task)} == {"p"}
    assert capture.captured == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_refused_with_its_row_and_a_remedy(
    producer: Producer,
    capture: Counting,
    task: CaptureTask,
    value: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the capture: it hands its features over, and here they are looked at."""
    taken = capture.features

    def loud(groups: Iterable[CaptureInput]) -> Iterator[CapturedGroup]:
        for one in taken(groups):
            one.features[1]["hidden.1"][2, 3] = value
            yield one

    monkeypatch.setattr(capture, "features", loud)
    with pytest.raises(DraftcoreError, match=rf"row {task.group.rows[1]} \(sample s\d\)") as error:
        producer.refs(task)
    assert "capture.dtype=float32" in str(error.value)
    assert producer.store.stats().samples == 0


class Elsewhere(Counting):
    """A capture that runs where it can put into the store by itself, if it is the right one."""

    def __init__(self, near: bool) -> None:
        super().__init__()
        self.near = near
        self.origins: list[str] = []

    def reaches(self, store: FeatureStore) -> bool:
        return self.near

    def deliver(
        self, group: CaptureInput, text: Sequence[dict[str, Tensor]], origin: str, to: FeatureStore
    ) -> tuple[SampleRef, ...]:
        self.origins.append(origin)
        (captured,) = super().features([group])
        return to.put_many(
            [
                StoreItem(feature_id, {**features, **own}, LENGTH, origin)
                for feature_id, features, own in zip(
                    group.group.feature_ids, captured.features, text, strict=True
                )
            ]
        )


@pytest.mark.parametrize("near", [True, False])
def test_a_capture_that_reaches_the_store_puts_there_itself(
    producer: Producer, task: CaptureTask, near: bool
) -> None:
    """Either way the store holds the same."""
    capture = Elsewhere(near)
    producer.open_capture = lambda: capture
    refs = producer.refs(task)
    assert capture.origins == (["p"] if near else [])
    for ref in refs:
        with producer.store.get(ref) as handle:
            assert set(handle.tensors) == {"hidden.1", "token_ids", "loss_mask"}
            assert handle.tensors["token_ids"].tolist() == [int(ref.feature_id[1:])] * LENGTH
