"""How many producers and ranks one queue carries: real `tcp`, captures that sleep, tensors in name only.

    python benchmarks/queue_scale.py [--producers 256] [--ranks 64] [--captures 4,2,1,0.5,0]

This process is the trainer's: it holds the queue and its channel and does nothing else. Producers
and ranks are threads of other processes on this machine, each with a connection of its own. For each
time that a capture takes, all connect anew, and these are said of the seconds after the first few:
batches per second, how long a producer waits for a task, how much of a core the trainer's
process takes, and its memory. A batch is 8 rows of 2,048 tokens with three layers of 4,096 in name.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from draftcore_disagg.channel import Task
from draftcore_disagg.queue import Queue, QueueService, RemoteQueue
from draftcore_disagg.tcp import TcpChannel
from report import report

from draftcore.contracts.capture import CaptureBatch
from draftcore.contracts.run import RunEnded
from draftcore.contracts.store import SampleRef, TensorSpec
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError
from draftcore.features.checks import ref_error

SECRET = b"a benchmark's secret"
ROWS, TOKENS, WIDTH = 8, 2048, 3 * 4096
STARTING, FIRST = 60.0, 4.0  # seconds until all are connected at the latest, and that do not count
PATIENCE = 30.0  # seconds that a connection is tried for
PROCESSES = 3  # that producers share, and as many that ranks share
FORMS = {"hidden_states": (WIDTH, "bfloat16")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--producers", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--held", type=int, default=9, help="batches for a rank: prefetch + 1")
    parser.add_argument("--captures", default="4,2,1,0.5,0", help="seconds of one, by comma")
    parser.add_argument("--seconds", type=float, default=15.0, help="that count")
    options = parser.parse_args()
    spawned = multiprocessing.get_context("spawn")
    ended = spawned.Event()
    print("what | measured | aim | met")
    with ProcessPoolExecutor(PROCESSES * 2, spawned, begin, [ended]) as others:
        for capture in map(float, options.captures.split(",")):
            measure(options, capture, others, ended)


def measure(
    options: argparse.Namespace, capture: float, others: ProcessPoolExecutor, ended: Event
) -> None:
    producers, ranks = options.producers, options.ranks
    queue = Queue(
        {"store": "names:"},
        ahead=ranks * options.held,
        limit=None,
        skipped=Skipped({}, rows=1, share=0.0),
        free=lambda refs: None,
        ref_error=lambda batch, refs: ref_error(batch, refs, FORMS, ""),
    )
    queue.offer(tasks(), 0)
    channel, before = TcpChannel.open("tcp", SECRET), memory()
    address = channel.serve(QueueService(queue))
    ended.clear()
    work = [
        others.submit(several, produce, share, address, capture)
        for share in shares(producers, PROCESSES)
    ]
    work += [
        others.submit(several, train, share, address, ranks) for share in shares(ranks, PROCESSES)
    ]
    least = time.monotonic() + STARTING
    while len(queue.seen) < producers and time.monotonic() < least:
        time.sleep(0.1)
    time.sleep(FIRST + capture)
    began, captured, cpu = time.time(), queue.status().captured, time.process_time()
    time.sleep(options.seconds)
    end = time.time()
    rate = (queue.status().captured - captured) / ROWS / (end - began)
    core, held = (time.process_time() - cpu) / (end - began), memory() - before
    connected, threads = len(queue.seen), threading.active_count()
    ended.set()
    queue.end("finished")
    claims = sorted(wait for one in work for at, wait in one.result() if began < at < end)
    channel.close()
    what = f"{producers} producers, {ranks} ranks, captures of {capture:g} s"
    if not claims or not rate:
        return report(what, "nothing was captured in time: raise --seconds")
    half, most = (1e3 * claims[int(len(claims) * share)] for share in (0.5, 0.99))
    possible = f" of {producers / capture:.0f} possible" if capture else ""
    report(
        what,
        f"{rate:.0f} batches/s{possible}; a claim takes {half:.1f} ms, p99 {most:.0f} ms; "
        f"the trainer {core:.0%} of a core, {1e3 * core / rate:.2f} ms a batch, {threads} threads, "
        f"{held / 1e6:.0f} MB; {connected} of {producers} at work",
    )


def shares(count: int, among: int) -> list[range]:
    """Cut numbers from 0 on into ranges of like length."""
    return [range(count * at // among, count * (at + 1) // among) for at in range(among)]


def tasks() -> Iterator[Task]:
    ids = np.random.default_rng(0).integers(0, 150_000, TOKENS)
    position = 0
    while True:
        rows = tuple(range(position * ROWS, (position + 1) * ROWS))
        names = tuple(f"{row:064x}" for row in rows)
        batch = CaptureBatch(position, rows, names, (ids,) * ROWS)
        yield Task(position, batch, (ids > 70_000,) * ROWS, ROWS * TOKENS * WIDTH * 2)
        position += 1


def memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


# ---------------------------------------------------------------- the other processes


def begin(event: Event) -> None:
    global ended
    ended = event


def several(
    work: Callable[..., list[tuple[float, float]]], numbers: range, *arguments: object
) -> list[tuple[float, float]]:
    """Do some work once per number, each in a thread."""
    with ThreadPoolExecutor(max(len(numbers), 1)) as threads:
        found = [threads.submit(work, number, *arguments) for number in numbers]
        return [one for done in found for one in done.result()]


def produce(number: int, address: str, capture: float) -> list[tuple[float, float]]:
    """Capture by sleeping until the run ends; return when each claim was answered, and its seconds."""
    client = TcpChannel.open("tcp", SECRET, PATIENCE).connect(lambda: address)
    queue, found = RemoteQueue(client), list[tuple[float, float]]()
    chance = random.Random(number)
    with suppress(RunEnded, DraftcoreError):
        while True:
            began = time.perf_counter()
            claimed, _ = queue.claim(1, 5.0)
            found.append((time.time(), time.perf_counter() - began))
            for task in claimed:
                time.sleep(capture * chance.uniform(0.5, 1.5))
                queue.publish(task.claim, refs(task))
    client.close()
    return found


def refs(task: Task) -> list[SampleRef]:
    shapes = {"hidden_states": (WIDTH,), "token_ids": (), "loss_mask": ()}
    kinds = {"hidden_states": "bfloat16", "token_ids": "int64", "loss_mask": "bool"}
    return [
        SampleRef(
            one,
            task.claim,
            "names:",
            tuple(
                TensorSpec(name, (len(ids), *shape), kinds[name], "0" * 16)
                for name, shape in shapes.items()
            ),
            len(ids),
            len(ids) * WIDTH * 2,
        )
        for one, ids in zip(task.batch.ids, task.batch.token_ids, strict=True)
    ]


def train(number: int, address: str, ranks: int) -> list[tuple[float, float]]:
    """Take this rank's batches as they come, and let each go when the next one is there."""
    client = TcpChannel.open("tcp", SECRET, PATIENCE).connect(lambda: address)
    queue, position, released = RemoteQueue(client), number, list[int]()
    with suppress(RunEnded, DraftcoreError):
        while not ended.is_set():
            if queue.receive(position, 1.0, released) is not None:
                released, position = [position], position + ranks
            else:
                released = []
    client.close()
    return []


if __name__ == "__main__":
    main()
