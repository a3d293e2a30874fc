"""Store `file`: safetensors files in a folder, whose names say what is held.

    DIR/shard-<generation>.safetensors              one put: a batch, in a file that any tool can read
    DIR/shard-<generation>.safetensors.freed-<row>  empty: this row of it, from 0 on, was freed
    DIR/manifest.json                               what a training host needs to know of the features
    DIR/.volatile                                   of a volatile store: locked by who has it open

A shard's metadata hold its samples' refs, with the digest of each tensor. It is written under another
name, fsync'd and renamed, so a crash at any byte loses at most the put it interrupted. A batch is freed
as it was put: a shard of which no sample is held is removed. Its bytes stay until then, and the mark of
a sample that was freed alone. A put again supersedes: of two samples of one id the younger generation
counts. So there is no index and no lock, and no file changes once it has its name. Any number of
processes write, and those that read need no more than to list the folder.

Tensors are memory-mapped, not loaded; each one's digest is checked at every get (9 GB/s from the page
cache). Who reads keeps the bytes of a file that is removed. Shards are written by hand: safetensors'
writer refuses views of one padded batch, which is what a capture yields, and hides ENOSPC in a message.

A volatile store (`?volatile=yes`) is for memory: nothing is fsync'd, who closes it last removes the
folder, and who opens one removes those beside it that killed processes left.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftcore.contracts.store import SampleRef, StoreError
from draftcore.errors import UsageError
from draftcore.files import read_sealed, regular, sync, write_sealed
from draftcore.uris import parse_uri
from draftcore_file.base import BaseStore, Tensors, bytes_of, writing

# The types that are stored, as torch and as safetensors name them.
TORCH = (
    "bool uint8 int8 int16 int32 int64 float8_e4m3fn float8_e5m2 float16 bfloat16 float32 float64"
)
SAFETENSORS = "BOOL U8 I8 I16 I32 I64 F8_E4M3 F8_E5M2 F16 BF16 F32 F64"
DTYPES = dict(zip(TORCH.split(), SAFETENSORS.split(), strict=True))
NAME = re.compile(r"shard-[0-9a-f]{32}\.safetensors(\.freed-\d+)?")
MARK = ".volatile"


class FileStore(BaseStore):
    """Features in a folder, at most `max_bytes` of them; they outlive the process unless volatile.

    Any number of readers and writers, in any processes that see the folder.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int | None = None, volatile: bool = False
    ) -> None:
        self.folder, self.volatile = folder.absolute(), volatile
        self._sync = (lambda path: None) if volatile else sync
        uri = f"file:{quote(str(self.folder))}{'?volatile=yes' if volatile else ''}"
        super().__init__(uri, max_bytes)
        self._shards: dict[str, Sequence[SampleRef]] = {}  # what was put, by the name of its file
        self._marks: set[str] = set()  # names of files that say what was freed of these
        self._held: dict[str, SampleRef] = {}  # the newest of each id
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"the store {self.folder} is not a folder\n  name another one")
        with writing(uri, self.folder):
            self._mark = _join(self.folder) if volatile else None

    @classmethod
    def open(cls, uri: str) -> "FileStore":
        """Open `file:FOLDER`, relative or absolute; options are `max_bytes=200GiB`, `volatile=yes`."""
        parsed = parse_uri(uri, known=["max_bytes", "volatile"])
        if not parsed.path:
            raise UsageError(f"the store {uri!r} names no folder\n  write file:FOLDER")
        limit, volatile = parsed.size("max_bytes"), parsed.options.get("volatile", "no") != "no"
        return cls(Path(parsed.path).expanduser(), max_bytes=limit, volatile=volatile)

    def write_manifest(self, data: Mapping[str, Any]) -> None:
        """Replace the manifest: JSON data for whoever trains from this folder."""
        self._require_open()
        with writing(self.uri, self.folder):
            write_sealed(self.folder / "manifest.json", data)

    def read_manifest(self) -> dict[str, Any] | None:
        """Return what `write_manifest` wrote last, or None."""
        self._require_open()
        file = self.folder / "manifest.json"
        try:
            return read_sealed(file)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StoreError(
                f"{file} is not what this store wrote: {error}\n"
                "  copy the store again, or capture again into an empty folder"
            ) from error

    def close(self) -> None:
        """Refuse further calls; tensors of open handles stay valid."""
        super().close()
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None
            _remove_unused(self.folder / MARK)

    # ------------------------------------------------------------ the folder

    def _find(self, ids: Sequence[str]) -> dict[str, SampleRef]:
        """List the folder unless all is known, and a look at fewer files shows that none was freed."""
        known = [self._held[feature_id] for feature_id in ids if feature_id in self._held]
        if not len(ids) == len(known) <= len(self._shards) or any(map(self._is_gone, known)):
            self._scan()
        return {
            feature_id: self._held[feature_id] for feature_id in ids if feature_id in self._held
        }

    def _current(self, refs: Sequence[SampleRef]) -> Mapping[str, SampleRef]:
        """Look first at the files that refs tell of, which a mount may list late."""
        for name in {_name(ref.generation) for ref in refs} - self._shards.keys():
            self._admit(name)
        return super()._current(refs)

    def _is_gone(self, ref: SampleRef) -> bool:
        """Look whether another process has removed a shard, or freed this sample of it."""
        name = _name(ref.generation)
        mark = _mark(name, self._shards[name].index(ref))
        return (self.folder / mark).exists() or not (self.folder / name).exists()

    def _scan(self) -> None:
        """Take over what the names in the folder say."""
        names = set[str]()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names.update(filter(NAME.fullmatch, os.listdir(self.folder)))
        for name in self._shards.keys() - names:
            self._unhold(self._shards.pop(name))
        self._marks &= names
        new = sorted(names - self._shards.keys() - self._marks)  # a shard before its marks
        if not all([self._admit(name) for name in new]):
            self._scan()  # what superseded the one that is gone may not have been listed

    def _admit(self, name: str) -> bool:
        """Take over a shard, or a mark that one of its samples was freed; False if it is gone."""
        shard, _, row = name.partition(".freed-")
        if row:
            if shard in self._shards:
                self._unhold([self._shards[shard][int(row)]])
                self._marks.add(name)
            return True
        try:
            with self._opened(name) as (_, refs):
                self._shards[name] = refs
        except StoreError:
            if os.path.lexists(self.folder / name):
                raise
            return False
        for ref in refs:
            if ref.generation >= self._held.setdefault(ref.feature_id, ref).generation:
                self._held[ref.feature_id] = ref
        return True

    def _unhold(self, refs: Sequence[SampleRef]) -> None:
        for ref in refs:
            if self._held.get(ref.feature_id) == ref:
                del self._held[ref.feature_id]

    def _drop(self, refs: Sequence[SampleRef]) -> None:
        """Remove shards of which nothing is held any more; mark samples that others outlast."""
        if not refs:
            return
        self._scan()
        self._unhold(refs)
        marks = set[str]()
        with writing(self.uri, self.folder):
            for name, samples in self._shards.items():
                # What was superseded as well: it must not come back when its successor goes.
                gone = [
                    at for at, ref in enumerate(samples) if self._held.get(ref.feature_id) != ref
                ]
                if len(gone) == len(samples):
                    (self.folder / name).unlink(missing_ok=True)
                else:
                    marks.update(_mark(name, row) for row in gone)
            for mark in marks - self._marks:
                (self.folder / mark).touch()
            for path in self.folder.glob("*.freed-*"):
                if not path.with_suffix("").exists():
                    path.unlink(missing_ok=True)
            self._sync(self.folder)
        self._scan()

    def _usage(self) -> tuple[int, int, int]:
        """Count the bytes of all files: one stays as long as one of its samples."""
        self._scan()
        nbytes = sum(ref.nbytes for samples in self._shards.values() for ref in samples)
        pending = [
            ref for ref in self._pending_free.values() if _name(ref.generation) in self._shards
        ]
        nbytes -= sum(ref.nbytes for ref in pending)  # which are counted as read
        place = next(f for f in (self.folder, *self.folder.parents) if f.exists())
        return len(self._held), nbytes, shutil.disk_usage(place).free

    # ------------------------------------------------------------ tensors

    def _write(self, refs: Sequence[SampleRef], tensors: Sequence[Tensors]) -> None:
        parts, generation = _safetensors(refs, tensors), refs[0].generation
        path = self.folder / _name(generation)
        partial = path.with_suffix(".tmp")
        with writing(self.uri, self.folder, refs):
            for abandoned in self.folder.glob("shard-*.tmp"):
                _remove_unused(abandoned)
            locked = _lock(partial, fcntl.LOCK_EX, 0o600 if self.volatile else 0o666)
            try:
                with open(locked, "wb") as file:
                    file.writelines(parts)
                    file.flush()
                    self._sync(partial)
                    partial.rename(path)
                self._sync(self.folder)
            except BaseException:
                partial.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise

    def _read(self, refs: Sequence[SampleRef], names: Sequence[Sequence[str]]) -> Sequence[Tensors]:
        tensors: list[dict[str, Tensor]] = [{} for _ in refs]
        for shard in {_name(ref.generation) for ref in refs}:
            with self._opened(shard) as (file, _):
                for sample, ref, wanted in zip(tensors, refs, names, strict=True):
                    for name in wanted if _name(ref.generation) == shard else ():
                        sample[name] = file.get_tensor(_inner_name(ref, name))
        return tensors

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Any, list[SampleRef]]]:
        """Open a shard; yield it and its samples. Raises StoreError where it is not what was put."""
        path, common = self.folder / name, {"generation": name[6:38], "uri": self.uri}
        try:
            with safe_open(regular(path), framework="pt") as file:
                metadata = file.metadata() or {}
                text = metadata.get("samples", "")
                if xxhash.xxh3_64_hexdigest(text.encode()) != metadata.get("xxh3"):
                    raise ValueError("its description is torn or altered")
                yield file, [SampleRef.from_json(data | common) for data in json.loads(text)]
        except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} cannot be read: {error}\n"
                "  remove it and run again; its samples are then captured again"
            ) from error


def _name(generation: str) -> str:
    return f"shard-{generation}.safetensors"


def _mark(name: str, row: int) -> str:
    return f"{name}.freed-{row}"


def _safetensors(refs: Sequence[SampleRef], tensors: Sequence[Tensors]) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file, the header first."""
    entries = []
    for ref, sample in zip(refs, tensors, strict=True):
        for spec, tensor in zip(ref.tensors, sample.values(), strict=True):
            if spec.dtype not in DTYPES:
                raise StoreError(
                    f"tensor {spec.name!r} has dtype {tensor.dtype}, which a file store cannot hold\n"
                    f"  it holds: {', '.join(DTYPES)}"
                )
            name = _inner_name(ref, spec.name)
            entries.append((tensor.element_size(), name, spec, bytes_of(tensor)))
    entries.sort(key=lambda entry: -entry[0])  # so that each one lies aligned
    text, start = json.dumps([ref.to_json() for ref in refs]), 0
    metadata = {"format": "pt", "xxh3": xxhash.xxh3_64_hexdigest(text.encode()), "samples": text}
    header: dict[str, Any] = {"__metadata__": metadata}
    for _, name, spec, data in entries:
        place = {"data_offsets": [start, start + len(data)]}
        header[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), **place}
        start += len(data)
    text = json.dumps(header)
    text += " " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text.encode(), *(data for *_, data in entries)]


def _inner_name(ref: SampleRef, name: str) -> str:
    """Name a tensor inside its file. A feature id would not do: it may be any text, of any length."""
    return f"{xxhash.xxh3_128_hexdigest(ref.feature_id.encode(errors='surrogatepass'))}/{name}"


# ---------------------------------------------------------------- what killed processes leave


def _lock(path: Path, kind: int, mode: int) -> int:
    """Open a file and lock it, which says that it is in use: nothing of a killed process is."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the folder was just removed as unused
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
            fcntl.flock(fd, kind)
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)  # and so was the file


def _remove_unused(path: Path) -> None:
    """Remove a file that nobody has locked, and the whole folder with its mark."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.name == MARK:
            shutil.rmtree(path.parent)
        path.unlink(missing_ok=True)


def _join(folder: Path) -> int:
    """Say that a volatile folder is in use, and remove those beside it that are not."""
    for mark in folder.parent.glob(f"*/{MARK}"):
        _remove_unused(mark)
    return _lock(folder / MARK, fcntl.LOCK_SH, 0o600)
