"""The pieces that every store needs: refs, handles, and which bytes may be reclaimed.

The contract is in `contracts.store`. Freeing is logical at once and physical when the last open handle
closes; `Ledger` keeps count of that.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from draftcore.contracts.store import SampleRef, StoreError, StoreFull, StoreItem, TensorSpec
from draftcore.errors import nearest
from draftcore.uris import format_size

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[str, str]


def require_room(
    uri: str, refs: Sequence[SampleRef], *, held_bytes: int, max_bytes: int | None
) -> None:
    """Raise StoreFull unless a store that holds `held_bytes` may take these samples as well."""
    needed = sum(ref.nbytes for ref in refs)
    if max_bytes is not None and held_bytes + needed > max_bytes:
        raise StoreFull(
            uri,
            needed=needed,
            samples=len(refs),
            free=max_bytes - held_bytes,
            limit=f"max_bytes={format_size(max_bytes)}",
            remedy="free samples, or raise max_bytes in the store's URI",
        )


def new_generation() -> str:
    """Return a name that no other put has, in this process or any other."""
    return uuid.uuid4().hex


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
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in item.tensors.values())
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


class Ledger:
    """Which samples are held, which are being read, and when bytes may be reclaimed.

    `reclaim(ref)` is called once per sample: when it is dropped or superseded and no handle is
    open any more. Not thread-safe: a store holds its own lock around each call.
    """

    def __init__(self, reclaim: Callable[[SampleRef], None]) -> None:
        self.held: dict[str, SampleRef] = {}
        self._readers: Counter[Key] = Counter()
        self._leaving: dict[Key, SampleRef] = {}
        self._reclaim = reclaim

    @property
    def open_handles(self) -> int:
        return self._readers.total()

    def add(self, ref: SampleRef) -> None:
        """Hold a sample; what was held under its id is superseded."""
        superseded = self.held.get(ref.feature_id)
        if superseded is not None:
            self.drop(superseded)
        self.held[ref.feature_id] = ref

    def holds(self, ref: SampleRef) -> bool:
        held = self.held.get(ref.feature_id)
        return held is not None and held.generation == ref.generation

    def require(self, ref: SampleRef) -> None:
        """Raise StoreError unless the store holds just this generation of the sample."""
        if not self.holds(ref):
            raise not_held(ref, superseded=ref.feature_id in self.held)

    def drop(self, ref: SampleRef) -> None:
        """Let a sample go. Harmless when it is gone or has a newer generation."""
        if not self.holds(ref):
            return
        held = self.held.pop(ref.feature_id)
        if self._readers[held.key]:
            self._leaving[held.key] = held
        else:
            self._reclaim(held)

    def open(self, ref: SampleRef) -> None:
        self._readers[ref.key] += 1

    def close(self, ref: SampleRef) -> None:
        """End one read; the last one of a sample that was dropped reclaims it."""
        key = ref.key
        self._readers[key] -= 1
        if not self._readers[key]:
            del self._readers[key]
            if key in self._leaving:
                self._reclaim(self._leaving.pop(key))
