"""A run that captures for itself: the next step's captures are launched before this one trains.

The thread that trains launches them; another one waits for them and stores them.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftcore.channels.memory import MemoryChannel
from draftcore.contracts.capture import CapturedGroup, CaptureInput
from draftcore.contracts.store import SampleRef, StoreItem
from draftcore.data.plan import Plan
from draftcore.errors import DraftcoreError
from draftcore.features.stores.memory import MemoryStore
from draftcore.feed import Feed, Producer, Source
from draftcore.training.ranks import ALONE

NAMES, WIDTH, LENGTH, STEPS = ("hidden.1",), 4, 3, 6


def planned(rows: int = 2 * STEPS, epochs: int = 1) -> Plan:
    """A plan with a window of one step, so that each step needs one group."""
    names, lengths = [f"s{row}" for row in range(rows)], [LENGTH] * rows
    return Plan(names, lengths, capture_batch=2, batch=2, seed=0, epochs=epochs, window=1)


PLAN = planned()
STEP_BYTES = 2 * LENGTH * (WIDTH * 4 + 8 + 1)
CPU = torch.device("cpu")


class HeldUp(MemoryStore):
    """A store whose puts can be held up, and that notes in which threads they are made."""

    def __init__(self, max_bytes: int | None) -> None:
        super().__init__(max_bytes=max_bytes)
        self.gate, self.begun = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []
        self.gate.set()

    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        self.begun.set()
        assert self.gate.wait(10)
        self.threads.append(threading.current_thread())
        return super().put_many(items)


class Colocated:
    """A feed and its own capture, which notes what it captured, and where."""

    def __init__(
        self,
        overlap: torch.device | None = CPU,
        max_bytes: int | None = None,
        plan: Plan = PLAN,
        durable: bool = False,
    ) -> None:
        self.plan, self.store = plan, HeldUp(max_bytes)
        self.channel = MemoryChannel("run")
        self.captured: list[int] = []
        self.threads: list[threading.Thread] = []
        self.errors: list[Exception] = []
        self.closed = self.stopped = False
        self.feed = Feed(
            ALONE,
            self.store,
            self.source,
            names=NAMES,
            durable=durable,
            ahead=durable,
            overlap=overlap,
        )
        self.feed.finished = True
        self.feed.start(0, lambda: self.stopped, {})

    def source(self) -> Source:
        return Source(
            self.plan,
            self.store,
            self.channel,
            Producer(lambda: self, self, self.store, self.channel, "p"),
            names=NAMES,
            dtype="float32",
            width=WIDTH,
            provenance="p",
        )

    def tokens(self, row: int) -> NDArray[np.int64]:
        return np.full(LENGTH, row)

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return np.ones(LENGTH, dtype=np.bool_)

    def features(self, groups: Iterable[CaptureInput]) -> Iterator[CapturedGroup]:
        for group in groups:
            self.captured.append(group.group.index)
            self.threads.append(threading.current_thread())
            if self.errors:
                raise self.errors.pop()
            rows = [torch.full((LENGTH, WIDTH), float(tokens[0])) for tokens in group.token_ids]
            yield CapturedGroup(group.group, tuple({NAMES[0]: row} for row in rows))

    def close(self) -> None:
        self.closed = True

    def train(self, index: int) -> list[int]:
        """Train on a step, as `train` does; returns the rows whose features it got."""
        with self.feed.samples(self.plan.step(index)) as fetched:
            assert fetched is not None
            if index + 1 < STEPS:
                self.feed.prefetch(self.plan.step(index + 1))
            return [int(fetched.samples[at].features[NAMES[0]][0, 0]) for at in range(2)]


@pytest.fixture
def run() -> Iterator[Colocated]:
    made = Colocated()
    yield made
    made.store.gate.set()
    with suppress(DraftcoreError):  # a test may have closed it
        made.feed.close()


def test_the_next_step_is_captured_while_this_one_trains(run: Colocated) -> None:
    with run.feed.samples(PLAN.step(0)):
        run.store.gate.clear()
        run.feed.prefetch(PLAN.step(1))
        assert len(run.captured) == 2, "it is launched, and nobody waits for it"
        run.store.gate.set()
        run.feed.settle()
    run.feed.release(PLAN.step(0))
    assert run.train(1) == list(PLAN.step(1).rows)
    assert set(run.threads) == {threading.current_thread()}, "who trains launches"
    first, *others = run.store.threads
    assert first is threading.current_thread()
    assert len(set(others)) == 1
    assert first not in others, "another thread waits and stores"


def test_without_overlap_a_step_is_captured_when_it_is_needed() -> None:
    run = Colocated(overlap=None)
    run.train(0)
    assert len(run.captured) == 1
    assert set(run.threads) == {threading.current_thread()}
    run.feed.close()


def trained(overlap: torch.device | None, plan: Plan) -> tuple[list[list[int]], list[int]]:
    """The rows of every step, and the groups in the order of their captures."""
    run, rows, ahead = Colocated(overlap, plan=plan), [], []
    for index in range(STEPS):
        rows.append(run.train(index))
        run.feed.release(plan.step(index))
        ahead.append(len(run.captured) - (index + 1))
    run.feed.close()
    assert max(ahead) == (overlap is not None), "one step ahead, and no more"
    return rows, run.captured


def test_steps_and_captures_have_the_same_order_either_way() -> None:
    assert trained(CPU, PLAN) == trained(None, PLAN)
    assert trained(CPU, PLAN)[0] == [list(PLAN.step(index).rows) for index in range(STEPS)]


def test_an_epoch_may_begin_with_what_the_last_one_still_holds() -> None:
    """Looked for earlier, a group may not have been let go yet: it is not captured again."""
    plan = planned(rows=STEPS, epochs=2)
    rows, captured = trained(None, plan)
    assert captured == [2, 1, 0, 1, 2, 0]
    assert trained(CPU, plan) == (rows, [2, 1, 0, 2, 0])


def test_the_first_capture_is_made_while_nobody_trains(run: Colocated) -> None:
    """It loads the target and may record graphs, which other threads would disturb."""
    run.feed.prefetch(PLAN.step(0))
    run.feed.settle()
    assert run.captured == []
    assert run.train(0) == list(PLAN.step(0).rows)


def test_no_more_is_launched_than_a_step_has_samples() -> None:
    """A step of mixed samples needs a group for each; they would all lie on the device."""
    run = Colocated(plan=Plan([f"s{row}" for row in range(24)], [LENGTH] * 24, capture_batch=2,
                              batch=4, seed=0, window=6))  # fmt: skip
    with run.feed.samples(run.plan.step(0)):
        held = len(run.captured)
        run.feed.prefetch(run.plan.step(1))
        assert len(run.captured) == held + 2
        run.feed.settle()
    run.feed.release(run.plan.step(0))
    with run.feed.samples(run.plan.step(1)) as fetched:
        assert fetched is not None
        assert len(fetched.samples) == 4
    assert len(run.captured) > held + 2, "else there is nothing to bound"
    run.feed.close()


def test_what_the_store_holds_is_opened_ahead_and_not_captured() -> None:
    run = Colocated(durable=True, plan=planned(rows=STEPS, epochs=2))
    for index in range(3):
        run.train(index)
        run.feed.release(run.plan.step(index))
    deadline = time.monotonic() + 10
    while run.store.stats().open_handles < 2:
        assert time.monotonic() < deadline
    for index in range(3, STEPS):
        assert run.train(index) == list(run.plan.step(index).rows)
        run.feed.release(run.plan.step(index))
    assert len(run.captured) == 3
    assert run.store.stats().open_handles == 0
    run.feed.close()


def test_an_error_is_raised_by_the_step_that_needs_the_features(run: Colocated) -> None:
    with run.feed.samples(PLAN.step(0)):
        run.errors += [DraftcoreError("row 3 is odd"), DraftcoreError("row 3 is odd")]
        run.feed.prefetch(PLAN.step(1))
        run.feed.settle()
    run.feed.release(PLAN.step(0))
    with pytest.raises(DraftcoreError, match="row 3 is odd"):
        run.train(1)


@pytest.mark.parametrize("waits", ["settle", "beside", "release"])
def test_who_uses_the_target_or_frees_features_waits_for_the_capture(
    run: Colocated, waits: str
) -> None:
    with run.feed.samples(PLAN.step(0)):
        run.store.begun.clear()
        run.store.gate.clear()
        run.feed.prefetch(PLAN.step(1))
        assert run.store.begun.wait(10)
    threading.Timer(0.05, run.store.gate.set).start()
    if waits == "settle":
        run.feed.settle()
    elif waits == "beside":
        run.feed.beside(lambda: None)
    else:
        run.feed.release(PLAN.step(0))
    assert len(run.store.threads) == 2


def test_a_full_store_is_asked_again_when_the_step_before_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the target is run once for it."""
    run = Colocated(max_bytes=STEP_BYTES)
    for index in range(3):
        assert run.train(index) == list(PLAN.step(index).rows)
        run.feed.release(PLAN.step(index))
    run.feed.close()
    assert len(run.captured) == len(set(run.captured)) == 4, "the next step's is captured already"
    assert caplog.text.count("no room for the next step's features") == 1
    assert "train.overlap=false" in caplog.text


def test_a_device_without_memory_for_both_is_asked_again_too(run: Colocated) -> None:
    run.train(0)
    run.feed.settle()
    run.feed.release(PLAN.step(0))
    run.errors.append(torch.OutOfMemoryError("out of memory"))
    run.train(1)
    run.feed.settle()
    run.feed.release(PLAN.step(1))
    assert run.train(2) == list(PLAN.step(2).rows)
    assert run.captured[2] == run.captured[3]


def test_a_stop_begins_no_further_capture(run: Colocated) -> None:
    run.train(0)
    run.feed.release(PLAN.step(0))
    run.stopped = True
    run.feed.prefetch(PLAN.step(5))
    run.feed.settle()
    assert len(run.captured) == 2
    with run.feed.samples(PLAN.step(5)) as fetched:
        assert fetched is None


def test_closing_in_the_middle_leaves_nothing_behind(run: Colocated) -> None:
    with run.feed.samples(PLAN.step(0)):
        run.store.begun.clear()
        run.store.gate.clear()
        run.feed.prefetch(PLAN.step(1))
        assert run.store.begun.wait(10)
    threading.Timer(0.05, run.store.gate.set).start()
    run.feed.close()
    assert run.closed
    assert not run.store.threads[1].is_alive()
    assert run.store.stats().open_handles == run.store.stats().samples == 0


def test_a_second_ctrl_c_waits_for_no_capture() -> None:
    code = (
        "import signal, time; from draftcore.feed.aside import Aside\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & had it ignored\n"
        "aside = Aside(); aside.begin(lambda: time.sleep(60)); print('began', flush=True)\n"
        "aside.close()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=50)
    assert time.monotonic() - began < 30


def teardown_module() -> None:
    with suppress(StopIteration):  # every feed of these tests was closed
        left = next(t for t in threading.enumerate() if t.name == "aside")
        raise AssertionError(f"{left} is still there")
