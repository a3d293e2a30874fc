"""What every store does alike: describe what is put, know what is held, and who reads it.

The contract is in `contracts.store`. A new store is a `BaseStore` that says how bytes are written,
read and given back.
"""

import contextlib
import errno
import shutil
import threading
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64
from xxhash import xxh3_64_hexdigest as digest_of

from draftcore.contracts.store import (
    FeatureStore,
    Handle,
    SampleRef,
    StoreError,
    StoreFull,
    StoreItem,
    StoreStats,
    TensorSpec,
)
from draftcore.errors import nearest
from draftcore.uris import format_size

Key = tuple[str, str]
Tensors = Mapping[str, Tensor]
PIECE = 512 << 10  # bytes; 128 KiB to 1 MiB do as well where the L2 cache has 1 MiB


class BaseStore(FeatureStore):
    """What every store does alike. A new store says how its medium does five things:

    `_write` keeps the bytes of a put, `_find` says what is held, `_read` returns tensors, `_drop` ends
    that samples are held, and `_usage` counts. They are called with `_mutex` held, but for those that
    move bytes: `_write` and `_read`, which hold it themselves around what threads must not do side by
    side.

    What is kept here, so that a store need not: a generation per put (`new_generation`), a digest per
    tensor, which is checked when it is read, who reads what, the limit, and the bytes that were dropped
    and are still read. A store keeps the index: its `_write` lets `_find` see the samples of a put once
    all their bytes are there, never before, and then all at once, also if the process is killed at any
    line. A durable store adds `read_manifest` and `write_manifest`; one that has something to close
    extends `close`, which may be called twice.
    """

    def __init__(self, uri: str, max_bytes: int | None = None) -> None:
        self.uri, self.max_bytes = uri, max_bytes
        self._readers: Counter[Key] = Counter()
        self._pending_free: dict[Key, SampleRef] = {}  # dropped, and still read here
        self._closed = False
        self._mutex = threading.RLock()
        self._puts = threading.Lock()  # one put at a time

    # ------------------------------------------------------------ what a store writes

    @abstractmethod
    def _write(self, refs: Sequence[SampleRef], tensors: Sequence[Tensors]) -> None:
        """Keep the samples of one put, all or none. Raises StoreFull where the medium is full.

        Their tensors lie contiguous in the CPU's memory, and may share it. From here on the samples
        are found under their ids, instead of what was. That may still be there: `_drop` is next.
        """

    @abstractmethod
    def _find(self, ids: Sequence[str]) -> Mapping[str, SampleRef]:
        """Return the current ref of each id that is held, as it was put, and leave out other ids."""

    @abstractmethod
    def _read(self, refs: Sequence[SampleRef], names: Sequence[Sequence[str]]) -> Iterable[Tensors]:
        """Return or yield these tensors of each sample. Raises StoreError for what is gone.

        They must not change with what is put or dropped later: copies, or views of what stays.
        """

    @abstractmethod
    def _drop(self, refs: Sequence[SampleRef]) -> None:
        """Hold these generations no more, and no other; their handles here may still be open."""

    @abstractmethod
    def _usage(self) -> tuple[int, int, int | None]:
        """Return samples held, bytes taken up, and bytes free on the medium where that is known.

        Bytes that were dropped and are still read here (`_pending_free`) are left out, and added later.
        """

    # ------------------------------------------------------------ the contract

    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        with self._puts:
            with self._mutex:
                self._require_open()
                older = list(self._find([item.feature_id for item in items]).values())
                refs = describe_items(items, new_generation(older), self.uri)
                if self.max_bytes is not None:
                    require_room(self.uri, refs, self.stats().nbytes, self.max_bytes)
            if refs:
                tensors = [plain(item.tensors) for item in items]
                refs = tuple(sealed(ref, own) for ref, own in zip(refs, tensors, strict=True))
                self._write(refs, tensors)
            with self._mutex:
                self._release(older)
        return refs

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[Handle, ...]:
        wanted = [select_names(ref, names) for ref in refs]
        with contextlib.ExitStack() as opened:
            with self._mutex:
                self._require_open()
                held = self._require_held(refs)
                self._readers.update(ref.key for ref in held)
                handles = [
                    opened.enter_context(Handle(ref, {}, self._handle_closed)) for ref in held
                ]
            for handle, tensors in zip(handles, self._read(held, wanted), strict=True):
                require_sealed(handle.ref, tensors)
                handle.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
            opened.pop_all()
        return tuple(handles)

    def lookup(self, feature_ids: Sequence[str]) -> dict[str, SampleRef]:
        with self._mutex:
            self._require_open()
            return dict(self._find(feature_ids))

    def free(self, refs: Iterable[SampleRef]) -> None:
        with self._mutex:
            self._require_open()
            unique = {ref.key: ref for ref in refs}
            current = self._current(list(unique.values()))
            self._release([ref for ref in current.values() if ref.key in unique])

    def stats(self) -> StoreStats:
        with self._mutex:
            self._require_open()
            samples, nbytes, free = self._usage()
            nbytes += sum(ref.nbytes for ref in self._pending_free.values())
            return StoreStats(samples, nbytes, self.max_bytes, self._readers.total(), free)

    def close(self) -> None:
        """Refuse further calls; tensors of open handles stay valid. Closing twice is harmless."""
        self._closed = True

    # ------------------------------------------------------------ who reads

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.uri} is closed\n  open it again")

    def _current(self, refs: Sequence[SampleRef]) -> Mapping[str, SampleRef]:
        """Return what is held now under the ids of refs."""
        return self._find([ref.feature_id for ref in refs])

    def _require_held(self, refs: Sequence[SampleRef]) -> list[SampleRef]:
        """Return refs as they are held here. Raises StoreError for one that is not."""
        held = self._current(refs)
        for ref in refs:
            if ref.feature_id not in held or held[ref.feature_id].key != ref.key:
                raise stale_ref_error(ref, superseded=ref.feature_id in held)
        return [held[ref.feature_id] for ref in refs]

    def _handle_closed(self, ref: SampleRef) -> None:
        with self._mutex:
            self._readers[ref.key] -= 1
            if not self._readers[ref.key]:
                del self._readers[ref.key]
                self._pending_free.pop(ref.key, None)

    def _release(self, refs: Sequence[SampleRef]) -> None:
        """Drop samples; their bytes count until their last handle here closes."""
        self._drop(refs)
        self._pending_free |= {ref.key: ref for ref in refs if self._readers[ref.key]}


# ---------------------------------------------------------------- pieces


def new_generation(older: Sequence[SampleRef] = ()) -> str:
    """Return a name that no other put has, in any process, and that sorts behind `older` ones."""
    after = max((int(ref.generation[:16], 16) for ref in older), default=0)
    return f"{max(time.time_ns(), after + 1):016x}{uuid.uuid4().hex[:16]}"


def describe_items(items: Sequence[StoreItem], generation: str, uri: str) -> tuple[SampleRef, ...]:
    """Return the refs of samples that are put together."""
    refs: dict[str, SampleRef] = {}
    for item in items:
        feature_id, tensors = item.feature_id, item.tensors.items()
        if feature_id in refs:
            raise StoreError(
                f"sample {feature_id!r} occurs twice in one put\n  put it once per call"
            )
        specs = tuple(describe(name, tensor) for name, tensor in tensors)
        nbytes = sum(tensor.nbytes for _, tensor in tensors)
        refs[feature_id] = SampleRef(
            feature_id, generation, uri, specs, item.tokens, nbytes, item.provenance
        )
    return tuple(refs.values())


def describe(name: str, tensor: Tensor, digest: str = "") -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), digest)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's bytes."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def copy_digested(room: memoryview, data: memoryview, digest: xxh3_64) -> None:
    """Copy bytes, and let a digest take in each piece while it is in the cache.

    A digest of bytes in memory takes 0.4 of the time of a copy, of those in the core's cache 0.15. Other
    threads run meanwhile: numpy's copy lets go of the interpreter's lock, a memoryview's not.
    """
    to, source = np.asarray(room), np.asarray(data)
    for start in range(0, len(room), PIECE):
        piece = slice(start, start + PIECE)
        np.copyto(to[piece], source[piece])
        digest.update(room[piece])


def plain(tensors: Tensors) -> Tensors:
    """Return tensors that lie contiguous in the CPU's memory, without gradients."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def sealed(ref: SampleRef, tensors: Tensors) -> SampleRef:
    """Return a ref that says of these tensors what they are, their digests too."""
    specs = {n: describe(n, tensor, digest_of(bytes_of(tensor))) for n, tensor in tensors.items()}
    return replace(ref, tensors=tuple(specs.get(spec.name, spec) for spec in ref.tensors))


def require_sealed(ref: SampleRef, tensors: Tensors) -> None:
    """Raise StoreError unless tensors are what was put."""
    for put, read in zip(ref.tensors, sealed(ref, tensors).tensors, strict=True):
        if put != read:
            said = [
                f"{spec.dtype} {list(spec.shape)} of digest {spec.digest}" for spec in (put, read)
            ]
            raise StoreError(
                f"tensor {put.name!r} of sample {ref.feature_id!r} is torn or altered in the store "
                f"{ref.uri}, generation {ref.generation}: {' was put, and '.join(said)} is read\n"
                "  remove that and run again; it is then captured again"
            )


def select_names(ref: SampleRef, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the tensors to read, all by default. Raises StoreError for one the sample lacks."""
    held = tuple(spec.name for spec in ref.tensors)
    for name in names or ():
        if name not in held:
            raise StoreError(
                f"sample {ref.feature_id!r} has no tensor {name!r}{nearest(name, held)}\n"
                f"  it has: {', '.join(held) or 'none'}"
            )
    return held if names is None else tuple(names)


def stale_ref_error(ref: SampleRef, *, superseded: bool) -> StoreError:
    """Return the error for a ref that is stale."""
    what = "was put again since" if superseded else "is not held: freed or lost"
    return StoreError(
        f"sample {ref.feature_id!r} of generation {ref.generation} {what}\n"
        "  look it up again, or capture it again"
    )


def require_room(uri: str, refs: Sequence[SampleRef], held_bytes: int, max_bytes: int) -> None:
    """Raise StoreFull unless a store that holds `held_bytes` may take these samples as well."""
    needed, free = sum(ref.nbytes for ref in refs), max_bytes - held_bytes
    if needed > free:
        limit = f"max_bytes={format_size(max_bytes)}"
        remedy = "free samples, or raise max_bytes in the store's URI"
        raise StoreFull(
            uri, needed=needed, samples=len(refs), free=free, limit=limit, remedy=remedy
        )


@contextlib.contextmanager
def writing(
    uri: str,
    folder: Path,
    refs: Sequence[SampleRef] = (),
    errors: type[Exception] = OSError,
    full: Callable[[Any], bool] = lambda error: error.errno in (errno.ENOSPC, errno.EDQUOT),
) -> Iterator[None]:
    """Turn a medium's `errors` into a StoreError, and those of a `full` one into StoreFull."""
    try:
        yield
    except errors as error:
        if not full(error):
            raise StoreError(
                f"cannot write to the store {folder}: {error}\n"
                "  check that the folder exists and may be written to"
            ) from error
        raise StoreFull(
            uri,
            needed=sum(ref.nbytes for ref in refs),
            samples=len(refs),
            free=shutil.disk_usage(folder).free,
            limit=f"the disk or its quota ({error})",
            remedy="free samples or disk space, then go on; what is stored stays readable",
        ) from error
