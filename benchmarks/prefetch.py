"""How long a trainer waits for a step's features, with and without opening them one step ahead.

    python benchmarks/prefetch.py

A ring of shared memory is filled as a producer fills it; a step opens 8 samples of 8 MiB, which reads
all of them for their seals, and then computes for about 40 ms. Both ways take turns.
"""

import time
import uuid

import torch
from draftcore_shm.store import ShmStore
from report import ms, report

from draftcore.channels.memory import MemoryChannel
from draftcore.contracts.store import StoreItem
from draftcore.data.plan import Plan
from draftcore.feed import TEXT, Feed, Source
from draftcore.training.ranks import ALONE

STEPS, BATCH, TOKENS, WIDTH, NAME = 40, 8, 512, 4096, "hidden.1"


def main() -> None:
    torch.set_num_threads(1)
    ids = [f"{row:04}" for row in range(STEPS * BATCH)]
    plan = Plan(ids, [TOKENS] * len(ids), capture_batch=BATCH, batch=BATCH, seed=0, window=1)
    store = ShmStore(f"prefetch-{uuid.uuid4().hex}", max_bytes=STEPS * BATCH * (9 << 20))
    channel = MemoryChannel("run", attempts=2)

    def source() -> Source:
        facts = {"names": (NAME,), "dtype": "float32", "width": WIDTH, "provenance": "p"}
        return Source(plan, store, channel, None, **facts)

    feed = Feed(ALONE, store, source, names=(NAME,), durable=False, ahead=True)
    feed.start(0, lambda: False, {})
    fill(store, channel)
    waited = measure(feed, plan)
    feed.finished = True
    feed.close()
    plain, ahead = ms(waited[False]), ms(waited[True])
    measured = f"{ahead:.2f} ms beside {plain:.2f} ms"
    report("wait for 64 MiB, opened ahead beside not", measured, "<= 10 %", ahead <= 0.1 * plain)


def fill(store: ShmStore, channel: MemoryChannel) -> None:
    """Put and publish all samples."""
    features = {NAME: torch.randn(TOKENS, WIDTH), **{n: torch.zeros(TOKENS) for n in TEXT}}
    while (task := channel.claim("other")) is not None:
        items = [StoreItem(i, features, TOKENS, "p") for i in task.group.feature_ids]
        channel.publish(task, store.put_many(items))


def measure(feed: Feed, plan: Plan) -> dict[bool, list[float]]:
    """Seconds that each step waited, by whether it was opened ahead; every other step is."""
    waited: dict[bool, list[float]] = {False: [], True: []}
    for index in range(STEPS):
        began = time.perf_counter()
        with feed.samples(plan.step(index)):
            waited[index % 2 == 1].append(time.perf_counter() - began)
            if index % 2 == 0:
                feed.prefetch(plan.step(index + 1))
            compute(0.04)
        feed.release(plan.step(index))
    return waited


def compute(seconds: float) -> None:
    matrix, end = torch.randn(512, 512), time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix = torch.tanh(matrix @ matrix)


if __name__ == "__main__":
    main()
