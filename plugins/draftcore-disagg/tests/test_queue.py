"""The queue: what is handed out, taken, taken back and freed, in which order, and what fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
from draftcore_disagg import queue as module
from draftcore_disagg.channel import Json, Task
from draftcore_disagg.queue import ATTEMPTS, Queue, QueueService, RemoteQueue
from queueing import LENGTH, SOON, Loopback, task

from draftcore.contracts.capture import BadRows, CaptureBatch, Image
from draftcore.contracts.run import RunEnded
from draftcore.contracts.store import SampleRef, StoreAway, StoreFull
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError

FULL = StoreFull("file:x", needed=7, samples=2, free=3, limit="max_bytes=9 B", remedy="free some")


def refs(task: Task, generation: str = "g") -> tuple[SampleRef, ...]:
    return tuple(SampleRef(one, generation, "", (), LENGTH, 5) for one in task.batch.ids)


def named(*rows: int, generation: str = "g") -> list[str]:
    """What `Run.freed` has of these rows."""
    return [f"s{row}.{generation}" for row in rows]


@dataclass
class Run:
    """A queue with a store that only notes what is freed."""

    sizes: Sequence[int] = (10,) * 6
    ahead: int = 100
    limit: int | None = None
    share: float = 1.0
    indices: Sequence[int] = range(6)
    wrong: str = ""  # a generation whose refs do not fit
    ttl: float = module.TTL

    def __post_init__(self) -> None:
        self.freed: list[str] = []
        self.away = False
        self.skips = Skipped({}, rows=2 * len(self.sizes), share=self.share)
        self.queue = Queue(
            {"store": "file:x"}, ahead=self.ahead, limit=self.limit, skipped=self.skips,
            free=self.free, ref_error=self.ref_error, ttl=self.ttl,
        )  # fmt: skip
        sized = enumerate(zip(self.sizes, self.indices, strict=False))
        self.queue.offer(iter([task(at, nbytes, index) for at, (nbytes, index) in sized]), 0)

    def free(self, refs: Sequence[SampleRef]) -> None:
        if self.away:
            raise StoreAway("not now")
        self.freed += [f"{ref.feature_id}.{ref.generation}" for ref in refs]

    def ref_error(self, batch: CaptureBatch, refs: Sequence[SampleRef]) -> BadRows | None:
        return BadRows({0: "it does not fit"}) if refs[0].generation == self.wrong else None

    def claim(self, producer: str = "a", count: int = 1) -> list[Task]:
        return self.queue.claim(producer, count, 0)

    def claims(self, producer: str = "a", count: int = 1) -> list[int]:
        """Claim tasks, and return their positions."""
        return [one.position for one in self.claim(producer, count)]

    def capture(
        self, producer: str = "a", generation: str = "g", error: Exception | None = None
    ) -> Task:
        """Claim one task and publish it, or why that failed."""
        (claimed,) = self.claim(producer)
        assert self.queue.publish(claimed.claim, error or refs(claimed, generation))
        return claimed

    def waiting(self, beside: Beside, producer: str) -> Future[list[Task]]:
        """Let a producer wait for a task."""
        claim, until = beside(self.queue.claim, producer, 1, 50 * SOON), time.monotonic() + SOON
        while producer not in self.queue.seen:
            assert time.monotonic() < until
            time.sleep(0.001)
        return claim

    def received(self, position: int, **released: Any) -> list[str] | None:
        found = self.queue.receive(position, 0, **released)
        return None if found is None else [ref.feature_id for ref in found]


class Clock:
    """The time that the queue sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


Beside = Callable[..., Future[Any]]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    """Call something in another thread, which would wait far longer than a test may last."""
    monkeypatch.setattr(module, "LONGEST_WAIT", 100 * SOON)
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


# ---------------------------------------------------------------- claims


def test_tasks_are_claimed_once_and_in_the_plans_order_whoever_asks() -> None:
    run = Run()
    claimed = [run.claim("a"), run.claim("b", 2), run.claim("c"), run.claim("d", 5)]
    assert [[one.position for one in found] for found in claimed] == [[0], [1, 2], [3], [4, 5]]
    assert run.claim("e") == []
    assert len({one.claim for found in claimed for one in found}) == 6
    run.queue.ttl = 0.05
    assert run.queue.claim("f", 1, wait=5)[0].position == 0, "it waited while another went silent"


@pytest.mark.parametrize("most", [{"ahead": 2}, {"limit": 25}])
def test_no_more_is_claimed_than_may_be_held(most: dict[str, Any]) -> None:
    """So many batches, or the bytes that claims reserve."""
    run = Run(**most)
    for done, claimed in ((0, [0, 1]), (1, [2])):
        run.queue.advance(done)
        assert run.claims(f"after {done}", 5) == claimed
        assert run.queue.status().nbytes == 20
        assert run.claim("b") == []


def test_a_batch_without_room_is_not_overtaken_by_a_smaller_one() -> None:
    """Else small batches could keep the one that is needed first waiting for ever."""
    run = Run(sizes=(10, 20, 1), limit=25)
    assert run.claims("a", 3) == [0]
    run.queue.advance(1)
    assert run.claims("b", 3) == [1, 2]


@pytest.mark.parametrize("way", ["leave", "silence"])
def test_a_lost_claim_keeps_its_reservation_and_is_handed_out_first(way: str, clock: Clock) -> None:
    run = Run(limit=20)
    (lost,), _ = run.claim("a"), run.claim("b")
    clock.now += module.TTL - 1
    run.queue.heartbeat("b")
    if way == "leave":
        run.queue.leave("a")
    else:
        clock.now += 2
    (found,) = run.claim("c", 5)
    assert found.position == 0
    assert found.claim != lost.claim
    assert run.queue.status().nbytes == 20
    assert run.queue.status().producers == 2


# ---------------------------------------------------------------- publications


def test_what_was_published_is_received_by_position_and_freed_once_it_is_trained_on() -> None:
    run = Run()
    for _ in range(2):
        run.capture()
    for position, rows in ((1, ["s2", "s3"]), (0, ["s0", "s1"]), (0, ["s0", "s1"]), (2, None)):
        assert run.received(position) == rows, "a reply may be lost"
    assert run.queue.status().captured == 4
    assert run.freed == []
    run.queue.advance(1)
    assert run.freed == named(0, 1)
    run.queue.advance(2)
    assert run.freed == named(0, 1, 2, 3)


def test_what_was_never_claimed_is_not_published() -> None:
    run = Run()
    run.capture()
    run.claim("b")
    run.queue.leave("b")
    for claim in ("", "made up"):
        assert not run.queue.publish(claim, refs(task(1)))
        assert run.received(1) is None
        assert run.freed[-2:] == named(2, 3)
    assert run.queue.status().producers == 1


def test_refs_that_do_not_fit_are_freed_and_captured_again_and_cost_their_own_rows_alone() -> None:
    run = Run(wrong="odd")
    for _ in range(ATTEMPTS):
        assert not run.skips
        assert run.capture("a", "odd").position == 0
        assert run.freed[-2:] == named(0, 1, generation="odd")
    assert dict(run.skips) == {0: "it does not fit"}
    run.capture("b")
    assert run.received(0) == ["s1"]


def test_a_batch_of_two_epochs_shares_its_refs_and_is_freed_after_the_second_use() -> None:
    """Its rows have one id, under which a store keeps them once."""
    run = Run(indices=(0, 1, 0))
    for _ in range(3):
        run.capture()
    run.queue.advance(1)
    assert run.freed == []
    assert run.received(2) == ["s0", "s1"]
    run.queue.advance(3)
    assert sorted(run.freed) == named(0, 1, 2, 3)


# ---------------------------------------------------------------- failures


def test_a_bad_row_is_left_out_with_its_images_and_its_batch_goes_on_without_it() -> None:
    run, one = Run(), task(0)
    images = ((Image("a", "1"),), (Image("b", "2"),))  # told by a row's place in its batch
    run.queue.offer(iter([replace(one, batch=replace(one.batch, images=images))]), 0)
    run.capture(error=BadRows({1: "row 1 holds nan"}))
    again = run.capture("b")
    left = CaptureBatch(0, (0,), ("s0",), ([0, 0, 0],), images[:1])
    assert (again.position, again.batch) == (0, left)
    assert again.loss_masks == ([True, False, True],)
    assert run.received(0) == ["s0"]
    assert dict(run.skips) == {1: "row 1 holds nan"}


@pytest.mark.parametrize(
    "error",
    [DraftcoreError("no"), BadRows({}), BadRows({2: "no such row"}), BadRows({-1: "no such row"})],
)
def test_a_batch_that_fails_too_often_is_skipped(error: DraftcoreError) -> None:
    """Also where the rows that are named as bad are none of it. A claim that is lost is no attempt."""
    run = Run()
    for number in range(3 * ATTEMPTS):
        run.claim(f"dies {number}")
        run.queue.leave(f"dies {number}")
    for attempt in range(ATTEMPTS):
        assert run.received(0) is None
        assert run.capture(f"p{attempt}", error=error).position == 0
    assert run.received(0) == []
    assert dict(run.skips) == dict.fromkeys((0, 1), str(error))
    assert run.claims() == [1]


def test_more_skipped_rows_than_may_be_end_the_run_and_are_named() -> None:
    run = Run(share=0.1)  # of 12 rows: one
    run.capture(error=BadRows({0: "row 0 is odd"}))
    assert run.received(0) is None
    run.capture()
    run.capture(error=BadRows({1: "row 3 is odd"}))
    for end in (run.queue, RemoteQueue(Loopback(run.queue))):
        with pytest.raises(DraftcoreError, match="1 may be skipped") as caught:
            end.receive(0, 0)
        for part in ("row 0: row 0 is odd", "row 3: row 3 is odd", "data.max_skipped"):
            assert part in str(caught.value)


def test_the_last_producer_that_leaves_with_an_error_ends_the_run_with_it(clock: Clock) -> None:
    """After a while in which another may come. Who leaves in peace is waited for."""
    run = Run()
    for left, error, waited in (
        (("a", "b"), "sglang is not installed", module.NO_PRODUCER - 1),
        (("c",), "", 10 * module.NO_PRODUCER),
        (("d",), "no server answers", module.NO_PRODUCER - 1),
    ):
        for name in left:
            run.claim(name)
        for name in left:
            clock.now += 1
            run.queue.leave(name, error)
        clock.now += waited
        assert run.received(0) is None
    clock.now += 2
    with pytest.raises(DraftcoreError, match="no producer works for this run\n  no server answers"):
        run.received(0)


# ---------------------------------------------------------------- a store that is full


def test_a_full_store_gives_up_all_that_is_needed_later_until_the_refused_batch_has_room() -> None:
    """And nothing later is captured meanwhile: a fast producer could fill what was freed."""
    run = Run()
    (first,) = run.claim("slow")
    for _ in range(3):
        run.capture("fast")
    assert run.queue.publish(first.claim, FULL)
    assert run.freed == named(*range(2, 8))
    assert run.received(1) is None
    (first,) = run.claim("slow")
    assert first.position == 0
    assert run.claim("fast") == []
    run.queue.publish(first.claim, refs(first))
    assert run.claims("fast", 3) == [1, 2, 3]


def test_what_a_loader_received_is_not_taken_back() -> None:
    run = Run()
    (first,) = run.claim("slow")
    for _ in range(2):
        run.capture("fast")
    assert run.received(2) == ["s4", "s5"]
    run.queue.publish(first.claim, FULL)
    assert run.freed == named(2, 3)
    run.capture("slow", error=FULL)
    assert run.claim("slow") == [], "it waits until the loader lets go"
    assert run.received(0) is None
    run.received(0, released=[2])
    assert run.freed == named(2, 3, 4, 5)
    assert run.claims("slow") == [0]


def test_a_refused_batch_is_tried_again_once_a_late_publication_is_freed() -> None:
    """Whose bytes it found in its place: nothing else would ever wake it."""
    run = Run()
    (first,), (late,) = run.claim("a"), run.claim("b")
    run.queue.leave("b")
    run.capture("c", error=DraftcoreError("no"))
    run.claim("c")
    run.queue.publish(first.claim, FULL)
    assert not run.queue.publish(late.claim, refs(late))
    assert run.claims("a") == [0]


def test_a_batch_that_does_not_fit_alone_ends_the_run_with_the_stores_figures() -> None:
    """Tried twice: at the first time another may have been there, which is gone by now."""
    run = Run()
    run.capture(error=FULL)
    assert run.received(0) is None
    run.capture(error=FULL)
    with pytest.raises(DraftcoreError, match="needed: 7 B") as caught:
        run.received(0)
    assert "too small for one batch: raise max_bytes" in str(caught.value)


# ---------------------------------------------------------------- letting go, and the end


def test_a_rank_that_is_slow_keeps_what_it_reads() -> None:
    run = Run(ahead=3)
    for _ in range(3):
        run.capture()
    run.received(2, released=[1])
    assert run.freed == named(2, 3)
    assert run.claim() == [], "as 0 is still in use"
    assert run.received(0) == ["s0", "s1"]


def test_a_store_that_stays_away_ends_the_run_and_is_waited_for_once() -> None:
    run = Run()
    for _ in range(2):
        run.capture()
    run.away = True
    run.queue.advance(1)
    run.away = False
    run.queue.end("failed")
    assert run.freed == []
    with pytest.raises(StoreAway, match="not now"):
        run.received(1)


def test_what_cannot_be_read_is_captured_again_and_skipped_in_the_end() -> None:
    """A rejection that comes before, twice or too late harms nothing."""
    run = Run()
    run.queue.reject(0, "never captured")
    for attempt in range(ATTEMPTS):
        run.capture(generation=f"g{attempt}")
        assert run.received(0) == ["s0", "s1"]
        for _ in range(2):
            run.queue.reject(0, "sample s0 is torn")
        assert run.freed == [f"s{row}.g{at}" for at in range(attempt + 1) for row in (0, 1)]
    assert run.received(0) == []
    assert dict(run.skips) == dict.fromkeys((0, 1), "sample s0 is torn")
    run.capture()
    run.queue.advance(2)
    run.queue.reject(1, "too late")
    assert run.freed[-2:] == named(2, 3)
    assert run.claims() == [2]


# ---------------------------------------------------------------- waiting


def test_a_loader_that_waits_wakes_when_its_batch_is_published_or_the_run_fails(
    beside: Beside,
) -> None:
    run = Run(share=0.0, ttl=1e6)
    waiting = beside(run.queue.receive, 1, 50 * SOON)
    run.capture()
    assert not waiting.done()
    run.capture()
    assert [ref.feature_id for ref in waiting.result(SOON)] == ["s2", "s3"]
    waiting = beside(run.queue.receive, 2, 50 * SOON)
    run.capture(error=BadRows({0: "odd", 1: "odd"}))
    with pytest.raises(DraftcoreError, match="cannot be trained on"):
        waiting.result(SOON)


def test_a_change_that_makes_work_for_several_producers_wakes_them_all(beside: Beside) -> None:
    """One is woken by the change, so that hundreds do not look at once, and each wakes the next."""
    run = Run(ahead=3, ttl=1e6)
    for _ in range(3):
        run.capture()
    waiting = [run.waiting(beside, name) for name in "bcd"]
    run.queue.advance(3)
    assert sorted(one.result(SOON)[0].position for one in waiting) == [3, 4, 5]
    waiting = [run.waiting(beside, name) for name in "xy"]
    for state in ("finished", "failed"):  # what was said first holds
        run.queue.end(state)
    for one in waiting:
        with pytest.raises(RunEnded, match="the run has finished"):
            one.result(SOON)
    assert run.queue.seen.keys() == {"a", "b", "c", "d"}


# What the first producer does with its claim, what then makes work for another, and which.
FAILED = DraftcoreError("try again")
WAKES: dict[str, tuple[Exception | str, Callable[[Run], object], int]] = {
    "advance": ("publishes", lambda run: run.queue.advance(1), 1),
    "release": ("publishes", lambda run: run.queue.receive(1, 0, released=[0]), 1),
    "reject": ("publishes", lambda run: run.queue.reject(0, "torn"), 0),
    "failure": (FAILED, lambda run: None, 0),
    "leave": ("keeps", lambda run: run.queue.leave("a"), 0),
    "offer": ("keeps", lambda run: run.queue.offer(iter([task(1)]), 1), 1),
}


@pytest.mark.parametrize(("first", "wake", "wanted"), WAKES.values(), ids=WAKES)
def test_a_producer_that_waits_wakes_when_there_is_something_to_capture(
    beside: Beside, first: Exception | str, wake: Callable[[Run], object], wanted: int
) -> None:
    run = Run(ahead=1, ttl=1e6)
    (claimed,) = run.claim("a")
    waiting = run.waiting(beside, "b")
    if first == "publishes":
        run.queue.publish(claimed.claim, refs(claimed))
        assert run.received(0) == ["s0", "s1"]
    elif isinstance(first, Exception):
        run.queue.publish(claimed.claim, first)
    wake(run)
    assert waiting.result(SOON)[0].position == wanted


# ---------------------------------------------------------------- through a channel


def test_another_process_may_repeat_itself_and_rejects_and_releases_what_it_received() -> None:
    run = Run()
    far = RemoteQueue(Loopback(run.queue))
    for generation in "gh":
        ((claimed,), _) = far.claim(1, 0)
        assert claimed.position == 0
        for _ in range(2):
            assert far.publish(claimed.claim, refs(claimed, generation))
        assert far.receive(0, 0) == refs(claimed, generation)
        if generation == "g":
            far.reject(0, "torn")
        else:
            assert far.receive(1, 0, released=[0]) is None
        assert run.freed[-2:] == named(0, 1, generation=generation)


def test_a_request_that_no_producer_sends_is_answered_by_an_error_and_changes_nothing() -> None:
    run = Run()
    run.capture()
    (claimed,) = run.claim()
    claim, publish = {"call": "claim", "count": 1}, {"call": "publish", "claim": "c"}
    requests: list[Json] = [
        {"call": "offer"}, {"call": "leave"}, {"call": "reject", "position": []},
        {"call": "claim"}, claim | {"count": "many"}, claim | {"count": float("inf")},
        claim | {"wait": "long"}, {"call": "publish"}, publish | {"refs": 3},
        publish | {"refs": [{"feature_id": "a"}]}, publish | {"failed": "no"},
        publish | {"failed": {"rows": [1]}}, {"call": "receive", "position": None},
        {"call": "receive", "position": 0, "released": 5},
    ]  # fmt: skip
    for request in [{}, {"producer": "x"}, *({"producer": "x", **one} for one in requests)]:
        assert "error" in QueueService(run.queue).answer(request), request
    assert run.queue.publish(claimed.claim, refs(claimed))
    assert [run.received(0), run.received(1)] == [["s0", "s1"], ["s2", "s3"]]
    assert run.claims() == [2]


def test_a_task_passes_as_json_to_the_bit() -> None:
    """Token ids up to 31 bits; masks of a length that is no multiple of eight."""
    tokens = ([0, 1, 2**31 - 1], list(range(17)))
    masks = ([True, False, True], [at % 3 == 0 for at in range(17)])
    images = ((), (Image("/tmp/a.png", "c0ffee"),))
    sent = Task(7, CaptureBatch(3, (4, 9), ("a", "b"), tokens, images), masks, 123, "claim")
    assert Task.from_json(json.loads(json.dumps(sent.to_json()))) == sent
