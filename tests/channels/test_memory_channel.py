"""The channel `memory`: the conformance suite, hysteresis, and runs of random shape."""

import random
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from draftcore_sdk.channels import ChannelSuite

from draftcore.channels import require_metadata
from draftcore.channels.memory import MemoryChannel
from draftcore.contracts.channel import CaptureTask, Channel
from draftcore.contracts.store import SampleRef
from draftcore.data.plan import Plan
from draftcore.errors import UsageError


class TestMemoryChannel(ChannelSuite):
    plugin, name = "draftcore.builtin", "memory"

    @pytest.fixture
    def channel_uri(self) -> str:
        return "memory:"


def test_producers_pause_until_a_good_part_of_the_credit_is_back() -> None:
    plan = Plan([f"s{row}" for row in range(20)], [5] * 20, capture_batch=1, batch=1, seed=0)
    channel = MemoryChannel("run", limit_refs=8)
    channel.offer(plan.captures(0))
    while capture(channel) is not None:
        pass
    assert channel.credit().refs == 0
    credits = []
    for index in range(3):
        assert channel.receive(plan.step(index)) is not None
        channel.advance(index + 1)
        credits.append(channel.credit().refs)
    assert credits == [0, 2, 3]  # one free place is not yet worth a producer's while


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'limit_refs'"):
        MemoryChannel.open("memory:?limit_ref=4", "run")


def capture(channel: Channel, generation: str = "g") -> CaptureTask | None:
    claim = channel.claim("local")
    if claim is not None:
        refs = [SampleRef(name, generation, "x:", (), 1, 10) for name in claim.group.feature_ids]
        channel.publish(claim, refs)
    return claim


@pytest.mark.parametrize("case", range(40))
def test_any_plan_is_served_in_order_under_any_limit(case: int) -> None:
    """Random plans, limits, look-ahead and checkpoints.

    Each ref is released once and none is lost; no group is captured while the trainer has refs of
    it in hand, which the store would then refuse as superseded.
    """
    draw = random.Random(case)
    samples = draw.randint(1, 40)
    plan = Plan(
        [f"s{row}" for row in range(samples)],
        [draw.randint(1, 50) for _ in range(samples)],
        capture_batch=draw.randint(1, 6),
        batch=draw.randint(1, 6),
        seed=case,
        epochs=3,
        window=draw.randint(1, 4),
    )
    channel = MemoryChannel("run", limit_refs=draw.randint(1, 30), limit_bytes=draw.randint(1, 300))
    start = draw.choice([0, draw.randrange(plan.total_steps)])
    channel.offer(plan.captures(start))
    in_hand: dict[str, SampleRef] = {}
    generation = 0

    def capture_one() -> bool:
        nonlocal generation
        generation += 1
        claim = capture(channel, str(generation))
        assert claim is None or in_hand.keys().isdisjoint(claim.group.feature_ids)
        return claim is not None

    for index in range(start, plan.total_steps):
        for _ in range(draw.randint(0, 3)):
            capture_one()
        planned = plan.step(index)
        while (refs := channel.receive(planned)) is None:
            assert capture_one()
        assert [ref.feature_id for ref in refs] == [use.feature_id for use in planned.samples]
        assert all(in_hand.get(ref.feature_id, ref) == ref for ref in refs)
        in_hand |= {ref.feature_id: ref for ref in refs}
        if draw.random() < 0.5:
            for ref in channel.advance(index + 1):
                assert in_hand.pop(ref.feature_id, ref) == ref
    for ref in channel.advance(plan.total_steps):
        assert in_hand.pop(ref.feature_id, ref) == ref
    if start == 0:  # else groups that were half used before the start stay to the end
        assert in_hand == {}
        assert (channel.standing().refs, channel.standing().nbytes) == (0, 0)


@pytest.mark.parametrize("case", range(60))
def test_no_ref_is_freed_that_is_still_to_be_read_whoever_dies(case: int) -> None:
    """Producers die, publish late, twice or failures; half of the cases restart the trainer too.

    The store is a dict. A producer looks there first, so that a late one's refs may be served
    under a later claim; whatever is served must be held, and in the end nothing else may be.
    """
    draw = random.Random(1000 + case)
    samples = draw.randint(4, 40)
    plan = Plan(
        [f"s{row}" for row in range(samples)],
        [5] * samples,
        capture_batch=draw.randint(1, 4),
        batch=draw.randint(1, 6),
        seed=case,
        epochs=3,
        window=draw.randint(1, 4),
    )
    limit, restarts = draw.randint(4, 30), case % 2
    store: dict[str, SampleRef] = {}
    flying: list[tuple[str, CaptureTask, list[SampleRef]]] = []
    late: list[tuple[CaptureTask, list[SampleRef]]] = []

    def start(cursor: int) -> MemoryChannel:
        books = MemoryChannel("run", limit_refs=limit, attempts=10**9)
        books.offer(plan.captures(cursor))
        return books

    def produce() -> None:
        producer = draw.choice("xyz")
        task = books.claim(producer)
        if task is not None:
            ids = task.group.feature_ids
            held = all(feature_id in store for feature_id in ids)
            refs = [store[feature_id] for feature_id in ids] if held else put(task)
            flying.append((producer, task, refs))
        while flying and draw.random() < 0.6:
            producer, task, refs = flying.pop(draw.randrange(len(flying)))
            match draw.choices(["publish", "twice", "fail", "die"], [8, 1, 1, 1])[0]:
                case "publish":
                    books.publish(task, refs)
                case "twice":
                    books.publish(task, refs)
                    books.publish(task, refs)
                case "fail":
                    books.publish(task, RuntimeError("once"))
                case "die":
                    books.leave(producer)
                    late.extend((task, refs) for name, task, refs in flying if name == producer)
                    late.append((task, refs))
                    flying[:] = [entry for entry in flying if entry[0] != producer]
        if late and draw.random() < 0.3:
            task, refs = late.pop(draw.randrange(len(late)))
            if store.keys().isdisjoint(task.group.feature_ids):  # it was frozen before it put them
                refs = put(task)
            books.publish(task, refs)

    def put(task: CaptureTask) -> list[SampleRef]:
        generation = str(draw.random())
        refs = [SampleRef(i, generation, "x:", (), 1, 10) for i in task.group.feature_ids]
        store.update({ref.feature_id: ref for ref in refs})
        return refs

    def free(refs: tuple[SampleRef, ...]) -> None:
        for ref in refs:
            if store.get(ref.feature_id) == ref:
                del store[ref.feature_id]

    books, index, cursor = start(0), 0, 0
    while index < plan.total_steps:
        for _ in range(10_000):
            if (refs := books.receive(plan.step(index))) is not None:
                break
            produce()
        assert refs is not None, "the step is never served"
        assert [ref.feature_id for ref in refs] == [
            use.feature_id for use in plan.step(index).samples
        ]
        assert all(store[ref.feature_id] == ref for ref in refs)
        index += 1
        if draw.random() < 0.7:
            released = books.advance(index)
            produce()  # at the same time
            free(released)
            cursor = index if draw.random() < 0.5 else cursor
            for _ in range(draw.randint(0, 3)):
                produce()
        if restarts and draw.random() < 0.1:
            late += [(task, refs) for _, task, refs in flying]
            flying.clear()
            books, index = start(cursor), cursor
    for entry in late:
        books.publish(*entry)
    free(books.advance(plan.total_steps))
    if not restarts:
        assert store.keys() <= {ref.feature_id for _, _, refs in flying for ref in refs}


def test_a_producer_thread_runs_ahead_and_stops_at_its_credit() -> None:
    plan = Plan(
        [f"s{row}" for row in range(60)], [5] * 60, capture_batch=4, batch=4, seed=0, window=3
    )
    channel = MemoryChannel("run", limit_refs=16)
    channel.offer(plan.captures(0))
    done = threading.Event()

    def produce() -> None:
        while not done.wait(0.0005):
            while capture(channel) is not None:
                pass

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        used = []
        for index in range(plan.total_steps):
            while (refs := channel.receive(plan.step(index))) is None:
                done.wait(0.0005)
            used += [ref.feature_id for ref in refs]
            channel.advance(index + 1)
    finally:
        done.set()
        producer.join()
    assert sorted(used) == sorted(plan.feature_ids)


@dataclass(frozen=True)
class Record:
    data: Any


def test_metadata_may_be_nested_but_must_be_plain() -> None:
    require_metadata(Record({"a": [(1, 2.0, None, True), frozenset({"x"})]}))
    with pytest.raises(TypeError, match=r"Record\.data\['a'\]\[1\] is a bytearray"):
        require_metadata(Record({"a": [1, bytearray(3)]}))


def test_another_end_than_both_is_refused() -> None:
    with pytest.raises(UsageError, match="does not leave its process"):
        MemoryChannel.open("memory:", "run", "producer")
