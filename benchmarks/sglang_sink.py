"""The ceiling of a capture by a running sglang: the way into its sink, files in memory, without a server.

    python benchmarks/sglang_sink.py            # in seconds, on a CUDA device where there is one
    python benchmarks/sglang_sink.py --small    # less of it

Forwards of ten prompts of 768 tokens lie on the device, four features of width 1024 in bfloat16. Prints what
one core copies, checks and puts, what the link to the host and the whole way carry (staging memory,
writer and store), and what all this takes of a scheduler: a thread that launches small kernels without
pause. Each is a median of rounds; the first round of all is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from draftcore_file.store import FileStore
from draftcore_sglang.staging import Block, Staging
from draftcore_sglang.wire import Ask
from draftcore_sglang.writer import Job, require_finite
from torch import Tensor

from draftcore.contracts.store import SampleRef, StoreItem

NAMES, WIDTH, TOKENS, PROMPTS = ("hidden.1", "hidden.2", "hidden.3", "last_hidden"), 1024, 768, 10
ROW = len(NAMES) * WIDTH * 2  # bytes
FORWARD = PROMPTS * TOKENS * ROW
TURNS = 20
LAUNCHES = 400  # of a forward, some ten for each of 28 layers and what lies between


@dataclass
class Forwards:
    """Gives forwards to the staging memory, and frees what was stored. `stored` counts samples."""

    staging: Staging
    store: FileStore
    states: list[dict[str, Tensor]]
    under_way: int = 0
    given: int = 0
    stored: int = 0
    refs: list[SampleRef] = field(default_factory=list)

    def give(self) -> None:
        """Do what the scheduler does for a forward whose requests all ask."""
        states = self.states[self.given % len(self.states)]
        block = self.staging.stage(states, _ready(states))
        block.users = PROMPTS
        self.staging.send(dict(_job(block, prompt) for prompt in range(PROMPTS)))
        self.given += 1
        self.under_way += PROMPTS

    def look(self) -> None:
        for receipt in self.staging.receipts().values():
            if "ref" not in receipt:
                raise SystemExit(f"a sample was not stored: {receipt}")
            self.refs.append(SampleRef.from_json(receipt["ref"]))
            self.under_way -= 1
            self.stored += 1
        if len(self.refs) >= 4 * PROMPTS or not self.under_way:
            self.store.free(self.refs)
            self.refs.clear()

    def drain(self) -> None:
        while self.under_way:
            self.look()
            time.sleep(0.0002)
        self.look()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    ceilings(parser.parse_args().small)


def ceilings(small: bool) -> None:
    """Print all figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    rounds, several = (5, 2) if small else (15, 6)
    forwards = [
        {name: torch.randn(PROMPTS * TOKENS, WIDTH).bfloat16().to(device) for name in NAMES}
        for _ in range(several)
    ]
    with _store((several + 10) * FORWARD) as store:
        one_core(store, forwards, rounds)
        staging = Staging(store.uri, 6 * FORWARD, device)
        try:
            whole_way(Forwards(staging, store, forwards), rounds)
        finally:
            staging.close()


def one_core(store: FileStore, forwards: list[dict[str, Tensor]], rounds: int) -> None:
    """What the writer does to a forward, in parts."""
    given = [{name: value.cpu() for name, value in states.items()} for states in forwards]
    room = {name: torch.zeros_like(value) for name, value in given[0].items()}
    turn = iter(range(10**9))

    def states() -> dict[str, Tensor]:
        return given[next(turn) % len(given)]

    def copy() -> None:
        for name, value in states().items():
            room[name].copy_(value)

    def check() -> None:
        for name, value in states().items():
            require_finite(name, value)

    def put() -> None:
        parts = {name: value.split(TOKENS) for name, value in states().items()}
        items = [
            StoreItem(uuid.uuid4().hex, {name: parts[name][n] for name in NAMES}, TOKENS)
            for n in range(PROMPTS)
        ]
        store.free(store.put_many(items))

    for what, work in (("memcpy", copy), ("check", check), ("put", put)):
        figure(f"one core: {what}", statistics.median(_times(work, rounds)))


def whole_way(forwards: Forwards, rounds: int) -> None:
    def through() -> None:
        for _ in range(2 * len(forwards.states)):
            while forwards.under_way > 2 * PROMPTS:
                forwards.look()
                time.sleep(0.0002)
            forwards.give()
        forwards.drain()

    def link() -> None:
        states = forwards.states[0]
        block = forwards.staging.stage(states, _ready(states))
        _wait(states)
        block.users = 1
        forwards.staging.release([block])
        forwards.staging.send({})

    figure("link to the host", statistics.median(_times(link, rounds)))
    seconds = statistics.median(_times(through, rounds)) / (2 * len(forwards.states))
    figure("the whole way", seconds)
    scheduler(forwards, rounds)


def scheduler(forwards: Forwards, rounds: int) -> None:
    """Time a thread that launches: alone, and with a forward given in each turn that has room."""
    kernel = torch.zeros(64, 64, device=forwards.states[0]["last_hidden"].device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            torch.add(kernel, 1.0)
        if kernel.is_cuda:  # else the launches of many turns would wait in a queue
            torch.cuda.current_stream().synchronize()

    def captured() -> None:
        if forwards.under_way <= 2 * PROMPTS:
            forwards.give()
        launch()
        forwards.look()

    alone, beside, given, stored = list[float](), list[float](), forwards.given, 0
    for _ in range(rounds):
        alone += _times(launch, TURNS, settle=0)
        before = forwards.stored
        beside += _times(captured, TURNS, settle=0)
        stored += forwards.stored - before
        forwards.drain()
    cost = (sum(beside) - sum(alone)) / max(forwards.given - given, 1)
    print(
        f"scheduler: {LAUNCHES} launches take {1e3 * statistics.median(alone):.2f} ms alone, "
        f"{1e3 * statistics.median(beside):.2f} ms beside captures, which stored "
        f"{stored * TOKENS * ROW / sum(beside) / 1e9:.2f} GB/s; a forward's capture takes "
        f"{1e3 * cost:.2f} ms of the thread",
        flush=True,
    )


def figure(what: str, seconds: float) -> None:
    rate = PROMPTS * TOKENS / seconds
    print(
        f"{what}: {FORWARD / seconds / 1e9:.2f} GB/s, {1e3 * seconds:.2f} ms a forward of "
        f"{FORWARD / 1e6:.0f} MB, {rate:,.0f} tokens/s",
        flush=True,
    )


@contextmanager
def _store(nbytes: int) -> Iterator[FileStore]:
    folder = Path(f"/dev/shm/sink{os.getpid()}")
    store = FileStore(folder, max_bytes=nbytes, volatile=True)
    try:
        yield store
    finally:
        store.close()


def _job(block: Block, prompt: int) -> tuple[str, tuple[Job, list[Block]]]:
    rid = uuid.uuid4().hex
    places = block.part(NAMES, prompt * TOKENS, TOKENS)
    return rid, (Job(rid, Ask(rid, NAMES, "bfloat16", "", {}), TOKENS, [places]), [block])


def _ready(states: dict[str, Tensor]) -> torch.cuda.Event | None:
    if not states["last_hidden"].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _wait(states: dict[str, Tensor]) -> None:
    if states["last_hidden"].is_cuda:
        torch.cuda.synchronize()


def _times(work: Callable[[], object], rounds: int, settle: int = 1) -> list[float]:
    """Seconds of each round."""
    found = []
    for _ in range(settle + rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found[settle:]


if __name__ == "__main__":
    main()
