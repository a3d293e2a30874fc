"""A store that holds hardly more than one step: whoever claims what when, every step is served."""

import random
from collections.abc import Sequence

import pytest

from draftcore.channels.memory import MemoryChannel
from draftcore.contracts.channel import CaptureTask, PlannedStep
from draftcore.contracts.store import SampleRef
from draftcore.data.plan import Plan


class Heap:
    """A store of contiguous blocks, each put at the first place where it fits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[SampleRef, int] = {}  # where each begins

    def put(self, refs: Sequence[SampleRef]) -> bool:
        before = dict(self.blocks)
        again = {ref.feature_id for ref in refs}
        self.blocks = {ref: at for ref, at in before.items() if ref.feature_id not in again}
        for ref in refs:
            ends = sorted((at + old.nbytes) for old, at in self.blocks.items())
            place = next((at for at in [0, *ends] if self.is_free(at, ref.nbytes)), None)
            if place is None:
                self.blocks = before
                return False
            self.blocks[ref] = place
        return True

    def is_free(self, start: int, nbytes: int) -> bool:
        others = ((at, at + old.nbytes) for old, at in self.blocks.items())
        apart = all(end <= start or start + nbytes <= at for at, end in others)
        return apart and start + nbytes <= self.size

    def free(self, refs: Sequence[SampleRef]) -> None:
        for ref in refs:
            self.blocks.pop(ref, None)

    def lookup(self, task: CaptureTask) -> list[SampleRef] | None:
        held = {ref.feature_id: ref for ref in self.blocks}
        found = [held[i] for i in task.group.feature_ids if i in held]
        return found if len(found) == len(task.group.rows) else None


class Shop:
    """Producers that take turns by chance, as slow or quick as chance has it."""

    def __init__(self, plan: Plan, draw: random.Random, size: int, producers: int) -> None:
        self.plan, self.draw, self.store = plan, draw, Heap(size)
        self.channel = MemoryChannel("run")
        self.channel.offer(plan.captures(0))
        self.hands: dict[str, tuple[CaptureTask, list[SampleRef]] | None]
        self.hands = dict.fromkeys(map(str, range(producers)))
        self.captures = 0

    def work(self) -> None:
        name = self.draw.choice(list(self.hands))
        held = self.hands[name]
        if held is None:
            task = self.channel.claim(name)
            self.hands[name] = None if task is None else (task, self.features(task))
            return
        task, refs = held
        if all(ref in self.store.blocks for ref in refs) or self.store.put(refs):
            if self.draw.random() < 0.7:  # else it dawdles between the put and the word
                self.channel.publish(task, refs)
                self.hands[name] = None
        elif self.draw.random() < 0.05:  # it dies, and is started again
            self.channel.leave(name)
            self.hands[name] = None
        elif not self.channel.wait_for_room(task, 0.0):
            self.hands[name] = None

    def features(self, task: CaptureTask) -> list[SampleRef]:
        if (held := self.store.lookup(task)) is not None:
            return held
        self.captures += 1
        return [
            SampleRef(i, f"put {self.captures}", "x:", (), 1, self.plan.length(row))
            for i, row in zip(task.group.feature_ids, task.group.rows, strict=True)
        ]

    def serve(self, step: PlannedStep) -> int:
        """Wait for a step; returns how often the store was emptied for it."""
        rounds = 0
        for _ in range(2000):
            if (refs := self.channel.receive(step)) is not None:
                assert [ref.feature_id for ref in refs] == [s.feature_id for s in step.samples]
                assert all(ref in self.store.blocks for ref in refs)
                return rounds
            self.work()
            spare = self.channel.evict(step, self.plan.captures(step.index))
            rounds += bool(spare)
            self.work()  # a group is not handed out while its refs are being freed
            self.store.free(spare)
        pytest.fail(f"step {step.index} is never served")


def plan_of(draw: random.Random) -> Plan:
    samples = draw.randint(8, 60)
    return Plan(
        [f"s{row}" for row in range(samples)],
        [draw.randint(20, 60) for _ in range(samples)],
        capture_batch=draw.randint(1, 5),
        batch=draw.randint(1, 5),
        seed=draw.randint(0, 99),
        epochs=2,
        window=draw.randint(1, 8),
    )


def need(plan: Plan, step: PlannedStep) -> int:
    """The bytes of a step's groups."""
    groups = [group for group in plan.groups if not set(group.rows).isdisjoint(step.rows)]
    return sum(plan.length(row) for group in groups for row in group.rows)


@pytest.mark.parametrize("case", range(80))
def test_a_store_that_just_holds_each_step_serves_them_all(case: int) -> None:
    draw = random.Random(case)
    plan = plan_of(draw)
    steps = [plan.step(index) for index in range(plan.total_steps)]
    shop = Shop(plan, draw, max(need(plan, step) for step in steps), draw.randint(1, 4))
    rounds = []
    for step in steps:
        for _ in range(draw.randint(0, 6)):
            shop.work()
        rounds.append(shop.serve(step))
        shop.store.free(shop.channel.advance(step.index + 1))
    # Each producer may bring in one group that is not needed; the last round empties the store.
    assert max(rounds) <= 2 + len(shop.hands)
    held = sum(len(refs) for _, refs in filter(None, shop.hands.values()))
    assert shop.channel.standing().refs <= held  # no use was counted twice


def test_a_smaller_window_needs_less_store() -> None:
    assert peak(window=4) < peak(window=16) / 2 < peak(window=64) / 4


def peak(window: int) -> int:
    """The samples held at once by a run that captures nothing ahead."""
    ids, lengths = [f"s{row}" for row in range(1000)], [5 + row * 37 % 200 for row in range(1000)]
    plan = Plan(ids, lengths, capture_batch=4, batch=4, seed=0, window=window)
    channel, held, most = MemoryChannel("run"), 0, 0
    channel.offer(plan.captures(0))
    for index in range(plan.total_steps):
        while channel.receive(plan.step(index)) is None:
            task = channel.claim("local")
            assert task is not None
            channel.publish(
                task, [SampleRef(i, "1", "x:", (), 1, 1) for i in task.group.feature_ids]
            )
            held += len(task.group.rows)
        most = max(most, held)
        held -= len(channel.advance(index + 1))
    return most
