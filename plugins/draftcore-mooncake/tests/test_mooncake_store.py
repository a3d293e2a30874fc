"""The suites, on a real master and the memory of a process that lends it; and what lies where."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_mooncake import transfer
from draftcore_mooncake.buffers import BufferPool
from draftcore_mooncake.objects import Record, object_key
from draftcore_mooncake.settings import Settings
from draftcore_mooncake.store import MooncakeStore
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.stores import StoreSuite, any_bits, number_in, numbered, require_same

from draftcore.contracts.store import SampleRef, StoreError, StoreFull, StoreItem

SOON = 300.0  # seconds in which it comes, however slow the machine
MiB = 1 << 20
LENT_BYTES = 160 * MiB  # as what killed writers left stays
PER_MIB = MiB // 8  # numbers of a sample
BYTES = {name: any_bits(name, 33, 7) for name in ("bfloat16", "float32", "int64", "bool")}
BYTES |= {"none": any_bits("float16", 0, 4), "turned": any_bits("float32", 5, 3).T}


class TestMooncakePlugin(PluginSuite):
    plugin = "draftcore_mooncake.plugin"


class TestMooncakeStore(StoreSuite):
    plugin = "draftcore_mooncake.plugin"

    @pytest.fixture
    def store_uri(self, store_uri: str) -> str:
        return store_uri

    @pytest.fixture
    def store(self, store: MooncakeStore) -> MooncakeStore:
        return store


def key_of(ref: SampleRef) -> str:
    return object_key(Settings.parse(ref.uri).name, ref.feature_id, ref.generation)


def are_there(client: Any, refs: Iterable[SampleRef]) -> list[bool]:
    """Ask the master which samples still take up memory."""
    return [code == 1 for code in client.batch_is_exist([key_of(ref) for ref in refs])]


@pytest.fixture(scope="module")
def own(lender: MooncakeStore) -> Iterator[MooncakeStore]:
    """Another lender, whose memory is preferred by `writer`."""
    store = MooncakeStore.open(f"{lender.uri.partition('?')[0]}-own?max_bytes=20MiB")
    yield store
    store.close()


@pytest.fixture(scope="module")
def opened(own: MooncakeStore) -> Iterator[MooncakeStore]:
    store = MooncakeStore.open(own.uri)  # without a limit: what is lent is the limit
    yield store
    store.close()


@pytest.fixture
def writer(opened: MooncakeStore) -> Iterator[MooncakeStore]:
    yield opened
    assert opened.stats().samples == opened.stats().open_handles == 0


@pytest.mark.parametrize("batch_bytes", [transfer.BATCH_BYTES, 1])
def test_the_lent_memory_fills_pushes_back_and_recovers(
    own: MooncakeStore, writer: MooncakeStore, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    """Pinned samples are never evicted; all or none of a put, also of several batches on the wire."""
    monkeypatch.setattr(transfer, "BATCH_BYTES", batch_bytes)
    held: list[SampleRef] = []
    with suppress(StoreFull):
        while len(held) < 100:
            held.append(writer.put(numbered(f"s{len(held)}", len(held), 8 * PER_MIB)))
    with pytest.raises(StoreFull, match=r"needed: 8\.0 MiB for 1 samples"):
        writer.put(numbered("more", 7, 8 * PER_MIB))
    items = [numbered(name, at, 4 * PER_MIB) for at, name in enumerate("wxyz")]
    with pytest.raises(StoreFull):
        writer.put_many(items)
    assert writer.lookup([*"wxyz"]) == {}
    assert [number_in(writer, ref) for ref in held] == list(range(len(held)))
    writer.free(held[:2])
    refs = writer.put_many(items)
    assert set(writer.lookup(["s0", "s2", *"wxyz"])) == {"s2", *"wxyz"}
    assert [number_in(own, ref) for ref in refs] == [0, 1, 2, 3]
    writer.free([*held, *refs])


def test_a_lender_reads_its_own_memory_in_place_and_notices_altered_bytes(
    own: MooncakeStore, writer: MooncakeStore
) -> None:
    ref = writer.put(StoreItem("a", BYTES, 1))
    key, found, limit = key_of(ref), False, time.monotonic() + SOON
    while not found and time.monotonic() < limit:  # it has to find its memory first
        time.sleep(0.01)
        with own.engine.own_objects([key]) as objects:
            found = key in objects
    with own.get(ref) as handle:
        require_same(handle.tensors, BYTES)
    with own.engine.own_objects([key]) as objects:
        objects[key][5] ^= 1
    with pytest.raises(StoreError, match=r"sample 'a' .* is torn"):
        own.get(ref)
    with writer.engine.own_objects([key]) as objects:
        assert objects == {}
    writer.free([ref])


def test_one_tensor_of_a_sample_is_read_alone(own: MooncakeStore, writer: MooncakeStore) -> None:
    """By the process in whose memory the sample lies, and by another, over the wire."""
    tensors = {"large": any_bits("uint8", 4 * MiB), "small": any_bits("int64", 2)}
    tensors |= {"odd": any_bits("bfloat16", 3, 5), "none": any_bits("float32", 0, 4)}
    refs = writer.put_many([StoreItem(name, tensors, 1) for name in "ab"])
    for reader, names in product((own, writer), (["small"], ["none", "odd"], ["odd", "small"], [])):
        before, buffers = loopback_bytes(), reader.buffers.allocated
        handles = reader.get_many([refs[0], refs[1], refs[0]], names=names)
        moved = loopback_bytes() - before
        for handle in handles:
            require_same(handle.tensors, {name: tensors[name] for name in names})
            handle.close()
        assert moved < 64 << 10, f"{moved} bytes were moved for {names}"
        assert reader.buffers.allocated <= buffers + 4
    own.free(refs)
    for names in ([], ["none"], ["small"]):
        with pytest.raises(StoreError, match="sample 'b'"):
            writer.get(refs[1], names=names)


def loopback_bytes() -> int:
    """The bytes that came through the loopback device, on which these tests are alone."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (received,) = (line.split()[1] for line in lines if line.strip().startswith("lo:"))
    return int(received)


def test_lent_memory_is_touched_before_it_is_needed(lender: MooncakeStore) -> None:
    before = resident_bytes()
    store = MooncakeStore.open(f"{lender.uri.partition('?')[0]}?max_bytes=256MiB")
    limit = time.monotonic() + SOON
    while resident_bytes() < before + 250 * MiB and time.monotonic() < limit:
        time.sleep(0.05)
    assert resident_bytes() > before + 250 * MiB
    store.close()
    assert resident_bytes() < before + 50 * MiB


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def test_in_steady_state_no_buffer_is_allocated(store: MooncakeStore) -> None:
    """Also for samples of changing lengths, of tensors that must be copied, and on four threads."""

    def work(thread: int) -> None:
        for step in range(10):
            rows = 100 + 37 * step
            tensors = {"x": torch.zeros(64, rows).T, "y": torch.zeros(rows, 64)}
            ref = store.put(StoreItem(f"{thread}", tensors, rows))
            store.get(ref).close()
            store.free([ref])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
        warm = store.buffers.allocated
        list(pool.map(work, range(4)))
    assert store.buffers.allocated <= warm + 4  # a coincidence of threads may need one more each
    assert warm < 40


def test_buffers_are_registered_once_and_set_aside_after_a_failure(client: Any) -> None:
    """As for RDMA, with the library's own registration; a buffer is registered at its base."""

    def allocate(nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        assert client.register_buffer(memory.data_ptr(), nbytes) == 0
        return memory

    release = lambda memory: client.unregister_buffer(memory.data_ptr()) == 0  # noqa: E731
    pool = BufferPool(allocate, release, keep_bytes=MiB)
    first = pool.take(100_000)
    pool.give(first)
    assert pool.take(90_000) is first
    pool.set_aside(first)
    second = pool.take(90_000)
    assert second is not first
    assert pool.allocated == 2
    large = pool.take(3 * MiB)
    pool.give(second)
    pool.give(large)  # too much to keep: released
    assert client.unregister_buffer(large.data_ptr()) != 0
    pool.clear()
    assert client.unregister_buffer(second.data_ptr()) != 0


def test_samples_go_to_the_process_that_will_read_them(lender: MooncakeStore, client: Any) -> None:
    """Two trainers lend; what is put through the URI of one of them lies in its memory."""
    base = lender.uri.partition("?")[0]
    ranks = [MooncakeStore.open(f"{base}-ranks?max_bytes=16MiB") for _ in range(2)]
    producers = [MooncakeStore.open(rank.uri) for rank in ranks]

    def place_of(ref: SampleRef) -> str:
        (replica,) = client.get_replica_desc(key_of(ref))
        return str(replica.get_memory_descriptor().buffer_descriptor.transport_endpoint)

    own = [place_of(rank.put(numbered("own", 7, 1))) for rank in ranks]
    assert own[0] != own[1]
    for at, producer in enumerate(producers):
        for number in range(10):
            assert place_of(producer.put(numbered(f"{number}", 7, 12_500))) == own[at]
    for opened in (*producers, *ranks):
        opened.close()


def test_free_removes_what_a_sample_superseded_in_any_process(
    store: MooncakeStore, store_uri: str, client: Any
) -> None:
    """A producer put, died, and its successor put again: the trainer only knows the last ref."""
    first = store.put(numbered("a", 1))
    successor, trainer = MooncakeStore.open(store_uri), MooncakeStore.open(store_uri)
    second = successor.put(numbered("a", 2))
    third = successor.put(numbered("a", 3))
    assert are_there(client, (first, second, third)) == [True, True, True]
    assert number_in(trainer, third) == 3
    trainer.free([third])
    assert are_there(client, (first, second, third)) == [False, False, False]
    fourth, fifth = (successor.put(numbered("a", number)) for number in (4, 5))
    unread = MooncakeStore.open(store_uri)
    unread.free([third, fifth])  # a ref that this process has never read
    assert unread.lookup(["a"]) == {}
    assert are_there(client, (fourth, fifth)) == [False, False]
    for opened in (successor, trainer, unread):
        opened.close()


def test_a_limit_sees_what_others_freed(store_uri: str, store: MooncakeStore) -> None:
    limited = MooncakeStore.open(f"{store_uri.partition('?')[0]}?max_bytes=1MiB")
    for number in range(6):
        store.free([limited.put(numbered(f"{number}", 7, 75_000))])
    assert limited.stats().nbytes <= 600_000
    limited.close()


def test_a_torn_record_is_no_record() -> None:
    ref = SampleRef("a", "ab" * 16, "mooncake://x", (), 0, 0)
    whole = bytearray(Record(ref, ("cd" * 16,)).pack())
    assert Record.unpack("a", memoryview(whole)) == Record(ref, ("cd" * 16,))
    for at in (0, 20, len(whole) - 1):
        torn = bytearray(whole)
        torn[at] ^= 1
        assert Record.unpack("a", memoryview(torn)) is None
    assert Record.unpack("a", memoryview(whole)[:-1]) is None
    assert Record.unpack("a", memoryview(whole)[1:]) is None


def test_an_object_of_another_size_is_no_sample(own: MooncakeStore, writer: MooncakeStore) -> None:
    """Whoever wrote it there, less or more than a ref says, and whoever reads all or some of it."""
    tensors = {name: torch.full((500,), 7, dtype=torch.uint8) for name in ("w", "x")}
    ref = writer.put(StoreItem("a", tensors, 1))
    for nbytes in (100, 1000, 10_000):
        other = torch.zeros(nbytes, dtype=torch.uint8)
        assert writer.engine.replace([key_of(ref)], [(other.data_ptr(), nbytes)]) == [0]
        for reader, names in product((own, writer), (None, ["x"])):
            torn = nbytes == 1000 or (names and nbytes > 1000)  # parts of a larger one are there
            why = "is torn" if torn else "has an object of another size than 1000 bytes"
            with pytest.raises(StoreError, match=f"sample 'a' .* {why}"):
                reader.get(ref, names=names)
            assert reader.stats().open_handles == 0
    writer.free([ref])


def test_a_description_that_is_too_long_is_refused(store: MooncakeStore) -> None:
    item = StoreItem("a", {"x": torch.zeros(3)}, 3, provenance="p" * 70_000)
    with pytest.raises(StoreError, match="shorten its provenance"):
        store.put(item)
    assert store.lookup(["a"]) == {}
