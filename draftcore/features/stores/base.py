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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftcore.contracts.store import (
    SampleRef,
    StoreError,
    StoreFull,
    StoreItem,
    StoreStats,
    TensorSpec,
)
from draftcore.errors import nearest
from draftcore.uris import format_size

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[str, str]


class OpenHandle:
    """An open read; see `contracts.store.Handle`. Closing twice is harmless."""

    def __init__(
        self, ref: SampleRef, tensors: Mapping[str, "Tensor"], on_close: Callable[[SampleRef], None]
    ) -> None:
        self.ref = ref
        self.tensors = tensors
        self._on_close: Callable[[SampleRef], None] | None = on_close

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            self.tensors = {}
            on_close(self.ref)

    def __enter__(self) -> "OpenHandle":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class BaseStore:
    """What every store does alike. A new store says how its medium does five things:

    `_write` keeps the bytes of a put, `_find` says what is held, `_read` returns tensors, `_drop` ends
    that samples are held, and `_usage` counts. One whose readers need the bytes of a dropped sample in
    place gives them back in `_reclaim`. Methods are called with `_mutex` held, but for those that move
    bytes: `_write` and `_read`, which hold it themselves around what threads must not do side by side.

    What is kept here, so that a store need not: a generation per put (`new_generation`), who reads
    what, the limit, and the bytes that were dropped and are still read. A store keeps the index: its
    `_write` lets `_find` see the samples of a put once all their bytes are there, never before, and
    then all at once, also if the process is killed at any line. A durable store adds `read_manifest`
    and `write_manifest`; one that has something to close extends `close`, which may be called twice.
    """

    def __init__(self, uri: str, max_bytes: int | None = None) -> None:
        self.uri, self.max_bytes = uri, max_bytes
        self._readers: Counter[Key] = Counter()
        self._leaving: dict[Key, SampleRef] = {}  # dropped, and still read here
        self._closed = False
        self._mutex = threading.RLock()
        self._puts = threading.Lock()  # one put at a time

    # ------------------------------------------------------------ what a store writes

    def _write(self, refs: Sequence[SampleRef], items: Sequence[StoreItem]) -> None:
        """Keep the tensors of one put, all or none. Raises StoreFull where the medium is full.

        From here on they are found under their ids, instead of what was. It may still be there:
        `_drop` is called for it next.
        """
        raise NotImplementedError

    def _find(self, ids: Sequence[str], refs: Sequence[SampleRef] = ()) -> Mapping[str, SampleRef]:
        """Return the current ref of each id that is held, as it was put, and leave out other ids.

        `refs` are what the caller knows of them, which may spare a look.
        """
        raise NotImplementedError

    def _read(
        self, refs: Sequence[SampleRef], names: Sequence[Sequence[str]], device: str
    ) -> Sequence[Mapping[str, "Tensor"]]:
        """Return these tensors of each sample, on a device. Raises StoreError for what is not whole.

        They must not change with what is put or dropped later: copies, or views of bytes that stay
        until `_reclaim`.
        """
        raise NotImplementedError

    def _drop(self, refs: Sequence[SampleRef]) -> None:
        """Hold these generations no more, and no other; their handles here may still be open."""
        raise NotImplementedError

    def _usage(self) -> tuple[int, int, int | None]:
        """Return samples held, bytes taken up, and bytes free on the medium where that is known.

        Bytes that were dropped and are still read here (`_leaving`) are left out, and added later.
        """
        raise NotImplementedError

    def _reclaim(self, ref: SampleRef) -> None:
        """Give back the bytes of a dropped sample that nobody reads here any more."""

    # ------------------------------------------------------------ the contract

    def put(self, item: StoreItem) -> SampleRef:
        return self.put_many([item])[0]

    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        with self._puts:
            with self._mutex:
                self._require_open()
                older = list(self._find([item.feature_id for item in items]).values())
                refs = describe_items(items, new_generation(older), self.uri)
                if self.max_bytes is not None:
                    held_bytes = self.stats().nbytes
                    require_room(self.uri, refs, held_bytes=held_bytes, max_bytes=self.max_bytes)
            if refs:
                self._write(refs, items)
            with self._mutex:
                self._let_go(older)
        return refs

    def get(
        self, ref: SampleRef, device: str = "cpu", names: Sequence[str] | None = None
    ) -> OpenHandle:
        return self.get_many([ref], device, names)[0]

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[OpenHandle, ...]:
        wanted = [select_names(ref, names) for ref in refs]
        pinned = self._pin(refs)
        try:
            found = self._read(pinned, wanted, device)
        except BaseException:
            for ref in pinned:
                self._unpin(ref)
            raise
        pairs = zip(pinned, found, strict=True)
        return tuple(OpenHandle(ref, tensors, self._unpin) for ref, tensors in pairs)

    def lookup(self, feature_ids: Sequence[str]) -> dict[str, SampleRef]:
        with self._mutex:
            self._require_open()
            return dict(self._find(feature_ids))

    def free(self, refs: Iterable[SampleRef]) -> None:
        with self._mutex:
            self._require_open()
            unique = {ref.key: ref for ref in refs}
            found = self._find([one for one, _ in unique], list(unique.values()))
            self._let_go([ref for ref in found.values() if ref.key in unique])

    def abort(self, feature_id: str) -> None:
        self.free(self.lookup([feature_id]).values())

    def stats(self) -> StoreStats:
        with self._mutex:
            samples, nbytes, free = self._usage()
            nbytes += sum(ref.nbytes for ref in self._leaving.values())
            return StoreStats(samples, nbytes, self.max_bytes, self._readers.total(), free)

    def close(self) -> None:
        """Refuse further calls; tensors of open handles stay valid. Closing twice is harmless."""
        self._closed = True

    # ------------------------------------------------------------ who reads

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.uri} is closed\n  open it again")

    def _pin(self, refs: Sequence[SampleRef]) -> list[SampleRef]:
        """Keep samples until each is unpinned. Raises StoreError for one that is not held."""
        with self._mutex:
            self._require_open()
            held = self._require_held(refs)
            self._readers.update(ref.key for ref in held)
            return held

    def _unpin(self, ref: SampleRef) -> None:
        with self._mutex:
            self._readers[ref.key] -= 1
            if not self._readers[ref.key]:
                del self._readers[ref.key]
                if ref.key in self._leaving:
                    self._reclaim(self._leaving.pop(ref.key))

    def _require_held(self, refs: Sequence[SampleRef]) -> list[SampleRef]:
        held = self._find([ref.feature_id for ref in refs], refs)
        for ref in refs:
            if ref.feature_id not in held or held[ref.feature_id].key != ref.key:
                raise not_held(ref, superseded=ref.feature_id in held)
        return [held[ref.feature_id] for ref in refs]

    def _let_go(self, refs: Sequence[SampleRef]) -> None:
        """Drop samples; their bytes go now, or when their last handle here closes."""
        self._drop(refs)
        for ref in refs:
            if self._readers[ref.key]:
                self._leaving[ref.key] = ref
            else:
                self._reclaim(ref)


# ---------------------------------------------------------------- pieces


def new_generation(older: Sequence[SampleRef] = ()) -> str:
    """Return a name that no other put has, in any process, and that sorts behind `older` ones."""
    after = max((int(ref.generation[:16], 16) for ref in older), default=0)
    return f"{max(time.time_ns(), after + 1):016x}{uuid.uuid4().hex[:16]}"


def describe_items(items: Sequence[StoreItem], generation: str, uri: str) -> tuple[SampleRef, ...]:
    """Return the refs of samples that are put together."""
    ids = Counter(item.feature_id for item in items)
    twice = [feature_id for feature_id, count in ids.items() if count > 1]
    if twice:
        raise StoreError(
            f"sample {twice[0]!r} occurs twice in one put\n  put every sample once per call"
        )
    refs = []
    for item in items:
        specs = tuple(
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in item.tensors.items()
        )
        nbytes = sum(tensor.nbytes for tensor in item.tensors.values())
        refs.append(
            SampleRef(item.feature_id, generation, uri, specs, item.tokens, nbytes, item.provenance)
        )
    return tuple(refs)


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


def not_held(ref: SampleRef, *, superseded: bool) -> StoreError:
    """Return the error for a ref that is stale."""
    what = "was put again since" if superseded else "is not held: freed or lost"
    return StoreError(
        f"sample {ref.feature_id!r} of generation {ref.generation} {what}\n"
        "  look it up again, or capture it again"
    )


def require_room(
    uri: str, refs: Sequence[SampleRef], *, held_bytes: int, max_bytes: int | None
) -> None:
    """Raise StoreFull unless a store that holds `held_bytes` may take these samples as well."""
    if max_bytes is not None and held_bytes + sum(ref.nbytes for ref in refs) > max_bytes:
        raise StoreFull(
            uri,
            needed=sum(ref.nbytes for ref in refs),
            samples=len(refs),
            free=max_bytes - held_bytes,
            limit=f"max_bytes={format_size(max_bytes)}",
            remedy="free samples, or raise max_bytes in the store's URI",
        )


@contextlib.contextmanager
def writing(uri: str, folder: Path, refs: Sequence[SampleRef] = ()) -> Iterator[None]:
    """Turn a full disk into StoreFull, and what else the disk says into a StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"cannot write to the store {folder}: {error}\n"
                "  check that the folder exists and may be written to"
            ) from error
        raise StoreFull(
            uri,
            needed=sum(ref.nbytes for ref in refs),
            samples=len(refs),
            free=shutil.disk_usage(folder).free,
            limit=f"the disk or its quota ({error.strerror})",
            remedy="free samples or disk space, then go on; what is stored stays readable",
        ) from error
