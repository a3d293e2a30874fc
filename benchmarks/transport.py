"""Measure what moves features: every figure in a line `what | measured | aim | met or not`.

    nox -s bench-transport            # all of it, in ten minutes
    python benchmarks/transport.py [--only write,naive,...] [--rounds 24]

Figures are medians. What a figure is a ratio of is measured in the same rounds, right beside it, as
a machine's speed changes from second to second. Producer and trainer are two processes. As
Mooncake's clients listen on all interfaces, everything runs in a network namespace that has only
loopback, where this process may make one; there alone the link can be capped, by `tc`.
"""

import argparse
import ctypes
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fcntl import ioctl

import torch
from colocated import colocated
from draftcore_file.base import bytes_of
from draftcore_file.store import FileStore
from draftcore_mooncake.engine import load, package_folder
from draftcore_mooncake.master import Master
from draftcore_mooncake.store import MooncakeStore
from producer_process import (
    Link,
    Naive,
    faults,
    give_large_memory_back,
    open_store,
    private,
    producing,
)
from report import against, ms, report, seconds
from xxhash import xxh3_64_digest

from draftcore.contracts.store import FeatureStore, SampleRef

Store = FileStore | MooncakeStore

MIB = 1 << 20
SAMPLE, MIDDLE = 64 * MIB, 48 * MIB
RING = 640 * MIB  # lent memory: ten samples, so that a put meets cold memory
GIGABIT = 10
SETTLE = 3  # rounds before the measured ones
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def main() -> None:
    figures: dict[str, Callable[[int], None]] = {
        "side_by_side": side_by_side,
        "write": write, "trainer": trainer, "overhead": overhead, "capped": capped,
        "naive": naive, "colocated": colocated, "allocations": allocations,
    }  # fmt: skip
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(figures), help="figures, by comma")
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    alone = enter_namespace()
    load()
    print("what | measured | aim | met")
    for name in options.only.split(","):
        if name == "capped" and not alone:
            report("capped", "not measured: this process may make no network namespace")
        else:
            figures[name](options.rounds)


# ---------------------------------------------------------------- stores


def side_by_side(rounds: int) -> None:
    """Every store with the same samples of 2,048 tokens: 48 MiB of features, 16 KiB of tokens."""
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as fast:
        uris = {
            "file on a disk": f"file:{disk}/features",
            "file on /dev/shm, volatile": f"file:{fast}/features?volatile=yes",
        }
        for name, uri in uris.items():
            store = open_store(uri)
            with producing(store.uri, MIDDLE) as producer:
                beside_a_copy(name, store, producer, rounds)
            store.close()
    for lender in ("trainer", "producer"):
        with lent(lender) as (lending, uri), producing(uri, MIDDLE) as producer:
            beside_a_copy(f"mooncake, the {lender} lends", lending, producer, rounds)


def beside_a_copy(name: str, store: FeatureStore, producer: Link, rounds: int) -> None:
    copies, puts, gets, parts = list[float](), list[float](), list[float](), list[float]()
    for turn in range(SETTLE + rounds):
        if turn == SETTLE:
            before = private(), producer("private")
        copies.append(producer("copy"))
        taken, refs = producer("put")
        puts.append(taken)
        parts.append(seconds(lambda refs=refs: store.get(refs[0], names=["token_ids"]).close()))
        gets.append(read(store, refs))
    here, there = private() - before[0], producer("private") - before[1]
    copy, put, got, part = (ms(times[SETTLE:]) for times in (copies, puts, gets, parts))
    report(
        f"{name}: a sample of {MIDDLE // MIB} MiB",
        f"put {put:.1f} ms ({MIDDLE / put / 1e6:.1f} GB/s), get and free {got:.1f} ms, of one tensor "
        f"of 16 KiB {part:.2f} ms; a bare copy {copy:.1f} ms; private memory in {rounds} rounds "
        f"{here / MIB:+.0f} MiB in the trainer, {there / MIB:+.0f} MiB in the producer",
    )


def write(rounds: int) -> None:
    """Mooncake, the trainer lends: a put beside one TCP connection that carries as many bytes."""
    with lent() as (store, uri), producing(uri, SAMPLE) as producer:
        against_a_stream("mooncake: write", 0.55, store, producer, rounds)


def capped(rounds: int) -> None:
    """The same on a link of 10 Gbit/s."""
    with lent() as (store, uri), producing(uri, SAMPLE) as producer:
        device = ("dev", "lo", "root")
        rate = ("tbf", "rate", f"{GIGABIT}gbit", "burst", "1mb", "latency", "50ms")
        subprocess.run(["tc", "qdisc", "add", *device, *rate], check=True)
        what = f"mooncake: write, link of {GIGABIT} Gbit/s"
        against_a_stream(what, 0.95, store, producer, rounds)
        subprocess.run(["tc", "qdisc", "del", *device], check=True)


def trainer(rounds: int) -> None:
    """Mooncake, the trainer lends: what a sample costs the trainer."""
    costs, copies, digests = list[float](), list[float](), list[float]()
    given = torch.ones(SAMPLE * (SETTLE + 1), dtype=torch.uint8)
    room = torch.ones_like(given)
    with lent() as (store, uri), producing(uri, SAMPLE) as producer:
        for turn in range(SETTLE + rounds):
            _, refs = producer("put")
            costs.append(read(store, refs))
            at = slice(turn % 4 * SAMPLE, (turn % 4 + 1) * SAMPLE)
            copies.append(seconds(lambda at=at: room[at].copy_(given[at])))
            digests.append(seconds(lambda at=at: xxh3_64_digest(bytes_of(given[at]))))
    cost, copy, digest = (ms(values[SETTLE:]) for values in (costs, copies, digests))
    best, best_copy = 1e3 * min(costs), 1e3 * min(copies)
    measured = f"{cost:.2f} ms, best {best:.2f}; a bare copy takes {copy:.2f}, best {best_copy:.2f}"
    report("mooncake: trainer's cost of 64 MiB, copied", measured, "<= 5 ms", cost <= 5)
    measured = f"not offered: to check its seal alone takes {digest:.2f} ms"
    report("mooncake: trainer's cost of 64 MiB, viewed", measured, "<= 0.1 ms", False)


def overhead(rounds: int) -> None:
    """What a sample costs that has next to no bytes: put, get, close and free."""
    store = FileStore.open(f"file:/dev/shm/bench-{os.getpid()}?volatile=yes")
    with producing(store.uri, 4096) as producer:
        small("file on /dev/shm", store, producer, rounds)
    store.close()
    with lent() as (lender, uri), producing(uri, 4096) as producer:
        small("mooncake", lender, producer, rounds)


def small(name: str, store: Store, producer: Link, rounds: int) -> None:
    for count in (1, 8, 64):
        puts, gets = list[float](), list[float]()
        for _ in range(10 * rounds):
            taken, refs = producer("put", count)
            puts.append(taken / count)
            gets.append(read(store, refs) / count)
        put, got = ms(puts), ms(gets)
        best = 1e3 * (min(puts) + min(gets))
        measured = f"{put + got:.3f} ms: put {put:.3f}, get and free {got:.3f}; best {best:.3f}"
        what = f"{name}: control overhead of a sample, {count} in a call"
        report(what, measured, "<= 0.25 ms", put + got <= 0.25)


def naive(rounds: int) -> None:
    """Against tensors one by one into fresh memory, and against pickles, whoever lends."""
    for lender in ("trainer", "producer"):
        times = compare(lender, rounds // 2)
        write, read, put, get, put_blob, get_blob = (ms(values) for values in times)
        own = f"mooncake, the {lender} lends:"
        measured = f"{put_blob / write:.1f} x: {write:.1f} ms beside {put_blob:.1f} ms"
        report(f"{own} write against pickles", measured, ">= 10 x", put_blob >= 10 * write)
        measured = f"{put / write:.1f} x: beside {put:.1f} ms"
        report(f"{own} write against single tensors", measured)
        measured = f"{get_blob / read:.1f} x: {read:.1f} ms beside {get_blob:.1f} ms"
        report(f"{own} read against pickles", measured, ">= 2 x", get_blob >= 2 * read)
        measured = f"{get / read:.1f} x: beside {get:.1f} ms"
        report(f"{own} read against single tensors", measured, ">= 2 x", get >= 2 * read)


def compare(lender: str, rounds: int) -> list[list[float]]:
    """Seconds of our write and read, of the naive ones, and of pickles."""
    master = Master(package_folder())
    try:
        here = RING if lender == "trainer" else 0
        client = Naive(master.address, here)
        with lent(lender) as (store, uri), producing(uri, SAMPLE) as producer:
            producer("naive", master.address, RING - here)
            times = [one_round(client, store, producer, turn) for turn in range(SETTLE + rounds)]
            producer("naive_close")
            client.close()
    finally:
        master.stop()
    return [list(values) for values in zip(*times[SETTLE:], strict=True)]


def one_round(client: Naive, store: Store, producer: Link, turn: int) -> tuple[float, ...]:
    write, refs = producer("put")
    reading = read(store, refs)
    put = producer("naive_put", f"one-{turn}")
    get = client.get(f"one-{turn}", refs[0].tensors)
    client.remove(f"one-{turn}")
    put_blob = producer("naive_put_blob", f"blob-{turn}")
    get_blob = client.get_blob(f"blob-{turn}")
    client.remove(f"blob-{turn}")
    return write, reading, put, get, put_blob, get_blob


def allocations(rounds: int) -> None:
    """Memory that is taken from the kernel per sample, in both processes."""
    give_large_memory_back()
    with lent() as (store, uri), producing(uri, SAMPLE) as producer:
        fresh("mooncake", store, producer, rounds)


def fresh(name: str, store: Store, producer: Link, rounds: int) -> None:
    producer("give_large_memory_back")
    for turn in range(SETTLE + rounds):
        if turn == SETTLE:
            here, there = faults(), producer("faults")
        read(store, producer("put")[1])
    used = [(faults() - here) / rounds * 4096, (producer("faults") - there) / rounds * 4096]
    measured = f"producer {used[1] / MIB:.3f} MiB, trainer {used[0] / MIB:.3f} MiB of fresh memory"
    report(f"{name}: fresh memory per sample of 64 MiB", measured, "none >= 1 MiB", max(used) < MIB)


# ---------------------------------------------------------------- what figures share


@contextmanager
def lent(lender: str = "trainer") -> Iterator[tuple[MooncakeStore, str]]:
    """A Mooncake store of this process on a master of its own, and the producer's URI."""
    master = Master(package_folder())
    uri = f"mooncake://{master.address}/bench"
    store = MooncakeStore.open(f"{uri}?max_bytes={RING}" if lender == "trainer" else uri)
    try:
        yield store, store.uri if lender == "trainer" else f"{uri}?max_bytes={RING}"
    finally:
        store.close()
        master.stop()


def against_a_stream(
    what: str, aim: float, store: MooncakeStore, producer: Link, rounds: int
) -> None:
    """A put of one sample, and of a batch of four, beside the same bytes on one socket."""
    room = torch.ones(SAMPLE + (16 << 10), dtype=torch.uint8)
    for count in (1, 4):
        puts, streams = list[float](), list[float]()
        for _ in range(SETTLE + rounds // count):
            streams.append(producer.stream(room))
            taken, refs = producer("put", count)
            puts.append(taken / count)
            read(store, refs)
        against(f"{what}, {count} in a call", streams[SETTLE:], puts[SETTLE:], aim, "a stream")


def read(store: FeatureStore, refs: Sequence[SampleRef]) -> float:
    """Seconds to open, close and free samples."""
    began = time.perf_counter()
    for handle in store.get_many(refs):
        handle.close()
    store.free(refs)
    return time.perf_counter() - began


def enter_namespace() -> bool:
    """Go where there is only loopback; False where that is not allowed."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET):
        return False
    with socket.socket() as any_socket:
        ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return True


if __name__ == "__main__":
    main()
