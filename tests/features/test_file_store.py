"""The store `file`: the conformance suite, crashes at any byte, full disks, and its folder."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from draftcore_sdk.stores import StoreSuite, numbered
from draftcore_sdk.suite import child_environment
from safetensors.torch import load_file

from draftcore.contracts.store import StoreError, StoreFull, StoreItem
from draftcore.errors import DraftcoreError, UsageError
from draftcore.features.stores.file import FileStore


class TestFileStore(StoreSuite):
    plugin, name = "draftcore.builtin", "file"

    @pytest.fixture
    def store_uri(self, tmp_path: Path) -> str:
        return f"file:{tmp_path / 'features'}"

    def alter(self, uri: str) -> None:
        for shard in shards(Path(uri.removeprefix("file:"))):
            flip_byte(shard, -1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "features"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- the folder


def test_one_put_is_one_shard_that_any_safetensors_reader_opens(folder: Path) -> None:
    store = FileStore(folder)
    store.put_many([numbered("a", 1), numbered("b", 2)])
    (shard,) = shards(folder)
    assert sorted(int(tensor[0]) for tensor in load_file(shard).values()) == [1, 2]
    assert len((folder / "index.jsonl").read_text().splitlines()) == 1


def test_a_shard_goes_with_the_last_sample_that_needs_it(folder: Path) -> None:
    store = FileStore(folder)
    refs = store.put_many([numbered("a", 1), numbered("b", 2)])
    store.free(refs[:1])
    assert len(shards(folder)) == 1
    assert store.stats().nbytes == 2 * 16 * 8  # what lies on the disk, not what is held
    store.put(numbered("b", 3))
    assert len(shards(folder)) == 1
    with store.get(store.lookup(["b"])["b"]) as handle:
        assert int(handle.tensors["x"][0]) == 3


def test_a_reader_creates_and_removes_nothing(folder: Path) -> None:
    assert FileStore(folder).lookup(["a"]) == {}
    assert not folder.exists()
    writer = FileStore(folder)
    ref = writer.put(numbered("a", 1))
    writer.close()
    (folder / "shard-dead.tmp").touch()
    (folder / ".lock").unlink()
    before = sorted(folder.iterdir())
    reader = FileStore(folder)
    reader.get(ref).close()
    reader.free([])
    reader.abort("absent")
    assert sorted(folder.iterdir()) == before


def test_a_moved_folder_serves_the_refs_of_the_old_place(folder: Path) -> None:
    store = FileStore(folder)
    ref = store.put(numbered("a", 1))
    store.close()
    folder.rename(folder.with_name("moved"))
    with FileStore(folder.with_name("moved")).get(ref) as handle:
        assert int(handle.tensors["x"][0]) == 1


def test_only_the_tensors_asked_for_are_read(folder: Path) -> None:
    """Altering one tensor goes unnoticed by who reads the other."""
    store = FileStore(folder)
    ref = store.put(StoreItem("a", {"x": torch.ones(4), "last": torch.ones(4)}, 4))
    flip_byte(shards(folder)[0], -1)
    store.get(ref, names=["x"]).close()
    with pytest.raises(StoreError, match="'last' is torn or altered"):
        store.get(ref, names=["last"])
    assert store.stats().open_handles == 0


def test_each_tensor_lies_aligned_to_its_type(folder: Path) -> None:
    store = FileStore(folder)
    types = [torch.bool, torch.int64, torch.bfloat16, torch.float32]
    tensors = {str(dtype): torch.zeros(3, dtype=dtype) for dtype in types}
    with store.get(store.put(StoreItem("a", tensors, 3))) as handle:
        for tensor in handle.tensors.values():
            assert tensor.data_ptr() % tensor.element_size() == 0


def test_an_unknown_dtype_is_named_and_leaves_nothing(folder: Path) -> None:
    store = FileStore(folder)
    with pytest.raises(StoreError, match=r"'x' has dtype torch\.complex64"):
        store.put(StoreItem("a", {"x": torch.ones(4, dtype=torch.complex64)}, 4))
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "index.jsonl"]


# ---------------------------------------------------------------- one writer


def test_a_second_writer_is_refused_by_name_until_the_first_closes(folder: Path) -> None:
    first, second = FileStore(folder), FileStore(folder)
    ref = first.put(numbered("a", 1))
    with pytest.raises(
        DraftcoreError, match=rf"process \d+ on .* is writing to the store {folder}"
    ):
        second.put(numbered("b", 2))
    second.get(ref).close()
    first.close()
    second.put(numbered("b", 2))
    assert set(second.lookup(["a", "b"])) == {"a", "b"}


def test_a_reader_follows_frees_and_puts_of_the_writer(folder: Path) -> None:
    reader, writer = FileStore(folder), FileStore(folder)
    old = writer.put(numbered("a", 1))
    handle = reader.get(old)
    new = writer.put(numbered("a", 2))
    with pytest.raises(StoreError, match="put again since"):
        reader.get(old)
    assert int(handle.tensors["x"][0]) == 1  # the mapping outlives the removed file
    writer.free([new])
    assert reader.lookup(["a"]) == {}


# ---------------------------------------------------------------- crashes


def test_a_crash_at_any_byte_of_the_index_loses_the_last_put_only(folder: Path) -> None:
    store = FileStore(folder)
    store.put(numbered("a", 1))
    whole = (folder / "index.jsonl").stat().st_size
    store.put(numbered("b", 2))
    store.close()
    index = (folder / "index.jsonl").read_bytes()
    for size in {*range(whole, len(index), 7), len(index) - 1}:
        broken = folder.with_name(f"broken-{size}")
        shutil.copytree(folder, broken)
        (broken / "index.jsonl").write_bytes(index[:size])
        reader, writer = FileStore(broken), FileStore(broken)
        assert set(reader.lookup(["a", "b"])) == {"a"}
        writer.put(numbered("c", 3))
        assert set(reader.lookup(["a", "b", "c"])) == {"a", "c"}
        assert len(shards(broken)) == 2  # b's, which nothing names, was collected
        writer.close()
        assert set(FileStore(broken).lookup(["a", "b", "c"])) == {"a", "c"}
        shutil.rmtree(broken)


def test_a_writer_collects_what_a_killed_one_left(folder: Path) -> None:
    store = FileStore(folder)
    store.put(numbered("a", 1))
    store.close()
    left = [folder / "shard-1.tmp", folder / "shard-2.safetensors"]
    others = folder / "notes.tmp"
    for path in [*left, others]:
        path.write_bytes(b"half")
    FileStore(folder).put(numbered("b", 2))
    assert not any(path.exists() for path in left)
    assert others.exists()
    assert len(shards(folder)) == 2


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.999])
def test_a_shard_cut_short_raises_with_file_and_sample(folder: Path, keep: float) -> None:
    store = FileStore(folder)
    ref = store.put(numbered("a", 1, numbers=1000))
    (shard,) = shards(folder)
    shard.write_bytes(shard.read_bytes()[: int(keep * shard.stat().st_size)])
    with pytest.raises(StoreError, match=f"sample 'a' cannot be read from {shard}"):
        store.get(ref)


def test_no_altered_byte_of_a_shard_is_ever_served(folder: Path) -> None:
    """Each byte in turn: length, header and data. Padding and metadata may change unnoticed."""
    store = FileStore(folder)
    item = StoreItem("a", {"x": torch.tensor([1, 2], dtype=torch.int16)}, 2)
    ref = store.put(item)
    (shard,) = shards(folder)
    noticed = 0
    for at in range(shard.stat().st_size):
        flip_byte(shard, at)
        try:
            with store.get(ref) as handle:
                assert handle.tensors["x"].tolist() == [1, 2]
                assert handle.tensors["x"].dtype is torch.int16
        except StoreError:
            noticed += 1
        flip_byte(shard, at)
    assert noticed > 100
    assert store.stats().open_handles == 0


def test_a_shard_the_user_removed_is_captured_again(folder: Path) -> None:
    store = FileStore(folder)
    gone, kept = store.put(numbered("a", 1)), store.put(numbered("b", 2))
    store.close()
    (folder / f"shard-{gone.generation}.safetensors").unlink()
    again = FileStore(folder)
    assert again.lookup(["a", "b"]) == {"b": kept}
    assert again.stats().samples == 1


def test_a_damaged_line_of_the_index_is_an_error(folder: Path) -> None:
    FileStore(folder).put(numbered("a", 1))
    index = folder / "index.jsonl"
    index.write_bytes(b"{oops\n" + index.read_bytes())
    with pytest.raises(StoreError, match=r"index\.jsonl is damaged at byte 0"):
        FileStore(folder)


# ---------------------------------------------------------------- full disks

FULL_DISK = """
import sys
from pathlib import Path
from draftcore.contracts.store import StoreFull
from draftcore.features.stores.file import FileStore
from draftcore_sdk.stores import numbered

folder = Path(sys.argv[1])
store = FileStore(folder / "features")
refs = [store.put(numbered(f"held/{at}", at, numbers=32768)) for at in range(6)]
before = sorted(path.name for path in store.folder.iterdir())
for _ in range(3):
    try:
        store.put(numbered("more", 9, numbers=98304))
    except StoreFull as error:
        assert error.needed == 98304 * 8, error.needed
        assert 0 < error.free < error.needed, error.free
        assert "No space left" in str(error), error
    else:
        raise AssertionError("the disk was not full")
    assert sorted(path.name for path in store.folder.iterdir()) == before

with open(folder / "ballast", "wb", buffering=0) as ballast:
    try:
        while ballast.write(b"x" * 4096):
            pass
    except OSError:
        ballast.truncate(ballast.tell() // 4096 * 4096 - 4096)
index = store.folder / "index.jsonl"
lines = index.read_bytes()
try:
    store.put(numbered("long" * 5000, 1, numbers=1))  # the shard fits, its line does only in part
except StoreFull:
    assert index.read_bytes() == lines
else:
    raise AssertionError("the index fitted")
assert sorted(path.name for path in store.folder.iterdir()) == before
(folder / "ballast").unlink()
for at, ref in enumerate(refs):
    with store.get(ref) as handle:
        assert handle.tensors["x"].tolist() == [at] * 32768
store.free(refs[:3])
more = store.put(numbered("more", 9, numbers=98304))
store.close()
again = FileStore(folder / "features")
assert again.lookup(["more", "held/0", "held/5"]) == {"more": more, "held/5": refs[5]}
again.get(more).close()
print("recovered")
"""


def test_a_full_disk_pushes_back_and_the_store_stays_whole(tmp_path: Path) -> None:
    """On a real file system of 2 MiB that fills up."""
    small, program = tmp_path / "small", tmp_path / "program.py"
    small.mkdir()
    program.write_text(textwrap.dedent(FULL_DISK))
    mount = f"mount -t tmpfs -o size=2M tmpfs {small}"
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*alone, mount]).returncode:
        pytest.skip("needs unshare and user namespaces for a file system of its own")
    done = subprocess.run(
        [*alone, f"{mount} && {sys.executable} {program} {small}"],
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    assert done.stdout == "recovered\n", done.stderr


def test_a_failed_put_leaves_no_file(folder: Path) -> None:
    store = FileStore(folder, max_bytes=1000)
    kept = store.put(numbered("a", 1))
    with pytest.raises(StoreFull, match="raise max_bytes"):
        store.put(numbered("b", 2, numbers=500))
    assert len(shards(folder)) == 1
    assert FileStore(folder).lookup(["a", "b"]) == {"a": kept}


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        FileStore(tmp_path / "file")
    store = FileStore(tmp_path / "later" / "features")
    (tmp_path / "later").touch()
    with pytest.raises(StoreError, match="cannot write to the store"):
        store.put(numbered("a", 1))


# ---------------------------------------------------------------- manifest and URI


def test_the_manifest_comes_back_in_another_process(folder: Path) -> None:
    store = FileStore(folder)
    assert store.read_manifest() is None
    store.write_manifest({"fingerprint": "f", "lengths": [3, 4]})
    store.write_manifest({"fingerprint": "g", "complete": True})
    store.close()
    assert FileStore(folder).read_manifest() == {"fingerprint": "g", "complete": True}
    assert not list(folder.glob("*.tmp"))


def test_a_manifest_that_cannot_be_written_leaves_the_old_one(folder: Path) -> None:
    store = FileStore(folder)
    store.write_manifest({"fingerprint": "f"})
    with pytest.raises(TypeError):
        store.write_manifest({"fingerprint": object()})
    assert store.read_manifest() == {"fingerprint": "f"}


def test_the_manifest_needs_the_writers_lock(folder: Path) -> None:
    first = FileStore(folder)
    first.write_manifest({})
    with pytest.raises(DraftcoreError, match="is writing to the store"):
        FileStore(folder).write_manifest({})


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


def test_index_lines_hold_metadata_only(folder: Path) -> None:
    """A line per put, whatever the features weigh: the index in memory is as small."""
    FileStore(folder).put(numbered("a", 1, numbers=100_000))
    line = (folder / "index.jsonl").read_text()
    assert len(line) < 400
    assert json.loads(line)["samples"][0]["nbytes"] == 800_000
