"""A producer: what it puts and publishes, what it tells the trainer, and how its work ends."""

from __future__ import annotations

import math
import threading
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


class Counting:
    """A capture whose features are the rows' numbers; `wrong` is called before each batch."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.wrong: Callable[[CaptureBatch], None] = lambda batch: None

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        for batch in batches:
            self.wrong(batch)
            self.captured.append(batch.index)
            rows = [torch.full((LENGTH, 4), float(tokens[0])) for tokens in batch.token_ids]
            yield CapturedBatch(batch, tuple({"hidden.1": row} for row in rows))

    def close(self) -> None: ...


class Store(FileStore):
    """A store on disk that may be away for some calls, and counts its closings."""

    def __init__(self, folder: Path, **kwargs: Any) -> None:
        super().__init__(folder, **kwargs)
        self.away, self.closings = 0, 0

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
    return CheckedCapture(capture, "mine", {"hidden.1": (4, "float32")})


class Trainer:
    """A queue of two batches of two rows, and the store that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.capture = folder, Counting()
        self.store = Store(folder / "features")
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
        opened = self.opened
        reason, line = produce(
            RemoteQueue(self.client),
            lambda _: (checked(self.capture), "p"),
            opened,
            lambda: self.stopped,
            self.patience,
        )
        assert reason == ("interrupted" if self.stopped else "finished")
        return line

    def produce_until_failure(self) -> None:
        """Work in another thread until the queue has failed; raises its error."""
        thread = threading.Thread(target=self.produce, daemon=True)
        thread.start()
        try:
            while True:
                self.queue.receive(1, 5)
        finally:
            self.queue.end("finished")
            thread.join(SOON)

    def opened(self, uri: str) -> FeatureStore:
        assert uri == self.store.uri
        return self.store


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(module, "STORE_RETRY", 0.01)
    return Trainer(tmp_path)


def put(trainer: Trainer, position: int, origin: str = "p") -> tuple[SampleRef, ...]:
    one = task(position)
    return checked(Counting()).put(one.batch, one.loss_masks, trainer.store, origin)


# ---------------------------------------------------------------- what is put


def test_a_producer_puts_what_it_is_asked_for_with_its_text_until_the_run_ends(
    trainer: Trainer,
) -> None:
    assert trainer.produce() == "the run has finished; 4 samples captured here"
    assert trainer.capture.captured == [0, 1]
    assert trainer.store.closings == 1
    assert trainer.queue.status().producers == 0


def test_what_the_store_holds_is_published_without_a_capture(trainer: Trainer) -> None:
    """A producer that died after its put has not worked in vain."""
    put(trainer, 0)
    assert "4 samples" in trainer.produce()
    assert trainer.capture.captured == [1]
    assert trainer.published == [0, 1]


@pytest.mark.parametrize("way", ["half", "another target", "torn index"])
def test_what_is_held_in_part_or_made_in_another_way_or_cannot_be_looked_up_is_captured_again(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    refs = put(trainer, 0, way if way == "another target" else "p")
    match way:
        case "half":
            trainer.store.free(refs[1:])
        case "torn index":
            lookup = trainer.store.lookup

            def torn(feature_ids: Sequence[str]) -> dict[str, SampleRef]:
                if len(feature_ids) > 1:
                    raise StoreError("torn or altered")
                return lookup(feature_ids)

            monkeypatch.setattr(trainer.store, "lookup", torn)
    trainer.produce()
    assert trainer.capture.captured == [0, 1]
    assert trainer.published == [0, 1]


def rows(batch: CaptureBatch, value: Any, count: int = 2, name: str = "hidden.1") -> CapturedBatch:
    return CapturedBatch(batch, ({name: value},) * count)


WHOLE, ELSE = torch.ones(LENGTH, 4), "other batches or rows"
NOT_FINITE = r"dataset row 0 \(sample s0\) holds inf or nan(.|\n)*capture.dtype=float32"
YIELDED: dict[str, tuple[Callable[[CaptureBatch], Any], str]] = {
    "short": (lambda b: [rows(b, WHOLE[1:])], "'hidden.1' of .2, 4, 'float32'."),
    "double": (lambda b: [rows(b, WHOLE.double())], "'hidden.1' of .3, 4, 'float64'."),
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
        checked(trainer.capture).put(one.batch, one.loss_masks, trainer.store, "p")
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
    with pytest.raises(DraftcoreError, match="too small for one batch"):
        trainer.produce_until_failure()
    assert [one["failed"]["full"] for one in trainer.client.of("publish")[1:]] == [True, True]
    assert not trainer.skipped


@pytest.mark.parametrize("at", ["lookup", "put", "open"])
def test_a_store_that_is_away_is_waited_for(trainer: Trainer, at: str) -> None:
    """No batch is at fault, and none is captured more often than it is put."""
    times, opened = 3 * ATTEMPTS, trainer.opened

    def leave(batch: CaptureBatch) -> None:
        trainer.store.away = 1 if len(trainer.capture.captured) < 2 else 0

    def open_late(uri: str) -> FeatureStore:
        nonlocal times
        if times := times - 1:
            raise StoreAway("not now")
        return opened(uri)

    match at:
        case "lookup":
            trainer.store.away = times
        case "put":
            trainer.capture.wrong = leave
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

    trainer.capture.wrong, trainer.patience = fail, 0.0
    for _ in range(ATTEMPTS + 1):
        with pytest.raises(type(error), match=str(error)):
            trainer.produce()
    assert trainer.client.of("publish") == []
    assert {one["error"] for one in trainer.client.of("leave")} == {str(error)}
    trainer.capture.wrong = lambda batch: None
    assert "4 samples" in trainer.produce()
    assert not trainer.skipped


def test_an_error_that_nobody_foresaw_ends_its_producer_and_counts_against_the_batch(
    trainer: Trainer,
) -> None:
    """A batch that takes down whoever captures it must not take down one after the other."""

    def fail(batch: CaptureBatch) -> None:
        if batch.index == 0:
            raise RuntimeError("out of memory")

    trainer.capture.wrong = fail
    for _ in range(ATTEMPTS):
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.produce()
    assert dict(trainer.skipped) == {0: "out of memory", 1: "out of memory"}
    assert "2 samples" in trainer.produce()


# ---------------------------------------------------------------- coming and going


def test_a_producer_that_is_asked_to_stop_leaves_in_peace(trainer: Trainer) -> None:
    def stop(batch: CaptureBatch) -> None:
        trainer.stopped = True

    trainer.capture.wrong = stop
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
            trainer.queue.publish(claimed.claim, put(trainer, 0))

    trainer.capture.wrong = slow
    assert "2 samples" in trainer.produce()
    refusals = [one for one in trainer.client.of("publish") if one["refs"][0]["feature_id"] == "s0"]
    assert len(refusals) == 1


def test_a_trainer_that_begins_again_may_name_another_store(trainer: Trainer) -> None:
    second = Store(trainer.folder / "others")
    opened: list[str] = []

    def open_store(uri: str) -> FeatureStore:
        opened.append(uri)
        return second if uri == second.uri else trainer.store

    def move(batch: CaptureBatch) -> None:
        trainer.queue.about["store"] = second.uri

    trainer.opened = open_store  # type: ignore[method-assign]
    trainer.capture.wrong = move
    trainer.queue.free_refs = lambda refs: None
    trainer.produce()
    assert opened == [trainer.store.uri, second.uri]
    assert (trainer.store.stats().samples, second.stats().samples) == (2, 2)
    assert (trainer.store.closings, second.closings) == (1, 1)


def test_a_run_that_failed_may_go_on_with_its_producers(trainer: Trainer) -> None:
    heard, answer = threading.Event(), trainer.client.service.answer

    def hear(request: Json) -> Json:
        reply = answer(request)
        if reply == {"ended": "failed"}:
            heard.set()
        return reply

    trainer.client.service.answer = hear  # type: ignore[method-assign]
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
    answer = trainer.client.service.answer

    def hear(request: Json) -> Json:
        if request["call"] == "heartbeat":
            beaten.set()
        return answer(request)

    def slow(batch: CaptureBatch) -> None:
        beaten.clear()
        assert beaten.wait(SOON)

    trainer.client.service.answer = hear  # type: ignore[method-assign]
    trainer.capture.wrong = slow
    assert "4 samples" in trainer.produce()
