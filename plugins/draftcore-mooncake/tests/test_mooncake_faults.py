"""What breaks: masters, lenders, producers, libraries, and callers. Each time a typed error, soon.

Other processes are forks of one that has imported torch and not Mooncake, whose library no fork survives.
"""

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftcore_mooncake import engine
from draftcore_mooncake.engine import Engine
from draftcore_mooncake.master import FLAGS, answers
from draftcore_mooncake.settings import Settings
from draftcore_mooncake.store import MooncakeStore
from draftcore_mooncake.transfer import Transfer
from draftcore_sdk.stores import numbered

from draftcore.contracts.store import SampleRef, StoreAway, StoreError, StoreItem
from draftcore.errors import UsageError
from tests.forks import start_process
from tests.ranks import listening

MiB = 1 << 20
LENT_BYTES = 160 * MiB  # as what killed writers left stays
SOON = 300.0  # seconds in which it comes, however slow the machine


def sized(feature_id: str, nbytes: int, number: int = 7) -> StoreItem:
    return StoreItem(feature_id, {"x": torch.full((nbytes,), number, dtype=torch.uint8)}, 1)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


class Child:
    """Another process, which does some work and says things through a connection."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self.ear, mouth = multiprocessing.Pipe()
        self.process = start_process(work, mouth, *arguments)
        mouth.close()

    def hear(self) -> Any:
        assert self.ear.poll(SOON)
        return self.ear.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def forever() -> None:
    while True:
        signal.pause()


# ---------------------------------------------------------------- masters


def come_and_go(say: "Connection[Any, Any]", folder: Path) -> None:
    os.chdir(folder)
    store = MooncakeStore.open("mooncake://?max_bytes=16MiB")
    assert store.master is not None
    pid, address = store.master.pid, store.master.address
    with store.get(store.put(numbered("a", 5))) as handle:
        assert int(handle.tensors["x"][0]) == 5
    assert answers(address, seconds=1)
    assert store.uri.startswith(f"mooncake://{address}/default?segment=127.0.0.1:")
    store.close()
    store.close()
    assert not answers(address, seconds=1)
    assert not Path(f"/proc/{pid}").exists()
    say.send(listening(os.getpid()))


def test_a_master_of_our_own_comes_and_goes_without_a_trace(tmp_path: Path) -> None:
    """In a process of its own, whose children, ports and files are then looked at."""
    assert Child(come_and_go, tmp_path).hear() == set()
    assert list(tmp_path.iterdir()) == []


def have_a_master(say: "Connection[Any, Any]") -> None:
    master = MooncakeStore.open("mooncake://?max_bytes=16MiB").master
    say.send(master and master.pid)
    forever()


def test_a_killed_process_takes_its_master_along() -> None:
    child = Child(have_a_master)
    pid = child.hear()
    child.kill()
    limit = time.monotonic() + SOON
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < limit
        time.sleep(0.02)


@contextmanager
def another_master() -> "Iterator[tuple[subprocess.Popen[bytes], str]]":
    """A master that nobody starts again, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [engine.package_folder() / "mooncake_master", f"--rpc_port={port}", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    address, limit = f"127.0.0.1:{port}", time.monotonic() + SOON
    while not answers(address, seconds=1):
        assert time.monotonic() < limit
        time.sleep(0.05)
    yield process, address
    process.kill()
    process.wait()


def test_a_master_that_is_killed_and_stays_away_is_said_after_the_patience() -> None:
    """Killed during puts and gets; whoever joins a store waits for no more than a second."""
    with another_master() as (master, address):
        lender = MooncakeStore.open(f"mooncake://{address}/run?max_bytes=32MiB&patience=3")
        ref = lender.put(sized("a", MiB))
        producer = MooncakeStore.open(lender.uri)

        def work(step: Callable[[], object]) -> tuple[str, float]:
            while True:
                began = time.monotonic()
                try:
                    step()
                except StoreAway as error:
                    return str(error), time.monotonic() - began

        steps = [lambda: lender.put(sized("b", MiB)), lambda: lender.get(ref).close()]
        with ThreadPoolExecutor(3) as pool:
            waits = [pool.submit(work, step) for step in steps]
            joined = pool.submit(work, lambda: producer.put(sized("c", MiB)))
            time.sleep(0.1)
            master.kill()
            for wait in waits:
                said, seconds = wait.result(timeout=30)
                assert f"no Mooncake master at {address}" in said
                assert 2.9 < seconds < 12
            assert joined.result()[1] < 10
        with within(10):
            producer.close()
            lender.close()


def test_a_master_of_our_own_that_is_killed_is_started_again_empty_and_nobody_calls_it_full() -> (
    None
):
    lender = MooncakeStore.open("mooncake://?max_bytes=32MiB")
    producer = MooncakeStore.open(lender.uri)
    ref, master = lender.put(sized("a", MiB)), lender.master
    assert master is not None
    for number in (8, 9):
        os.kill(master.pid, signal.SIGKILL)
        with within(SOON):
            new = None
            while new is None:
                try:
                    new = producer.put(sized("a", MiB, number))
                except StoreAway:  # StoreFull would have the trainer evict samples, and then end
                    time.sleep(0.01)
        with pytest.raises(StoreError, match="'a'"):
            lender.get(ref)
        with lender.get(new) as handle:
            assert handle.tensors["x"].unique().tolist() == [number]
        ref = new
    os.kill(master.pid, signal.SIGKILL)
    lender.put(sized("b", MiB))  # which waits for it by itself
    assert list(lender.lookup(["a", "b"])) == ["b"]
    assert lender.stats().samples == 1
    producer.close()
    lender.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda web: "mooncake://127.0.0.1:9/run",
            "no Mooncake master at 127.0.0.1:9: nothing",
        ),
        (
            lambda web: f"mooncake://127.0.0.1:{web}/run",
            "refuses to connect(.|\n)*check that it is a master",
        ),
    ],
    ids=["nothing", "a web server"],
)
def test_an_address_that_is_none_takes_seconds_not_ninety(
    change: Callable[[int], str], said: str
) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with within(60), pytest.raises(StoreError, match=said):
            MooncakeStore.open(change(server.server_port))
        server.shutdown()


# ---------------------------------------------------------------- those who lend and put


def lend_and_put(say: "Connection[Any, Any]", uri: str) -> None:
    say.send(MooncakeStore.open(uri).put(numbered("a", 5)).to_json())
    forever()


def test_a_killed_lender_is_a_lost_sample_not_a_hang(store_uri: str) -> None:
    """The producer lends: its memory dies with it."""
    child = Child(lend_and_put, store_uri.partition("?")[0] + "?max_bytes=16MiB")
    ref = SampleRef.from_json(child.hear())
    store = MooncakeStore.open(store_uri)
    with store.get(ref) as handle:
        assert int(handle.tensors["x"][0]) == 5
    child.kill()
    with within(30):
        with pytest.raises(StoreError, match=r"sample 'a' .* transfer failed"):
            store.get(ref)
        assert store.lookup(["a"]) == {}
        new = store.put(numbered("a", 6))  # into the memory of those who live
    with store.get(new) as handle:
        assert int(handle.tensors["x"][0]) == 6
    store.close()


def put_and_free(say: "Connection[Any, Any]", uri: str) -> None:
    store, item = MooncakeStore.open(uri), sized("a", 48 * MiB)
    say.send("ready")
    while True:
        store.free([store.put(item)])


def test_a_key_that_a_killed_writer_left_half_written_blocks_nobody(
    store_uri: str, store: MooncakeStore
) -> None:
    """A writer dies in the middle of a put; the next attempt is stored and read at once."""
    for delay in (0.003, 0.017):
        child = Child(put_and_free, store_uri)
        child.hear()
        time.sleep(delay)
        child.kill()
    with within(20):  # the master would wait 30 s
        ref = store.put(sized("a", MiB, 3))
        assert store.lookup(["a"]) == {"a": ref}
        with store.get(ref) as handle:
            assert handle.tensors["x"].unique().tolist() == [3]
    store.free([ref])


def test_a_writer_that_dies_while_it_replaces_a_record_leaves_what_was_held(
    store: MooncakeStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library discards what it replaces before it writes: what a kill then leaves is played."""

    def dies(engine: Engine, keys: Sequence[str], pieces: object) -> list[int]:
        client.batch_remove(list(keys), True)
        raise InterruptedError

    for number in range(4):
        ref = store.put(numbered("a", number))
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "replace", dies)
            with pytest.raises(InterruptedError):
                store.put(numbered("a", 9))
        assert store.lookup(["a"]) == {"a": ref}
        with store.get(ref) as handle:
            assert int(handle.tensors["x"][0]) == number


# ---------------------------------------------------------------- callers


def test_close_waits_for_calls_in_progress(store_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake ends the process when a call meets a close."""
    library, calling, ends = engine.load(), threading.Event(), dict[str, float]()

    class Slow:
        """A client of the library that lingers in one call, and notes when it is closed."""

        def __init__(self) -> None:
            self.real = library.MooncakeDistributedStore()

        def batch_get_into(self, keys: list[str], *others: Any) -> Any:
            if any(key.startswith("slow/") for key in keys):
                calling.set()
                time.sleep(0.5)
                ends["call"] = time.monotonic()
            return self.real.batch_get_into(keys, *others)

        def close(self) -> None:
            ends["client"] = time.monotonic()
            self.real.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    parts = {"MooncakeDistributedStore": Slow, "ReplicateConfig": library.ReplicateConfig}
    monkeypatch.setattr(engine, "load", lambda: SimpleNamespace(**parts))
    store = MooncakeStore.open(store_uri.partition("?")[0] + "?max_bytes=64MiB")
    memory = store.engine.allocate(MiB)

    def work() -> None:
        while True:
            store.free([store.put(sized("a", MiB))])

    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(work) for _ in range(3)]
        slow = pool.submit(store.engine.get, ["slow/key"], [(memory.data_ptr(), MiB)])
        calling.wait()
        store.close()
        assert ends["client"] > ends["call"]
        assert slow.result(timeout=10) == [engine.NOT_FOUND]
        for wait in waits:
            with pytest.raises(StoreError, match="closed"):
                wait.result(timeout=10)


def fork(say: "Connection[Any, Any]", uri: str) -> None:
    settings = Settings.parse(uri)
    stores = [MooncakeStore(settings, Engine(settings))]  # a client that nobody else holds
    ref = stores[0].put(numbered("a", 1))

    def child() -> None:
        uses: list[Callable[[], object]] = [
            *(lambda: stores[0].get(ref), lambda: stores[0].put(numbered("b", 1))),
            *(lambda: stores[0].stats(), lambda: MooncakeStore.open(uri)),
        ]
        for use in uses:
            with pytest.raises(StoreError, match=r"(?s)forked.*spawn"):
                use()
        stores[0].close()
        stores.clear()
        gc.collect()  # as the child's end may do: the library's destructors crash there

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    forked.join(SOON)
    stores[0].get(ref).close()
    stores[0].close()
    say.send(forked.exitcode)


def test_a_forked_child_is_refused_and_ends_and_the_parent_goes_on(store_uri: str) -> None:
    assert Child(fork, store_uri).hear() == 0


# ---------------------------------------------------------------- libraries


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ModuleNotFoundError("No module named 'mooncake'", name="mooncake"),
            "pip install mooncake",
        ),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "apt-get install libibv"),
        (ImportError("libcudart.so.12: cannot open shared object file"), "another CUDA"),
        (ImportError("store.so: undefined symbol: x"), "uninstall all, then install one"),
    ],
)
def test_a_library_that_does_not_load_is_one_sentence_and_a_remedy(
    error: ImportError, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(engine.importlib, "import_module", fail)
    with pytest.raises(UsageError) as caught:
        MooncakeStore.open("mooncake://")
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


def test_an_old_library_is_refused_by_what_it_lacks() -> None:
    old = SimpleNamespace(
        MooncakeDistributedStore=type("Store", (), {"setup": None, "close": None}),
        ReplicateConfig=type("Config", (), {"with_soft_pin": False}),
    )
    with pytest.raises(
        UsageError, match=r"too old: it lacks .*batch_remove.*with_hard_pin"
    ) as caught:
        engine.check(old)
    assert "pip install -U" in str(caught.value)


# ---------------------------------------------------------------- reads that are overtaken


def test_bytes_of_another_sample_do_not_pass_for_ones_own(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that is overtaken by a forced removal gets another object's bytes, in full length.

    Played slowly: the read is led to the key of another sample of the same size.
    """
    ref, other = store.put(sized("a", 4096, 1)), store.put(sized("b", 4096, 2))
    key = Transfer.key
    monkeypatch.setattr(Transfer, "key", lambda self, _: key(self, other))
    with pytest.raises(StoreError, match=r"sample 'a' .* is torn"):
        store.get(ref)


def test_a_sample_is_never_removed_while_it_is_read_here(
    store: MooncakeStore, store_uri: str
) -> None:
    other = MooncakeStore.open(store_uri)
    ref = store.put(numbered("a", 1))
    handle = store.get(ref)
    store.free([ref])
    other.get(ref).close()  # its bytes are still in the store
    handle.close()
    store.free([])
    with pytest.raises(StoreError, match="'a'"):
        other.get(ref)
    other.close()
