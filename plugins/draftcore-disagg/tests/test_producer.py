"""A producer: what it puts and publishes, what it tells the trainer, and how its work ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_disagg import producer as module
from draftcore_disagg.channel import Json
from draftcore_disagg.producer import produce
from draftcore_disagg.queue import ATTEMPTS, Queue, QueueService, RemoteQueue
from draftcore_file.store import FileStore
from queueing import LENGTH, SOON, Loopback, task

from draftcore.contracts.capture import Capture, CaptureBatch, CapturedBatch
from draftcore.contracts.store import (
    FeatureStore,
    SampleRef,
    StoreAway,
    StoreError,
    StoreFull,
    StoreItem,
)
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError, UsageError
from draftcore.features.checks import CheckedCapture
from tests.features.world import Mixing


class Noted(Mixing):
    """A capture that calls `before` with each batch."""

    before: Callable[[CaptureBatch], None] = staticmethod(lambda batch: None)

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        for batch in batches:
            self.before(batch)
            yield from super().features([batch])


class Store(FileStore):
    """A store on disk that may be away for some calls, and counts its closings."""

    away = closings = 0

    def knock(self) -> None:
        if self.away:
            self.away -= 1
            raise StoreAway("not now")

    def lookup(self, feature_ids: Sequence[str]) -> dict[str, SampleRef]:
        self.knock()
        return super().lookup(feature_ids)

    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        self.knock()
        return super().put_many(items)

    def close(self) -> None:
        self.closings += 1


def checked(capture: Capture) -> CheckedCapture:
    """Open a capture as a run does."""
    return CheckedCapture(capture, "mine", {"hidden.1": (2, "float32")})


class Trainer:
    """A queue of two batches of two rows, and the store that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.capture, self.store = folder, Noted(), Store(folder / "features")
        self.skipped = Skipped({}, rows=4, share=1)
        self.published: list[int] = []
        self.queue = Queue(
            {"store": self.store.uri}, ahead=9, limit=None, skipped=self.skipped,
            free=self.store.free, ref_error=self.ref_error,
        )  # fmt: skip
        self.queue.offer(iter([task(0), task(1)]), 0)
        self.patience, self.stopped = SOON, False
        self.client = Loopback(self.queue)

    def ref_error(self, batch: CaptureBatch, refs: Sequence[SampleRef]) -> None:
        """Note what was published; the last batch ends the run."""
        self.published.append(batch.index)
        if batch.index == 1:
            self.queue.end("finished")

    def produce(self) -> str:
        capture = lambda _: (checked(self.capture), "p")  # noqa: E731
        queue, stop = RemoteQueue(self.client), lambda: self.stopped
        reason, line = produce(queue, capture, self.opened, stop, self.patience)
        assert reason == ("interrupted" if self.stopped else "finished")
        return line

    def opened(self, uri: str) -> FeatureStore:
        assert uri == self.store.uri
        return self.store

    def put(self, position: int, origin: str = "p") -> tuple[SampleRef, ...]:
        one = task(position)
        return checked(Mixing()).begin(one.batch, one.loss_masks, self.store, origin)()

    def hear(self, hook: Callable[[Json, Json], None]) -> None:
        """Call a hook with each request and its answer."""
        answer = self.client.service.answer

        def hear(request: Json) -> Json:
            reply: Json = answer(request)
            hook(request, reply)
            return reply

        self.client.service.answer = hear  # type: ignore[method-assign]


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(module, "STORE_RETRY", 0.01)
    return Trainer(tmp_path)


# ---------------------------------------------------------------- what is put


@pytest.mark.parametrize("held", ["nothing", "all", "half", "another target", "torn index"])
def test_a_producer_puts_what_it_is_asked_for_but_what_the_store_holds_whole_of_its_own(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """One that died after its put has not worked in vain. The others find what is no good."""
    refs = trainer.put(0, held if held == "another target" else "p") if held != "nothing" else ()
    if held == "half":
        trainer.store.free(refs[1:])
    if held == "torn index":
        lookup = trainer.store.lookup

        def torn(feature_ids: Sequence[str]) -> dict[str, SampleRef]:
            if len(feature_ids) > 1:
                raise StoreError("torn or altered")
            return lookup(feature_ids)

        monkeypatch.setattr(trainer.store, "lookup", torn)
    assert trainer.produce() == "the run has finished; 4 samples captured here"
    assert trainer.capture.captured == ([1] if held == "all" else [0, 1])
    assert trainer.published == [0, 1]
    assert trainer.store.closings == 1
    assert trainer.queue.status().producers == 0


def test_a_batch_is_put_while_the_next_one_is_captured(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, put_many = threading.Event(), trainer.store.put_many

    def put(items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        assert second.wait(SOON)
        return put_many(items)

    monkeypatch.setattr(trainer.store, "put_many", put)
    trainer.capture.before = lambda batch: second.set() if batch.index == 1 else None
    assert "4 samples" in trainer.produce()
    claims = [one["putting"] for one in trainer.client.of("claim")]
    assert list(map(len, claims[:2])) == [0, 1], "what is still put stays its own"


def rows(batch: CaptureBatch, value: Any, count: int = 2, name: str = "hidden.1") -> CapturedBatch:
    return CapturedBatch(batch, ({name: value},) * count)


WHOLE, ELSE = torch.ones(LENGTH, 2), "other batches or rows"
NOT_FINITE = r"dataset row 0 \(sample s0\) holds inf or nan(.|\n)*capture.dtype=float32"
YIELDED: dict[str, tuple[Callable[[CaptureBatch], Any], str]] = {
    "short": (lambda b: [rows(b, WHOLE[1:])], "'hidden.1' of .2, 2, 'float32'."),
    "double": (lambda b: [rows(b, WHOLE.double())], "'hidden.1' of .3, 2, 'float64'."),
    "other name": (lambda b: [rows(b, WHOLE, name="hidden.2")], "'hidden.1' of None"),
    "no tensor": (lambda b: [rows(b, [1.0])], "'hidden.1' of None"),
    "one row": (lambda b: [rows(b, WHOLE, 1)], ELSE),
    "other batch": (lambda b: [rows(task(1).batch, WHOLE)], ELSE),
    "bare rows": (lambda b: [{"hidden.1": WHOLE}], ELSE),
    "nothing": (lambda b: [], ELSE),
    "twice": (lambda b: [rows(b, WHOLE)] * 2, ELSE),
    "inf": (lambda b: [rows(b, WHOLE * math.inf)], NOT_FINITE),
    "-inf": (lambda b: [rows(b, WHOLE * -math.inf)], NOT_FINITE),
}


@pytest.mark.parametrize(("yields", "says"), YIELDED.values(), ids=YIELDED)
def test_a_capture_that_yields_anything_else_is_named_and_no_sample(
    trainer: Trainer, yields: Callable[[CaptureBatch], Any], says: str
) -> None:
    trainer.capture.features = lambda batches: yields(*batches)  # type: ignore[method-assign]
    one = task(0)
    by = "" if says == NOT_FINITE else "the capture of mine yielded "
    with pytest.raises(DraftcoreError, match=by + says):
        checked(trainer.capture).begin(one.batch, one.loss_masks, trainer.store, "p")
    assert trainer.store.stats().samples == 0


# ---------------------------------------------------------------- what goes wrong


def test_a_full_store_is_told_as_what_it_is(trainer: Trainer) -> None:
    """So that the queue makes room for the batch, and does not count it against it."""
    refusals, taken = iter(range(ATTEMPTS)), trainer.store.put_many

    def full(items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        if items[0].feature_id == "s2" and next(refusals, None) is not None:
            trainer.queue.advance(1)  # a batch before it makes room, of which it is told
            raise StoreFull("x", needed=1, samples=2, free=0, limit="it", remedy="free some")
        return taken(items)

    trainer.store.put_many = full  # type: ignore[method-assign]
    with ThreadPoolExecutor() as pool:
        work = pool.submit(trainer.produce)
        while trainer.queue.failure is None:
            time.sleep(0.01)
        trainer.queue.end("finished")
        work.result(SOON)
    with pytest.raises(DraftcoreError, match="too small for one batch"):
        trainer.queue.receive(1, 0)
    assert [one["failed"]["full"] for one in trainer.client.of("publish")[1:]] == [True, True]
    assert not trainer.skipped


@pytest.mark.parametrize("at", ["lookup", "put", "open"])
def test_a_store_that_is_away_is_waited_for(trainer: Trainer, at: str) -> None:
    """No batch is at fault, and none is captured more often than it is put."""
    times, opened = iter(range(3 * ATTEMPTS)), trainer.opened

    def leave(batch: CaptureBatch) -> None:
        trainer.store.away = 1 if len(trainer.capture.captured) < 2 else 0

    def open_late(uri: str) -> FeatureStore:
        if next(times, None) is not None:
            raise StoreAway("not now")
        return opened(uri)

    match at:
        case "lookup":
            trainer.store.away = 3 * ATTEMPTS
        case "put":
            trainer.capture.before = leave
        case "open":
            trainer.opened = open_late  # type: ignore[method-assign]
    assert "4 samples" in trainer.produce()
    assert not trainer.skipped
    assert all("failed" not in one for one in trainer.client.of("publish"))


@pytest.mark.parametrize("error", [StoreAway("not now"), UsageError("no server at http://x")])
def test_who_cannot_work_ends_and_blames_no_batch(trainer: Trainer, error: DraftcoreError) -> None:
    """As often as it is started again: others may do the work."""

    def fail(batch: CaptureBatch) -> None:
        raise error

    trainer.capture.before, trainer.patience = fail, 0.0
    for _ in range(ATTEMPTS + 1):
        with pytest.raises(type(error), match=str(error)):
            trainer.produce()
    assert trainer.client.of("publish") == []
    assert {one["error"] for one in trainer.client.of("leave")} == {str(error)}
    trainer.capture = Noted()
    assert "4 samples" in trainer.produce()
    assert not trainer.skipped


def test_an_error_that_nobody_foresaw_ends_its_producer_and_counts_against_the_batch(
    trainer: Trainer,
) -> None:
    """A batch that takes down whoever captures it must not take down one after the other."""

    def fail(batch: CaptureBatch) -> None:
        if batch.index == 0:
            raise RuntimeError("out of memory")

    trainer.capture.before = fail
    for _ in range(ATTEMPTS):
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.produce()
    assert dict(trainer.skipped) == {0: "out of memory", 1: "out of memory"}
    assert "2 samples" in trainer.produce()


# ---------------------------------------------------------------- coming and going


def test_a_producer_that_is_asked_to_stop_leaves_in_peace(trainer: Trainer) -> None:
    trainer.capture.before = lambda batch: setattr(trainer, "stopped", True)
    assert trainer.produce() == "interrupted; 2 samples captured here"
    assert trainer.published == [0], "what it had begun it has finished"
    assert [one["error"] for one in trainer.client.of("leave")] == [""]
    assert trainer.store.closings == 1


def test_what_was_handed_to_another_meanwhile_does_not_count(trainer: Trainer) -> None:
    def slow(batch: CaptureBatch) -> None:
        if batch.index == 0 and not trainer.published:
            (name,) = trainer.queue.seen
            trainer.queue.leave(name)
            (claimed,) = trainer.queue.claim("fast", 1, 0)
            trainer.queue.publish(claimed.claim, trainer.put(0))

    trainer.capture.before = slow
    assert "2 samples" in trainer.produce()
    refusals = [one for one in trainer.client.of("publish") if one["refs"][0]["feature_id"] == "s0"]
    assert len(refusals) == 1


def test_a_trainer_that_begins_again_may_name_another_store(trainer: Trainer) -> None:
    first, second, opened = trainer.store, Store(trainer.folder / "others"), list[str]()

    def open_store(uri: str) -> FeatureStore:
        opened.append(uri)
        return second if uri == second.uri else first

    trainer.opened = open_store  # type: ignore[method-assign]
    trainer.capture.before = lambda batch: trainer.queue.about.update(store=second.uri)
    trainer.queue.free_refs = lambda refs: None
    trainer.produce()
    assert opened == [first.uri, second.uri]
    assert (first.stats().samples, second.stats().samples) == (2, 2)
    assert (first.closings, second.closings) == (1, 1)


def test_a_run_that_failed_may_go_on_with_its_producers(trainer: Trainer) -> None:
    heard = threading.Event()
    trainer.hear(lambda asked, reply: heard.set() if reply == {"ended": "failed"} else None)
    trainer.queue.end("failed")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(trainer.produce)
        assert heard.wait(SOON)
        again = Trainer(trainer.folder / "again")
        again.store = trainer.store
        again.queue.about["store"] = trainer.store.uri
        trainer.client.service = QueueService(again.queue)
        assert "4 samples" in running.result(SOON)


def test_a_long_capture_keeps_its_claim_by_heartbeats(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TTL", 0.04)
    beaten = threading.Event()
    trainer.hear(lambda asked, _: beaten.set() if asked["call"] == "heartbeat" else None)

    def slow(batch: CaptureBatch) -> None:
        beaten.clear()
        assert beaten.wait(SOON)

    trainer.capture.before = slow
    assert "4 samples" in trainer.produce()
