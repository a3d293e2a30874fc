"""The store `file`: the conformance suite, several writers, crashes, full disks, and its folder."""

import fcntl
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_file.store import FileStore
from draftcore_sdk.stores import StoreSuite, mount_small, number_in, numbered
from safetensors.torch import load_file

from draftcore.contracts.store import StoreError, StoreFull, StoreItem
from draftcore.errors import UsageError
from tests.forks import start_process

NO_MOUNTS = 77  # an exit status


class TestFileStore(StoreSuite):
    plugin, name = "draftcore_file.plugin", "file"

    def alter(self, uri: str) -> None:
        for shard in shards(Path(uri.removeprefix("file:"))):
            flip_byte(shard, -1)


class TestVolatileFileStore(StoreSuite):
    plugin, name = "draftcore_file.plugin", "file"

    @pytest.fixture
    def store_uri(self, tmp_path: Path) -> str:
        return f"file:{tmp_path / 'store'}?volatile=yes"

    @pytest.fixture
    def durable(self) -> None:
        pytest.skip("a volatile store goes with the last process that has it open")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "features"


@pytest.fixture
def store(folder: Path) -> FileStore:
    return FileStore(folder)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- the folder


def test_a_put_is_a_shard_that_any_safetensors_reader_opens_and_that_goes_with_its_last_sample(
    store: FileStore, folder: Path
) -> None:
    refs = store.put_many([numbered("a", 1), numbered("b", 2)])
    (shard,) = shards(folder)
    assert sorted(int(tensor[0]) for tensor in load_file(shard).values()) == [1, 2]
    store.free(refs[:1])
    assert shards(folder) == [shard]
    assert store.stats().nbytes == 2 * 16 * 8  # what lies on the disk, not what is held
    again = store.put(numbered("b", 3))
    assert len(shards(folder)) == 1
    assert not shard.exists()
    assert number_in(store, again) == 3


def test_a_reader_creates_and_removes_nothing_and_may_find_the_folder_elsewhere(
    store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known, or told by a ref, is read without a look at all files: a mount may list late."""
    assert store.lookup(["a"]) == {}
    assert not folder.exists()
    ref = store.put(numbered("a", 1))
    (folder / "shard-dead.tmp").touch()
    before = sorted(os.listdir(folder))
    folder = folder.rename(folder.with_name("moved"))
    reader = FileStore(folder)
    with monkeypatch.context() as mount:
        mount.setattr(os, "listdir", lambda _: [])
        assert number_in(reader, ref) == 1
        assert reader.lookup(["a"])["a"].key == ref.key
    reader.free([])
    reader.abort("absent")
    assert sorted(os.listdir(folder)) == before


def test_only_the_tensors_asked_for_are_read_each_aligned_to_its_type(
    store: FileStore, folder: Path
) -> None:
    """Altering one tensor goes unnoticed by who reads the other."""
    types = [torch.bool, torch.int64, torch.bfloat16, torch.float32]
    tensors = {str(dtype): torch.zeros(3, dtype=dtype) for dtype in types}
    ref = store.put(StoreItem("a", tensors, 3))
    with store.get(ref) as handle:
        for tensor in handle.tensors.values():
            assert tensor.data_ptr() % tensor.element_size() == 0
    flip_byte(shards(folder)[0], -1)  # of what takes the least to align
    store.get(ref, names=["torch.int64"]).close()
    with pytest.raises(StoreError, match=r"tensor 'torch\.bool' of sample 'a' is torn or altered"):
        store.get(ref, names=["torch.bool"])
    assert store.stats().open_handles == 0


def test_what_cannot_be_written_says_why_and_leaves_what_was(
    store: FileStore, folder: Path
) -> None:
    with pytest.raises(StoreError, match=r"'x' has dtype torch\.complex64"):
        store.put(StoreItem("a", {"x": torch.ones(4, dtype=torch.complex64)}, 4))
    store.write_manifest({"fingerprint": "f"})
    with pytest.raises(TypeError):
        store.write_manifest({"fingerprint": object()})
    assert FileStore(folder).read_manifest() == {"fingerprint": "f"}
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    store = FileStore(other := folder.with_name("other"))
    other.touch()
    with pytest.raises(UsageError, match="is not a folder"):
        FileStore(other)
    with pytest.raises(StoreError, match="cannot write to the store"):
        store.put(numbered("a", 1))


def test_the_uri_names_a_relative_or_absolute_folder_and_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert FileStore.open("file:some/where").folder == tmp_path / "some/where"
    store = FileStore.open(f"file://{tmp_path}/odd%20%3F?max_bytes=2MiB")
    assert store.folder == tmp_path / "odd ?"
    assert store.stats().limit_bytes == 2 << 20
    assert FileStore.open(store.uri).folder == store.folder
    with pytest.raises(UsageError, match="names no folder"):
        FileStore.open("file:")


# ---------------------------------------------------------------- several writers, and crashes


def test_two_writers_free_one_batch_side_by_side(store: FileStore, folder: Path) -> None:
    """Sample by sample: the file goes with the last one, and so do the marks of the others."""
    other = FileStore(folder)
    refs = store.put_many([numbered(name, at) for at, name in enumerate("abcd")])
    assert store.lookup("abcd") == other.lookup("abcd")
    store.free(refs[:1])
    assert number_in(other, refs[1]) == 1
    with pytest.raises(StoreError, match="is not held"):
        other.get(refs[0])
    other.free(refs[1:2])
    store.free(refs[3:])
    assert store.lookup("abcd") == FileStore(folder).lookup("abcd") == {"c": refs[2]}
    other.abort("c")
    assert list(folder.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_by_the_next_put(
    store: FileStore, folder: Path
) -> None:
    store.put(numbered("a", 1))
    whole = shards(folder)[0].read_bytes()
    left, others = folder / "shard-1.tmp", folder / "notes.tmp"
    for size in (0, 100, len(whole)):
        left.write_bytes(whole[:size])
        assert store.stats().samples == 1
        with open(left) as writing:
            fcntl.flock(writing, fcntl.LOCK_EX)  # as who writes it does
            store.put(numbered("a", 2))
            assert left.exists()
        store.put(numbered("a", 2))
        assert not left.exists()
    others.touch()
    store.put(numbered("a", 3))
    assert sorted(folder.iterdir()) == [others, *shards(folder)]


def test_a_crash_before_the_old_sample_is_dropped_leaves_the_new_one(
    store: FileStore, folder: Path
) -> None:
    old = store.put(numbered("a", 1))
    before = {path: path.read_bytes() for path in shards(folder)}
    new = store.put(numbered("a", 2))
    for path, data in before.items():
        path.write_bytes(data)
    again = FileStore(folder)
    assert again.lookup(["a"]) == {"a": new}
    with pytest.raises(StoreError, match="put again since"):
        again.get(old)
    again.free([new])
    assert FileStore(folder).lookup(["a"]) == {}


def test_no_altered_byte_of_a_shard_is_ever_served_and_one_cut_short_is_named(
    store: FileStore, folder: Path
) -> None:
    """Each byte in turn: length, header and data. Padding may change unnoticed."""
    ref = store.put(StoreItem("a", {"x": torch.tensor([1, 2], dtype=torch.int16)}, 2))
    (shard,) = shards(folder)
    noticed, whole = 0, shard.read_bytes()
    for at in range(len(whole)):
        flip_byte(shard, at)
        try:
            with store.get(ref) as handle:
                assert handle.tensors["x"].tolist() == [1, 2]
                assert handle.tensors["x"].dtype is torch.int16
            assert FileStore(folder).lookup(["a"]) == {"a": ref}
        except StoreError:
            noticed += 1
        flip_byte(shard, at)
    assert noticed > 300
    for kept in (0, len(whole) // 50, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:kept])
        says, fresh = f"{shard} cannot be read.*\n  remove it and run again", FileStore(folder)
        with pytest.raises(StoreError, match=says):
            fresh.get(ref)
        with pytest.raises(StoreError, match=says):
            fresh.lookup(["a"])
    assert store.stats().open_handles == 0


def test_a_shard_the_user_removed_is_captured_again(store: FileStore, folder: Path) -> None:
    _, kept = store.put(numbered("a", 1)), store.put(numbered("b", 2))
    assert set(store.lookup(["a", "b"])) == {"a", "b"}
    shards(folder)[0].unlink()
    assert store.lookup(["a", "b"]) == {"b": kept}


# ---------------------------------------------------------------- full disks


def fill(folder: Path) -> None:
    """Use a store on a real file system of 2 MiB that fills up."""
    if not mount_small(folder, 2 << 20):
        sys.exit(NO_MOUNTS)
    store = FileStore(folder / "features")
    refs = [store.put(numbered(f"held/{at}", at, numbers=32768)) for at in range(6)]
    pair = store.put_many([numbered("one", 1), numbered("two", 2)])
    before = sorted(os.listdir(store.folder))
    for _ in range(3):
        with pytest.raises(StoreFull, match="No space left") as caught:
            store.put(numbered("more", 9, numbers=98304))
        assert caught.value.needed == 98304 * 8
        assert 0 < caught.value.free < caught.value.needed
        assert sorted(os.listdir(store.folder)) == before
    assert [number_in(store, ref) for ref in refs] == list(range(6))
    with suppress(OSError), open(folder / "ballast", "wb", buffering=0) as ballast:
        while ballast.write(b"x" * 4096):
            pass
    store.free([pair[0], *refs[:3]])
    more = store.put(numbered("more", 9, numbers=90000))
    again = FileStore(folder / "features")
    assert again.lookup(["more", "one", "two", "held/0"]) == {"more": more, "two": pair[1]}
    again.get(more).close()


def test_a_full_disk_pushes_back_and_the_store_stays_whole(tmp_path: Path) -> None:
    process = start_process(fill, tmp_path)
    process.join()
    if process.exitcode == NO_MOUNTS:
        pytest.skip("this user cannot have mounts of its own")
    assert process.exitcode == 0


# ---------------------------------------------------------------- volatile stores


def test_a_volatile_store_goes_with_the_last_process_that_has_it_open(folder: Path) -> None:
    one = FileStore.open(f"file:{folder}?volatile=yes&max_bytes=1MiB")
    ref = one.put(numbered("a", 1))
    other = FileStore.open(one.uri)
    one.close()
    with other.get(ref) as handle:
        other.close()
        other.close()
        assert int(handle.tensors["x"][0]) == 1
    assert not folder.exists()


def put_and_stay(say: "Connection[str, Any]", uri: str) -> None:
    FileStore.open(uri).put(numbered("a", 1))
    say.send("put")
    signal.pause()


def test_a_volatile_store_that_killed_processes_left_is_removed_by_the_next(folder: Path) -> None:
    def open_beside() -> None:
        FileStore.open(f"file:{folder.with_name('other')}?volatile=yes").close()

    lasting = FileStore(folder.with_name("lasting"))
    lasting.put(numbered("a", 1))
    ear, mouth = multiprocessing.Pipe()
    user = start_process(put_and_stay, mouth, f"file:{folder}?volatile=yes")
    assert ear.recv() == "put"
    open_beside()
    assert set(FileStore(folder).lookup(["a"])) == {"a"}
    user.kill()
    user.join()
    open_beside()
    assert not folder.exists()
    assert lasting.stats().samples == 1
