"""Store `file`: safetensors shards in a folder, and an index of JSON lines that says what counts.

    DIR/shard-<generation>.safetensors   one put: a capture group, in a file any tool can read
    DIR/index.jsonl                      {"put": generation, "samples": [...], "xxh3": [...]}
                                         {"free": [[feature id, generation], ...]}
    DIR/manifest.json                    what a training host needs to know of the features
    DIR/.lock                            held by the one writer

A shard is written under another name, fsync'd and renamed; then one fsync'd line in the index makes it count.
So a crash at any byte loses at most the put it interrupted: a last line without its end is
ignored, and the next writer removes it together with shards that no line names. Lines are only
ever appended, so readers need no lock, follow a writer in another process, and work on a
read-only mount.

Tensors are memory-mapped, not loaded; each one's xxh3 digest is checked at every get (9 GB/s from
the page cache). Shards are written by hand: safetensors' writer refuses views of one padded batch,
which is what a capture yields, and hides ENOSPC in a message.
"""

import contextlib
import errno
import json
import os
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftcore.contracts.store import SampleRef, StoreError, StoreFull, StoreItem, StoreStats
from draftcore.errors import DraftcoreError, UsageError
from draftcore.features.stores.base import (
    Key,
    Ledger,
    OpenHandle,
    describe_items,
    new_generation,
    require_room,
    select_names,
)
from draftcore.features.stores.seals import bytes_of
from draftcore.files import hold, sync, write_atomic
from draftcore.uris import parse_uri

SAFETENSORS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


@dataclass
class _Shard:
    """How many of a shard's samples are still needed, and the bytes of all it was written with."""

    samples: int
    nbytes: int


@dataclass(frozen=True)
class _Place:
    """A sample's position in its shard, and its tensors' digests in the order of its ref."""

    position: int
    digests: tuple[str, ...]


class FileStore:
    """Features in a folder, at most `max_bytes` of them; they outlive the process.

    Any number of readers and one writer, in any processes that see the folder. A store becomes the
    writer with its first put, free of a held sample, or manifest, and stays it until `close`.
    """

    def __init__(self, folder: Path, *, max_bytes: int | None = None) -> None:
        self.folder = folder.absolute()
        self.uri = f"file:{quote(str(self.folder))}"
        self.max_bytes = max_bytes
        self._ledger = Ledger(self._reclaim)
        self._places: dict[Key, _Place] = {}
        self._shards: dict[str, _Shard] = {}
        self._nbytes = 0  # of the shards that are not reclaimed
        self._index = self.folder / "index.jsonl"
        self._index_bytes = 0  # of the index's whole lines, which are all applied
        self._lock_fd: int | None = None
        self._closed = False
        self._mutex = threading.RLock()  # guards the ledger and the index, not the moving of bytes
        self._put_mutex = threading.Lock()
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"the store {self.folder} is not a folder\n  name another one")
        self._refresh()
        self._drop_removed_shards()

    @classmethod
    def open(cls, uri: str) -> "FileStore":
        """Open `file:FOLDER`, relative or absolute, or `file:FOLDER?max_bytes=200GiB`."""
        parsed = parse_uri(uri, known=["max_bytes"])
        if not parsed.path:
            raise UsageError(f"the store {uri!r} names no folder\n  write file:FOLDER")
        return cls(Path(parsed.path).expanduser(), max_bytes=parsed.size("max_bytes"))

    # ------------------------------------------------------------ writing

    def put(self, item: StoreItem) -> SampleRef:
        return self.put_many([item])[0]

    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        """Write one shard. Raises StoreFull when the limit or the disk is reached."""
        generation = new_generation()
        refs = describe_items(items, generation, self.uri)
        if not refs:
            return ()
        shard = self._shard_path(generation)
        partial = shard.with_suffix(".tmp")
        with self._put_mutex, self._explain_os_errors(refs):
            with self._mutex:
                self._become_writer()
                require_room(self.uri, refs, held_bytes=self._nbytes, max_bytes=self.max_bytes)
            try:
                digests = _write_shard(partial, generation, items)
                partial.rename(shard)
                sync(self.folder)
                with self._mutex:
                    self._append(_put_record(generation, refs, digests))
            except BaseException:
                partial.unlink(missing_ok=True)
                shard.unlink(missing_ok=True)
                raise
        return refs

    def free(self, refs: Iterable[SampleRef]) -> None:
        with self._mutex, self._explain_os_errors([]):
            self._require_open()
            self._refresh()
            held = [ref for ref in refs if self._ledger.holds(ref)]
            if held:
                self._become_writer()
                self._append({"free": [ref.key for ref in held]})

    def abort(self, feature_id: str) -> None:
        self.free(self.lookup([feature_id]).values())

    def write_manifest(self, data: Mapping[str, Any]) -> None:
        """Replace the manifest: JSON data for whoever trains from this folder."""
        with self._mutex, self._explain_os_errors([]):
            self._become_writer()
            write_atomic(self._manifest, json.dumps(dict(data), indent=1))

    # ------------------------------------------------------------ reading

    def get(
        self, ref: SampleRef, device: str = "cpu", names: Sequence[str] | None = None
    ) -> OpenHandle:
        return self.get_many([ref], device, names)[0]

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[OpenHandle, ...]:
        with self._mutex:
            self._require_open()
            self._refresh()
            for ref in refs:
                self._ledger.require(ref)
            held = [self._ledger.held[ref.feature_id] for ref in refs]
            places = [self._places[ref.key] for ref in held]
            wanted = [select_names(ref, names) for ref in held]
            for ref in held:
                self._ledger.open(ref)
        try:
            tensors = self._read(held, places, wanted, device)
        except BaseException:
            for ref in held:
                self._close_handle(ref)
            raise
        return tuple(
            OpenHandle(ref, found, self._close_handle)
            for ref, found in zip(held, tensors, strict=True)
        )

    def lookup(self, feature_ids: Sequence[str]) -> dict[str, SampleRef]:
        with self._mutex:
            self._require_open()
            self._refresh()
            held = self._ledger.held
            return {
                feature_id: held[feature_id] for feature_id in feature_ids if feature_id in held
            }

    def read_manifest(self) -> dict[str, Any] | None:
        """Return what `write_manifest` wrote last, or None."""
        try:
            data: dict[str, Any] = json.loads(self._manifest.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StoreError(
                f"{self._manifest} is not what this store wrote: {error}\n"
                "  copy the store again, or capture again into an empty folder"
            ) from error
        return data

    def stats(self) -> StoreStats:
        """Bytes are those of the shards on disk: a shard goes when its last sample does."""
        with self._mutex:
            self._refresh()
            handles = self._ledger.open_handles
            place = next(f for f in (self.folder, *self.folder.parents) if f.exists())
            free = shutil.disk_usage(place).free
            return StoreStats(len(self._ledger.held), self._nbytes, self.max_bytes, handles, free)

    def close(self) -> None:
        """Let another writer in. Tensors of open handles stay valid."""
        with self._put_mutex, self._mutex:
            self._closed = True
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    # ------------------------------------------------------------ the writer's part

    def _become_writer(self) -> None:
        """Take the lock, once, and remove what a killed writer left."""
        self._require_open()
        if self._lock_fd is not None:
            return
        try:
            lock_fd = hold(
                self.folder / ".lock",
                f"is writing to the store {self.folder}",
                "a file store has one writer: wait for it to end, or use another folder",
            )
        except DraftcoreError as error:
            raise UsageError(str(error)) from None  # no batch is at fault, and no later try helps
        try:
            self._refresh()
            self._index.touch()
            os.truncate(self._index, self._index_bytes)
            for path in self.folder.glob("shard-*.tmp"):
                path.unlink()
            for path in self.folder.glob("shard-*.safetensors"):
                if path.stem.removeprefix("shard-") not in self._shards:
                    path.unlink()
            sync(self.folder)
        except BaseException:
            os.close(lock_fd)
            raise
        self._lock_fd = lock_fd

    def _append(self, record: Mapping[str, Any]) -> None:
        """Make a record count: all of its line is on the disk, or none of it."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with open(self._index, "ab", buffering=0) as file:
            try:
                written = 0
                while written < len(line):
                    written += file.write(line[written:])
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(self._index_bytes)
                raise
        self._index_bytes += len(line)
        self._apply(record)

    def _reclaim(self, ref: SampleRef) -> None:
        del self._places[ref.key]
        shard = self._shards[ref.generation]
        shard.samples -= 1
        if not shard.samples:
            del self._shards[ref.generation]
            self._nbytes -= shard.nbytes
            if self._lock_fd is not None:  # else the next writer removes it
                self._shard_path(ref.generation).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explain_os_errors(self, refs: Sequence[SampleRef]) -> Iterator[None]:
        """Turn a full disk into StoreFull, and what else the disk says into a StoreError."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(
                    f"cannot write to the store {self.folder}: {error}\n"
                    "  check that the folder exists and may be written to"
                ) from error
            raise StoreFull(
                self.uri,
                needed=sum(ref.nbytes for ref in refs),
                samples=len(refs),
                free=shutil.disk_usage(self.folder).free,
                limit=f"the disk or its quota ({error.strerror})",
                remedy="free samples or disk space, then go on; what is stored stays readable",
            ) from error

    # ------------------------------------------------------------ the index

    def _refresh(self) -> None:
        """Apply the lines that were added to the index since; a last line without end waits."""
        try:
            size = self._index.stat().st_size
        except FileNotFoundError:
            size = 0
        if size < self._index_bytes:
            raise StoreError(
                f"{self._index} was replaced while this store was open\n  open the store again"
            )
        if size == self._index_bytes:
            return
        with open(self._index, "rb") as file:
            file.seek(self._index_bytes)
            for line in file:
                if line.endswith(b"\n"):
                    self._apply(self._parse(line))
                    self._index_bytes += len(line)

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise StoreError(
                f"{self._index} is damaged at byte {self._index_bytes}: {error}\n"
                "  copy the store again, or capture again into an empty folder"
            ) from error
        return record

    def _apply(self, record: Mapping[str, Any]) -> None:
        for feature_id, generation in record.get("free", ()):
            held = self._ledger.held.get(feature_id)
            if held is not None and held.generation == generation:
                self._ledger.drop(held)
        if "put" not in record:
            return
        place = {"generation": record["put"], "uri": self.uri}
        refs = [SampleRef.from_json({**sample, **place}) for sample in record["samples"]]
        shard = _Shard(len(refs), sum(ref.nbytes for ref in refs))
        self._shards[record["put"]] = shard
        self._nbytes += shard.nbytes
        for position, (ref, digests) in enumerate(zip(refs, record["xxh3"], strict=True)):
            self._places[ref.key] = _Place(position, tuple(digests))
            self._ledger.add(ref)

    def _drop_removed_shards(self) -> None:
        """Forget samples whose file the user removed, so that they are captured again."""
        present = {path.stem for path in self.folder.glob("shard-*.safetensors")}
        for ref in list(self._ledger.held.values()):
            if self._shard_path(ref.generation).stem not in present:
                self._ledger.drop(ref)

    # ------------------------------------------------------------ tensors

    def _read(
        self,
        refs: Sequence[SampleRef],
        places: Sequence[_Place],
        wanted: Sequence[Sequence[str]],
        device: str,
    ) -> list[dict[str, Tensor]]:
        """Read samples, opening each shard once."""
        found: list[dict[str, Tensor]] = [{} for _ in refs]
        by_shard = sorted(range(len(refs)), key=lambda at: refs[at].generation)
        for generation, group in groupby(by_shard, key=lambda at: refs[at].generation):
            path = self._shard_path(generation)
            members = list(group)
            at = members[0]
            try:
                with safe_open(path, framework="pt") as shard:
                    for at in members:
                        tensors = _checked(shard, refs[at], places[at], wanted[at])
                        found[at] = {name: value.to(device) for name, value in tensors}
            except (SafetensorError, OSError, ValueError) as error:
                raise StoreError(
                    f"sample {refs[at].feature_id!r} cannot be read from {path}: {error}\n"
                    "  remove that file and run again; its samples are then captured again"
                ) from error
        return found

    def _close_handle(self, ref: SampleRef) -> None:
        with self._mutex:
            self._ledger.close(ref)

    def _shard_path(self, generation: str) -> Path:
        return self.folder / f"shard-{generation}.safetensors"

    @property
    def _manifest(self) -> Path:
        return self.folder / "manifest.json"

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.uri} is closed\n  open it again")


def _write_shard(path: Path, generation: str, items: Sequence[StoreItem]) -> list[dict[str, str]]:
    """Write a durable safetensors file tensor by tensor; return each one's xxh3 by its name."""
    entries = [
        (position, name, tensor)
        for position, item in enumerate(items)
        for name, tensor in item.tensors.items()
    ]
    entries.sort(key=lambda entry: -entry[2].element_size())  # so that each one lies aligned
    digests: list[dict[str, str]] = [{} for _ in items]
    header = _header(generation, entries)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for position, name, tensor in entries:
            data = bytes_of(tensor.detach().cpu().contiguous())
            digests[position][name] = xxhash.xxh3_64_hexdigest(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digests


def _header(generation: str, entries: Sequence[tuple[int, str, Tensor]]) -> bytes:
    """Return the JSON header of a safetensors file, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for position, name, tensor in entries:
        if tensor.dtype not in SAFETENSORS:
            raise StoreError(
                f"tensor {name!r} has dtype {tensor.dtype}, which a file store cannot hold\n"
                f"  it holds: {', '.join(str(dtype) for dtype in SAFETENSORS)}"
            )
        end = offset + tensor.numel() * tensor.element_size()
        header[_inner_name(generation, position, name)] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def _inner_name(generation: str, position: int, name: str) -> str:
    """Name a tensor inside its shard. A feature id would not do: it may hold slashes."""
    return f"{generation}/{position}/{name}"


def _put_record(
    generation: str, refs: Sequence[SampleRef], digests: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    samples = [ref.to_json() for ref in refs]
    for sample in samples:
        del sample["generation"], sample["uri"]  # the line's, and wherever the folder is mounted
    sums = [
        [digest[spec.name] for spec in ref.tensors]
        for ref, digest in zip(refs, digests, strict=True)
    ]
    return {"put": generation, "samples": samples, "xxh3": sums}


def _checked(
    shard: Any, ref: SampleRef, place: _Place, wanted: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a sample's tensors. Raises ValueError for one that is not what was put."""
    sums = dict(zip((spec.name for spec in ref.tensors), place.digests, strict=True))
    specs = {spec.name: spec for spec in ref.tensors}
    for name in wanted:
        tensor: Tensor = shard.get_tensor(_inner_name(ref.generation, place.position, name))
        spec = specs[name]
        same = (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}")
        if not same or xxhash.xxh3_64_hexdigest(bytes_of(tensor)) != sums[name]:
            raise ValueError(f"tensor {name!r} is torn or altered")
        yield name, tensor
