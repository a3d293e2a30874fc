"""The store `shm`: the suites; and beyond them processes that are killed at every line, bytes, and its file.

Other processes are forked here, since starting one anew takes seconds; each opens the store itself.
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.stores import StoreSuite, any_bits, mount_small, numbered, require_same
from draftcore_shm import segment
from draftcore_shm import store as shm
from draftcore_shm.store import ShmStore
from torch import Tensor

from draftcore.contracts.store import SampleRef, StoreError, StoreFull, StoreItem
from draftcore.errors import UsageError

MIB = 1 << 20
SMALL = 48 << 10  # room for two pairs, and not for a third
SOON = 300.0  # seconds on a busy machine


class TestShmPlugin(PluginSuite):
    plugin = "draftcore_shm.plugin"


class TestShmStore(StoreSuite):
    plugin = "draftcore_shm.plugin"

    @pytest.fixture
    def store_uri(self, folder: Path) -> str:
        return f"shm:{folder / 'store'}?max_bytes=64MiB"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in shared memory where there is enough, since a disk is slower."""
    roomy = shm.SHM.exists() and shutil.disk_usage(shm.SHM).free > 256 << 20
    place = Path(tempfile.mkdtemp(dir=shm.SHM)) if roomy else tmp_path
    yield place
    shutil.rmtree(place)


@pytest.fixture
def ring(folder: Path) -> str:
    return str(folder / "ring")


@pytest.fixture
def store(ring: str) -> ShmStore:
    return ShmStore(ring, max_bytes=MIB)


def mapped(ring: str) -> segment.Table:
    """The arrays of a segment, as another process maps them."""
    return segment.Table(segment.FileLocks(Path(ring), create=False))


FORK = multiprocessing.get_context("fork")
Say = Callable[[Any], None]
Work = Callable[[Say], None]


class Child:
    """A forked process that does some work, which may say things; `end` waits for it."""

    def __init__(self, work: Work) -> None:
        self.ear, mouth = FORK.Pipe(duplex=False)

        def start() -> None:
            torch.set_num_threads(1)  # a forked OpenMP pool hangs
            work(mouth.send)

        self.process = FORK.Process(target=start)
        self.process.start()
        self.pid = self.process.pid or 0
        mouth.close()

    def hear(self) -> Any:
        assert self.ear.poll(SOON), "the process hangs"
        return self.ear.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> int | None:
        self.process.join()
        return self.process.exitcode


Fork = Callable[[Work], Child]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Fork children; those still alive at the end are killed."""
    children: list[Child] = []

    def start(work: Work) -> Child:
        children.append(Child(work))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.ear.close()


def forever(_: Say) -> None:
    while True:
        signal.pause()


def checked(feature_id: str, number: int, most: int = 30_000) -> StoreItem:
    """A sample whose content, of some odd size, follows from its number."""
    size = 1 + number * 7919 % most
    return StoreItem(feature_id, {"x": torch.arange(number, number + size)}, size)


def require_checked(store: ShmStore, ref: SampleRef, number: int) -> None:
    with store.get(ref) as handle:
        size = handle.tensors["x"].numel()
        assert torch.equal(handle.tensors["x"], torch.arange(number, number + size))


# ---------------------------------------------------------------- processes that live and are killed


def test_writers_make_and_remove_one_segment_and_pass_hundreds_of_samples_to_who_frees_them(
    ring: str, fork: Fork
) -> None:
    """They open it at once. Then a ring that holds a few samples is full, and comes round many times."""
    writers, puts, pushed_back, nbytes = 3, 250, 0, 0
    opening, reading, refs = FORK.Event(), FORK.Event(), FORK.SimpleQueue()

    def write(first: int, say: Say) -> None:
        assert opening.wait(SOON)
        for number in range(25):
            own = ShmStore(ring, max_bytes=MIB)
            ref = own.put(checked(f"{first}", number, 3000))  # all of them fit
            require_checked(own, ref, number)
            own.free([ref])
            own.close()
        say("came and went")
        assert reading.wait(SOON)
        own, number, end = ShmStore(ring), first, time.monotonic() + SOON
        while number < first + puts:
            try:
                refs.put(own.put(checked(str(number), number)))
                number += 1
            except StoreFull:
                assert time.monotonic() < end, "the store stayed full"
                time.sleep(0.001)
        own.close()

    children = [fork(partial(write, writer * puts)) for writer in range(writers)]
    opening.set()
    assert [child.hear() for child in children] == ["came and went"] * writers
    assert not Path(ring).exists()
    store = ShmStore(ring, max_bytes=MIB)
    reading.set()
    for _ in range(writers * puts):
        ref = refs.get()
        require_checked(store, ref, int(ref.feature_id))
        assert store.lookup([ref.feature_id]) == {ref.feature_id: ref}
        pushed_back += store.stats().nbytes > 0.8 * store.max_bytes
        store.free([ref])
        nbytes += ref.nbytes
    assert [child.end() for child in children] == [0] * writers
    assert nbytes > 50 * store.max_bytes
    assert pushed_back > 10
    assert (store.stats().samples, store.stats().nbytes) == (0, 0)
    store.close()
    assert not Path(ring).exists()


def test_a_frozen_writer_hinders_nobody_and_keeps_its_place(
    store: ShmStore, ring: str, fork: Fork
) -> None:
    """Alive is alive: what it was writing is not given away under it."""
    copying = FORK.Event()

    class Waits(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            copying.set()
            os.kill(os.getpid(), signal.SIGSTOP)
            return super().__getitem__(name)

    def write(say: Say) -> None:
        own = ShmStore(ring)
        own.put(StoreItem("a", Waits(x=torch.full((MIB // 16,), 7)), 1))
        say("put")
        forever(say)

    child = fork(write)
    assert copying.wait(SOON)
    assert store.lookup(["a"]) == {}
    with pytest.raises(StoreFull):
        store.put(numbered("b", 2, numbers=MIB // 10))
    store.free([store.put(numbered("b", 2))])
    while "T (stopped)" not in Path(f"/proc/{child.pid}/status").read_text():
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGCONT)
    assert child.hear() == "put"
    with store.get(store.lookup(["a"])["a"]) as handle:
        assert handle.tensors["x"].tolist() == [7] * (MIB // 16)


def pair(number: int) -> list[StoreItem]:
    return [checked("one", number, 3000), checked("two", number, 3000)]


def require_sound(store: ShmStore) -> int:
    """Some whole pair is held, or what a free has left of it, and no byte of the ring is lost."""
    found = store.lookup(["one", "two"])
    assert set(found) in (set(), {"two"}, {"one", "two"})
    with ExitStack() as stack:
        handles = [stack.enter_context(handle) for handle in store.get_many([*found.values()])]
        numbers = {int(handle.tensors["x"][0]) for handle in handles}
    assert len(numbers) <= 1
    for ref in found.values():
        require_checked(store, ref, *numbers)
    stats = store.stats()
    assert (stats.samples, stats.nbytes) == (len(found), sum(ref.nbytes for ref in found.values()))
    store.free(found.values())
    assert store.stats().nbytes == 0
    store.free([store.put(numbered("all", 1, numbers=store.max_bytes // 8 - 99))])
    return sum(numbers)


def test_a_kill_at_any_step_leaves_a_segment_that_is_sound(folder: Path) -> None:
    """From before the segment is made to after it is removed, a group is superseded and freed.

    At each step of Python's interpreter the file is kept, which is what a kill would leave.
    """
    ring, ours, states = folder / "ring", {segment.__file__, shm.__file__}, [b""]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in ours:
            return None
        frame.f_trace_opcodes = True
        state = ring.read_bytes() if ring.exists() else b""
        if state != states[-1]:
            states.append(state)
        return trace

    def live() -> None:
        store, *others = [ShmStore(str(ring), max_bytes=SMALL) for _ in range(3)]
        others[1].free(others[1].put_many(pair(3)))  # a slot's former owner may be nobody now
        for other in others:
            other.close()
        (one, _) = store.put_many(pair(1))
        handle = store.get(one)
        refs = store.put_many(pair(2))
        handle.close()
        with pytest.raises(StoreFull):
            store.put_many(pair(3))
        store.free(refs)
        store.close()

    before, seen = sys.gettrace(), set()
    sys.settrace(trace)
    try:
        live()
    finally:
        sys.settrace(before)
    assert states[-1] == b""
    for at, state in enumerate(states):
        left = folder / f"ring-{at}"
        left.write_bytes(state)
        store = ShmStore(str(left), max_bytes=SMALL)
        seen.add(require_sound(store))
        store.close()
        assert not left.exists()
    assert seen == {0, 1, 2, 3}
    assert len(states) > 60


def test_a_forked_child_is_told_to_open_the_store_itself_and_keeps_nobodys_handle(
    store: ShmStore, ring: str, fork: Fork
) -> None:
    """What its parent reads is free once the parent is killed, though the child lives on."""
    ref = store.put(numbered("a", 1))

    def parent(say: Say) -> None:
        own = ShmStore(ring)
        handle = own.get(ref)

        def use(said: Say) -> None:
            with pytest.raises(StoreError, match="before this process was forked"):
                own.get(ref)
            handle.close()
            own.close()
            with ShmStore(ring).get(ref) as again:
                said(int(again.tensors["x"][0]))
            forever(said)

        child = Child(use)
        say((child.pid, child.hear(), int(handle.tensors["x"][0])))
        forever(say)

    child = fork(parent)
    grandchild, *read = child.hear()
    assert read == [1, 1]
    store.free([ref])
    with pytest.raises(StoreError, match="is not held"):
        store.get(ref)
    assert store.stats().nbytes == ref.nbytes  # the parent still reads
    child.kill()
    assert store.stats().nbytes == 0
    os.kill(grandchild, signal.SIGKILL)


def test_a_store_that_is_forgotten_leaves_like_one_that_is_killed(
    store: ShmStore, ring: str
) -> None:
    other = ShmStore(ring)
    handle = other.get(other.put(numbered("a", 1)))
    store.abort("a")
    assert store.stats().nbytes > 0
    kept = handle.tensors["x"]
    del other, handle
    assert store.stats().nbytes == 0
    assert kept.shape == (16,)  # its memory is still mapped, whatever lies there now


def test_more_processes_than_a_segment_has_places_for_are_refused(ring: str) -> None:
    stores = [ShmStore(ring, max_bytes=MIB) for _ in range(segment.MEMBERS)]
    with pytest.raises(UsageError, match="256 processes have the store"):
        ShmStore(ring)
    ref = stores[-1].put(numbered("a", 1))
    handles = [store.get(ref) for store in stores]
    stores[0].free([ref])
    for handle in handles[1:]:
        handle.close()
    assert stores[1].stats().nbytes == ref.nbytes
    stores[7].close()
    ShmStore(ring).close()


def test_a_get_on_the_cpu_copies_nothing_and_is_aligned(store: ShmStore) -> None:
    """What a tensor negates without a copy is stored as it reads."""
    tensors = {"m": any_bits("bool", 3), "x": any_bits("bfloat16", 5, 3)}
    tensors["imag"] = torch.imag(torch.tensor([1 + 2j, 3 - 4j]).conj())
    ref = store.put(StoreItem("a", tensors, 5))
    with store.get(ref) as one, store.get(ref) as other:
        assert one.tensors["imag"].tolist() == [-2, 4]
        for name in tensors:
            assert one.tensors[name].data_ptr() == other.tensors[name].data_ptr()
            assert one.tensors[name].data_ptr() % 64 == 0
        one.tensors["m"].logical_not_()  # which nobody may do: the next reader is told
    with pytest.raises(StoreError, match="'m' is torn or altered"):
        store.get(ref)
    with store.get(ref, names=["x"]) as handle:
        require_same(handle.tensors, {"x": tensors["x"]})
    assert store.stats().open_handles == 0


def test_no_altered_byte_of_a_block_is_ever_served(store: ShmStore, ring: str) -> None:
    """Each byte in turn: seals, lengths, description and tensors. Padding may change unnoticed."""
    ref = store.put(StoreItem("a", {"x": torch.tensor([1, 2], dtype=torch.int16)}, 2))
    table, noticed = mapped(ring), 0
    begin = table.blocks_at + int(table.start[0])
    for at in range(begin, begin + int(table.size[0])):
        table.map[at] ^= 255
        try:
            with store.get(ref) as handle:
                assert handle.tensors["x"].tolist() == [1, 2]
        except StoreError as error:
            assert "sample 'a'" in str(error)  # noqa: PT017
            noticed += 1
        table.map[at] ^= 255
    assert noticed > 200
    assert store.stats().open_handles == 0
    store.free([ref])
    assert store.stats().nbytes == 0


def test_blocks_never_overlap_whatever_their_sizes_and_order(store: ShmStore, ring: str) -> None:
    """Random puts and frees in a ring that is mostly full: all that is held stays whole."""
    held, pushed_back, chance = dict[int, SampleRef](), 0, random.Random(1)
    for number in range(500):
        try:
            held[number] = store.put(checked(str(number), number))
        except StoreFull:
            pushed_back += 1
            for old in chance.sample(sorted(held), k=min(len(held), 2)):
                require_checked(store, held[old], old)
                store.free([held.pop(old)])
    table = mapped(ring)
    live = sorted(zip(table.start.tolist(), table.size.tolist(), table.state.tolist(), strict=True))
    ends = [(start, start + size) for start, size, state in live if state != segment.FREE]
    assert len(ends) == len(held) > 3
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    for number, ref in held.items():
        require_checked(store, ref, number)
    assert pushed_back > 30


def test_blocks_go_round_the_ring_and_are_free_again_with_the_last_handle(
    store: ShmStore, ring: str
) -> None:
    """So what a reader looks at too late is not overwritten at once."""
    places, table = [], mapped(ring)
    for number in range(9):
        ref = store.put(numbered("a", number, numbers=MIB // 32))
        with store.get(ref) as handle:
            places.append(handle.tensors["x"].data_ptr())
            store.free([ref])
        assert set(table.state.tolist()) == {segment.FREE}
    assert len(set(places[:3])) == 3
    assert places[3:] == places[:6]


def test_free_bytes_that_lie_scattered_join_when_what_is_between_goes(store: ShmStore) -> None:
    refs = [store.put(numbered(str(at), at, numbers=MIB // 81)) for at in range(10)]
    store.free(refs[::2])
    with pytest.raises(StoreFull, match="may lie scattered") as caught:
        store.put(numbered("big", 1, numbers=MIB // 40))
    assert caught.value.free > caught.value.needed
    store.free(refs[1:2])
    store.put(numbered("big", 1, numbers=MIB // 40))
    with pytest.raises(StoreError, match=r"can never hold.*\n.*raise max_bytes"):
        store.put(numbered("a", 1, numbers=MIB // 8))


def test_more_samples_than_slots_push_back_too(store: ShmStore) -> None:
    refs = store.put_many([numbered(str(at), at, numbers=1) for at in range(1024)])
    with pytest.raises(StoreFull, match="of 1024 slots"):
        store.put(numbered("more", 1))
    store.free(refs[-1:])
    store.put(numbered("more", 1))


def test_stores_that_come_and_go_cost_no_memory_and_no_descriptor(ring: str) -> None:
    ShmStore(ring, max_bytes=8 * MIB).put(numbered("other", 1))
    item = StoreItem("a", {"x": torch.zeros(MIB // 4)}, 1)

    def open_and_close(count: int) -> tuple[int, int]:
        for _ in range(count):
            store = ShmStore(ring)
            ref = store.put(item)
            store.get(ref).close()
            store.free([ref])
            store.close()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum("/" in line for line in maps)

    assert open_and_close(5) == open_and_close(20)
    store = ShmStore(ring)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        store.free([store.put(item)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 500  # of 5,120 pages


@pytest.mark.gpu
def test_tensors_go_from_and_to_a_cuda_device(store: ShmStore) -> None:
    x = any_bits("bfloat16", 9, 7)
    with store.get(store.put(StoreItem("a", {"x": x.cuda().T}, 9)), device="cuda") as handle:
        assert handle.tensors["x"].is_cuda
        require_same({"x": handle.tensors["x"].cpu()}, {"x": x.T})


def test_the_last_to_close_an_empty_store_removes_it_and_no_one_else(
    store: ShmStore, ring: str
) -> None:
    second, ref = ShmStore(ring), store.put(numbered("a", 1))
    store.close()
    handle = second.get(ref)
    second.free([ref])
    second.close()
    assert Path(ring).exists()
    assert int(handle.tensors["x"][0]) == 1  # closing waits for open handles
    handle.close()
    assert not Path(ring).exists()
    third = ShmStore(ring, max_bytes=MIB)
    kept = third.put(numbered("a", 3))
    third.close()
    assert ShmStore(ring).lookup(["a"]) == {"a": kept}


@pytest.fixture
def names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let names lie in a folder of the test's own."""
    monkeypatch.setattr(shm, "SHM", folder)
    return folder


def test_what_killed_runs_left_is_removed_by_the_next_one_which_takes_over_its_own(
    names: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(name: str, say: Say) -> None:
        store = ShmStore(name, max_bytes=MIB)
        store.put(numbered("a", 1))
        say("put")
        forever(say)

    dead, alive = fork(partial(put, "dead")), fork(partial(put, "alive"))
    half = names / f"draftcore-{os.getuid()}-half-made"
    half.write_bytes(segment.UNFINISHED)
    others = [names / "draftcore-notes", names / f"draftcore-{os.getuid() + 1}-dead"]
    for path in others:
        path.touch()
    assert (dead.hear(), alive.hear()) == ("put", "put")
    dead.kill()
    mine = ShmStore.open("shm:mine?max_bytes=1MiB")
    ref = mine.put(numbered("a", 1))
    mine.close()
    assert len(list(names.iterdir())) == 6  # it might have been between two processes of a run
    monkeypatch.setattr(segment, "ABANDONED_SECONDS", -1)
    again = ShmStore.open("shm:mine")
    assert again.lookup(["a"]) == {"a": ref}
    left = {path.name.removeprefix(f"draftcore-{os.getuid()}-") for path in names.iterdir()}
    assert left == {"alive", "mine", *(path.name for path in others)}


def test_two_runs_of_one_name_refuse_each_other(names: Path) -> None:
    first = ShmStore.open("shm:odd%20%3F name?max_bytes=1MiB&run=first")
    ref, uri = first.put(numbered("a", 1)), "shm:odd%20%3F%20name"
    assert ref.uri == uri
    joined = ShmStore.open(uri)  # who does not say takes what is there
    assert (joined.lookup(["a"]), joined.max_bytes) == ({"a": ref}, MIB)
    with pytest.raises(UsageError, match="in use by processes that opened it otherwise") as caught:
        ShmStore.open(f"{uri}?run=second")
    assert "run=first" in str(caught.value)
    with pytest.raises(UsageError, match=r"max_bytes=1\.0 MiB[^$]*max_bytes=2\.0 MiB"):
        ShmStore.open(f"{uri}?max_bytes=2MiB&run=first")
    first.close()
    joined.close()
    again = ShmStore.open(f"{uri}?max_bytes=2MiB&run=second")
    assert again.lookup(["a"]) == {}
    assert again.stats().limit_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: whole[:8] + b"\7" + whole[9:], "it has layout 7, this version reads 1"),
        (lambda whole: b"{" + whole[1:], "is a file of another kind"),
        (lambda whole: whole[:10_000], "was cut short"),
    ],
)
def test_a_file_that_is_no_segment_of_this_version_is_left_alone(
    store: ShmStore, ring: str, change: Callable[[bytes], bytes], message: str
) -> None:
    store.put(numbered("a", 1))
    store.close()
    changed = change(Path(ring).read_bytes())
    Path(ring).write_bytes(changed)
    with pytest.raises(UsageError, match=message):
        ShmStore(ring, max_bytes=2 * MIB)
    assert Path(ring).read_bytes() == changed


def test_a_segment_that_was_removed_while_in_use_says_so(store: ShmStore, ring: str) -> None:
    handle = store.get(store.put(numbered("a", 1)))
    Path(ring).unlink()
    other = ShmStore(ring, max_bytes=MIB)
    with pytest.raises(StoreError, match="was removed while it was in use"):
        store.lookup(["a"])
    handle.close()
    store.close()
    assert Path(ring).exists()
    other.close()


def test_a_segment_is_its_owners_alone(store: ShmStore, ring: str, fork: Fork) -> None:
    assert os.stat(ring).st_mode & 0o777 == 0o600
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    os.chmod(Path(ring).parent, 0o777)

    def intrude(say: Say) -> None:
        os.setuid(65534)
        with pytest.raises(UsageError, match=r"Permission denied.*\n  use another name"):
            ShmStore(ring)
        other = Path(ring).with_name("theirs")
        ShmStore(str(other), max_bytes=MIB).put(numbered("a", 1))

    assert fork(intrude).end() == 0
    with pytest.raises(UsageError, match=r"belongs to another user|Permission denied"):
        ShmStore(str(Path(ring).with_name("theirs")))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("shm:", "has no name"),
        ("shm", "has no name"),
        ("shm:no/such/folder/ring", "No such file"),
        ("shm:/", "Is a directory"),
        ("shm:a?size=3", "unknown option 'size'"),
        (f"shm:{'a' * 300}", "File name too long"),
        (f"shm:a?run={'a' * 600}", "run's name .* is too long"),
    ],
)
def test_a_place_that_cannot_be_is_explained(names: Path, uri: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ShmStore.open(uri)
    assert list(names.iterdir()) == []


def test_too_little_shared_memory_is_an_error_at_once_and_never_a_sigbus(
    tmp_path: Path, fork: Fork
) -> None:
    """On a real tmpfs of 2 MiB: all memory is claimed when the segment is made."""

    def fill(_: Say) -> None:
        if not mount_small(tmp_path, 2 * MIB):
            sys.exit(77)
        with pytest.raises(UsageError) as caught:
            ShmStore.open(f"shm:{tmp_path}/ring?max_bytes=8MiB")
        less = "give the store less (max_bytes=1.0 MiB)"
        for words in ("needs 8.1 MiB", f"{tmp_path} has 2.0 MiB free", "--shm-size", less):
            assert words in str(caught.value)
        assert list(tmp_path.iterdir()) == []
        store, room = ShmStore.open(f"shm:{tmp_path}/ring?max_bytes=1MiB"), os.statvfs(tmp_path)
        (tmp_path / "rest").write_bytes(b"x" * (room.f_bavail * room.f_bsize))
        for at in range(40):
            store.free([store.put(numbered(str(at), at, numbers=40_000))])

    if (status := fork(fill).end()) == 77:
        pytest.skip("this user cannot have mounts of its own")
    assert status == 0
