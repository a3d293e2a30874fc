"""The feed: a step's features are opened while the one before is trained on, and nothing else."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from draftcore_shm.store import ShmStore

from draftcore.channels.memory import MemoryChannel
from draftcore.contracts.channel import CaptureTask
from draftcore.contracts.store import StoreItem
from draftcore.data.plan import Plan
from draftcore.errors import DraftcoreError
from draftcore.feed import TEXT, Feed, Source
from draftcore.feed.steps import Fetched
from draftcore.training.ranks import ALONE

NAMES, WIDTH, LENGTH = ("hidden.1",), 4, 3
PLAN = Plan([f"s{row}" for row in range(8)], [LENGTH] * 8, capture_batch=2, batch=2, seed=0)


class Elsewhere:
    """A run whose features are put into a ring and published as if by another process."""

    def __init__(self) -> None:
        self.store = ShmStore(f"feed-{uuid.uuid4().hex}", max_bytes=1 << 20)
        self.channel = MemoryChannel("run", attempts=2)
        self.feed = Feed(ALONE, self.store, self.source, names=NAMES, durable=False, ahead=True)
        self.feed.finished = True  # nothing of it is needed once it is closed
        self.feed.start(0, lambda: False, {})

    def source(self) -> Source:
        return Source(
            PLAN,
            self.store,
            self.channel,
            None,
            names=NAMES,
            dtype="float32",
            width=WIDTH,
            provenance="p",
        )

    def capture(self, groups: int = 4, width: int = WIDTH) -> None:
        for task in filter(None, (self.channel.claim("other") for _ in range(groups))):
            self.channel.publish(task, self.store.put_many([item(i, width) for i in ids(task)]))

    def opened(self) -> int:
        return self.store.stats().open_handles


def ids(task: CaptureTask) -> tuple[str, ...]:
    return task.group.feature_ids


def item(feature_id: str, width: int) -> StoreItem:
    row = int(feature_id[1:])
    hidden = torch.full((LENGTH, width), float(row))
    text = {name: torch.full((LENGTH,), row) for name in TEXT}
    return StoreItem(feature_id, {NAMES[0]: hidden, **text}, LENGTH, "p")


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    run = Elsewhere()
    yield run
    with suppress(DraftcoreError):  # a test may have closed it
        run.feed.close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def rows(fetched: Fetched | None) -> list[int]:
    assert fetched is not None
    return [int(fetched.samples[at].features[NAMES[0]][0, 0]) for at in range(2)]


def test_the_next_step_is_open_before_this_one_is_done(elsewhere: Elsewhere) -> None:
    elsewhere.capture()
    with elsewhere.feed.samples(PLAN.step(0)) as fetched:
        assert rows(fetched) == list(PLAN.step(0).rows)
        assert elsewhere.opened() == 2
        elsewhere.feed.prefetch(PLAN.step(1))
        eventually(lambda: elsewhere.opened() == 4)
    elsewhere.feed.release(PLAN.step(0))
    assert elsewhere.opened() == 2, "the next step stays open"
    with elsewhere.feed.samples(PLAN.step(1)) as fetched:
        assert elsewhere.opened() == 2, "it is not opened a second time"
        assert rows(fetched) == list(PLAN.step(1).rows)
    assert elsewhere.opened() == 0


def test_what_is_not_captured_yet_is_not_waited_for(elsewhere: Elsewhere) -> None:
    elsewhere.capture(groups=2)
    first = [step for step in range(4) if elsewhere.channel.receive(PLAN.step(step))]
    missing = next(step for step in range(4) if step not in first)
    began = time.monotonic()
    elsewhere.feed.prefetch(PLAN.step(missing))
    assert time.monotonic() - began < 5
    elsewhere.capture(groups=2)
    with elsewhere.feed.samples(PLAN.step(missing)) as fetched:
        assert rows(fetched) == list(PLAN.step(missing).rows)


def test_a_step_that_was_opened_in_vain_is_closed(elsewhere: Elsewhere) -> None:
    elsewhere.capture()
    elsewhere.feed.prefetch(PLAN.step(1))
    with elsewhere.feed.samples(PLAN.step(0)):
        assert elsewhere.opened() == 2
    elsewhere.feed.prefetch(PLAN.step(1))
    eventually(lambda: elsewhere.opened() == 2)
    elsewhere.feed.close()
    with pytest.raises(DraftcoreError, match="closed"):
        elsewhere.opened()


def test_what_does_not_fit_is_left_to_the_step_that_needs_it(elsewhere: Elsewhere) -> None:
    elsewhere.capture(width=WIDTH + 1)
    held = elsewhere.store.stats().samples
    elsewhere.feed.prefetch(PLAN.step(0))
    assert elsewhere.store.stats().samples == held, "nothing is freed while another step is read"


def test_what_was_lost_meanwhile_is_captured_again(elsewhere: Elsewhere) -> None:
    elsewhere.capture()
    for feature_id in PLAN.feature_ids:
        elsewhere.store.abort(feature_id)
    elsewhere.feed.prefetch(PLAN.step(0))
    seen: list[int] = []

    def capture_again() -> bool:
        seen.append(1)
        elsewhere.capture()
        return False

    elsewhere.feed.source.stop = capture_again
    with elsewhere.feed.samples(PLAN.step(0)) as fetched:
        assert rows(fetched) == list(PLAN.step(0).rows)
    assert seen
