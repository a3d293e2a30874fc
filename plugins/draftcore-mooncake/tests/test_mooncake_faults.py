"""What breaks: masters, lenders, producers, libraries, and callers. Each time a typed error, soon.

Other processes are forks of one that has imported torch and not Mooncake, whose library no fork survives.
"""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftcore_mooncake import engine
from draftcore_mooncake.engine import Engine
from draftcore_mooncake.master import FLAGS, answers, free_port
from draftcore_mooncake.settings import Settings
from draftcore_mooncake.store import MooncakeStore
from draftcore_sdk.stores import number_in, numbered

from draftcore.contracts.store import SampleRef, StoreAway, StoreError
from draftcore.errors import UsageError
from tests.faults.conftest import Server
from tests.forks import start_process
from tests.ranks import listening

MiB = 1 << 20
PER_MIB = MiB // 8  # numbers of a sample
LENT_BYTES = 160 * MiB  # as what killed writers left stays
SOON = 300.0  # seconds in which it comes, however slow the machine


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def until(holds: Callable[[], object]) -> None:
    limit = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


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


def come_and_go(say: "Connection[Any, Any]", folder: Path) -> None:
    os.chdir(folder)
    store = MooncakeStore.open("mooncake://?max_bytes=16MiB")
    assert store.master is not None
    pid, address = store.master.pid, store.master.address
    assert number_in(store, store.put(numbered("a", 5))) == 5
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
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_master_that_is_killed_and_stays_away_is_said_after_the_patience(tmp_path: Path) -> None:
    """Killed during puts and gets; whoever joins a store waits for no more than a second."""
    program, port = str(engine.package_folder() / "mooncake_master"), free_port()
    master = Server([program, f"--rpc_port={port}", *FLAGS], tmp_path, port, metrics=0)
    address = f"127.0.0.1:{port}"
    lender = MooncakeStore.open(f"mooncake://{address}/run?max_bytes=32MiB&patience=3")
    ref = lender.put(numbered("a", 7, PER_MIB))
    producer = MooncakeStore.open(lender.uri)

    def work(step: Callable[[], object]) -> tuple[str, float]:
        while True:
            began = time.monotonic()
            try:
                step()
            except StoreAway as error:
                return str(error), time.monotonic() - began

    steps = [lambda: lender.put(numbered("b", 7, PER_MIB)), lambda: lender.get(ref).close()]
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(work, step) for step in steps]
        joined = pool.submit(work, lambda: producer.put(numbered("c", 7, PER_MIB)))
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
    ref, master = lender.put(numbered("a", 7, PER_MIB)), lender.master
    assert master is not None
    for number in (8, 9):
        os.kill(master.pid, signal.SIGKILL)
        new = None
        while new is None:
            # StoreFull would have the trainer evict samples, and then end.
            with suppress(StoreAway):
                new = producer.put(numbered("a", number, PER_MIB))
        with pytest.raises(StoreError, match="'a'"):
            lender.get(ref)
        assert number_in(lender, new) == number
        ref = new
    os.kill(master.pid, signal.SIGKILL)
    lender.put(numbered("b", 7, PER_MIB))  # which waits for it by itself
    assert list(lender.lookup(["a", "b"])) == ["b"]
    assert lender.stats().samples == 1
    producer.close()
    lender.close()


def test_an_address_that_is_none_or_a_web_servers_takes_seconds_not_ninety() -> None:
    refuses = r"refuses to connect(.|\n)*check that it is a master"
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for port, said in (
            (9, "no Mooncake master at 127.0.0.1:9: nothing"),
            (server.server_port, refuses),
        ):
            with within(60), pytest.raises(StoreError, match=said):
                MooncakeStore.open(f"mooncake://127.0.0.1:{port}/run")
        server.shutdown()


def lend_and_put(say: "Connection[Any, Any]", uri: str) -> None:
    say.send(MooncakeStore.open(uri).put(numbered("a", 5)).to_json())
    forever()


def test_a_killed_lender_is_a_lost_sample_not_a_hang(store_uri: str) -> None:
    """The producer lends: its memory dies with it."""
    child = Child(lend_and_put, store_uri.partition("?")[0] + "?max_bytes=16MiB")
    ref = SampleRef.from_json(child.hear())
    store = MooncakeStore.open(store_uri)
    assert number_in(store, ref) == 5
    child.kill()
    with within(30):
        with pytest.raises(StoreError, match=r"sample 'a' .* transfer failed"):
            store.get(ref)
        assert store.lookup(["a"]) == {}
        new = store.put(numbered("a", 6))  # into the memory of those who live
    assert number_in(store, new) == 6
    store.close()


def put_and_free(say: "Connection[Any, Any]", uri: str) -> None:
    store, item = MooncakeStore.open(uri), numbered("a", 7, 48 * PER_MIB)
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
        ref = store.put(numbered("a", 3, PER_MIB))
        assert store.lookup(["a"]) == {"a": ref}
        assert number_in(store, ref) == 3
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
        assert number_in(store, ref) == number


def test_close_waits_for_calls_in_progress(store_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake ends the process when a call meets a close."""
    library, calling, ends = engine.load(), threading.Event(), list[str]()

    class Slow(library.MooncakeDistributedStore):  # type: ignore[misc,name-defined]
        """A client of the library that lingers in one call, and notes when it is closed."""

        def batch_get_into(self, keys: list[str], *others: Any) -> Any:
            if any(key.startswith("slow/") for key in keys):
                calling.set()
                time.sleep(0.5)
                ends.append("call")
            return super().batch_get_into(keys, *others)

        def close(self) -> None:
            ends.append("client")
            super().close()

    parts = {"MooncakeDistributedStore": Slow, "ReplicateConfig": library.ReplicateConfig}
    monkeypatch.setattr(engine, "load", lambda: SimpleNamespace(**parts))
    store = MooncakeStore.open(store_uri.partition("?")[0] + "?max_bytes=64MiB")
    memory = store.engine.allocate(MiB)

    def work() -> None:
        while True:
            store.free([store.put(numbered("a", 7, PER_MIB))])

    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(work) for _ in range(3)]
        slow = pool.submit(store.engine.get, ["slow/key"], [(memory.data_ptr(), MiB)])
        calling.wait()
        store.close()
        assert ends == ["call", "client"]
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


MISSING = ModuleNotFoundError("No module named 'mooncake'", name="mooncake")
LACKS = "{}: cannot open shared object file"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MISSING, "pip install 'draftcore-mooncake[cuda]', or 'draftcore-mooncake[cpu]'"),
        (ImportError(LACKS.format("libibverbs.so.1")), "apt-get install libibverbs1"),
        (ImportError(LACKS.format("libnl-3.so.200")), "which brings libnl-3"),
        (ImportError(LACKS.format("libcudart.so.12")), "another CUDA"),
        (ImportError("undefined symbol: x"), "pip uninstall mooncake-transfer-engine-non-cuda,"),
        (None, f"pip uninstall {' '.join(engine.BUILDS)}, then pip install"),
    ],
)
def test_a_library_that_does_not_load_or_two_builds_are_one_sentence_and_a_remedy(
    error: ImportError | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        assert error is not None, "two builds overwrite each other: neither is to be trusted"
        raise error

    for name in engine.BUILDS if error is None else ():
        (info := tmp_path / f"{name.replace('-', '_')}-1.0.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(UsageError) as caught:
        MooncakeStore.open("mooncake://")
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


def test_an_old_library_is_refused_by_what_it_lacks() -> None:
    old = SimpleNamespace(
        MooncakeDistributedStore=type("Store", (), {"setup": None, "close": None}),
        ReplicateConfig=type("Config", (), {"with_soft_pin": False}),
    )
    lacks = r"too old: it lacks .*batch_remove.*with_hard_pin(.|\n)*pip install -U"
    with pytest.raises(UsageError, match=lacks):
        engine.check(old)


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
