"""What a feature store keeps, promises and raises.

A store keeps samples' features under (feature id, generation). The generation is drawn anew for
each put, so a re-put supersedes, and a ref to the old bytes raises instead of reading the new ones.
A `SampleRef` is metadata and never holds a tensor; tensors travel in `StoreItem` and `Handle` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from draftcore.errors import DraftcoreError
from draftcore.uris import format_size

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape and torch dtype (without `torch.`) of one stored tensor.

    `digest` is of its bytes, by xxh3; '' where a store has other means to notice altered ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str = ""


@dataclass(frozen=True)
class SampleRef:
    """Where one sample's features lie. `generation` is unique per put, even across restarts."""

    feature_id: str
    generation: str
    uri: str
    tensors: tuple[TensorSpec, ...]
    tokens: int
    nbytes: int
    provenance: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What a store keeps the sample under: its id and generation."""
        return self.feature_id, self.generation

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tensors": [{**vars(spec)} for spec in self.tensors]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SampleRef:
        specs = tuple(TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in data["tensors"])
        return cls(**{**data, "tensors": specs})


@dataclass(eq=False)
class Handle:
    """An open read. The tensors stay valid until `close`; it is a context manager.

    That holds whatever is put, freed or closed meanwhile, the store itself included. The tensors may
    be views of what others read: they are not to be written to.
    """

    ref: SampleRef
    tensors: Mapping[str, Tensor]
    on_close: Callable[[SampleRef], None] | None  # the store's

    def close(self) -> None:
        """Let the tensors go; a sample that was freed meanwhile gives back its bytes. Idempotent."""
        if (on_close := self.on_close) is not None:
            self.on_close, self.tensors = None, {}
            on_close(self.ref)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class StoreItem:
    """One sample to put: its id, its tensors (any of them may be non-contiguous), its origin."""

    feature_id: str
    tensors: Mapping[str, Tensor]
    tokens: int
    provenance: str = ""


@dataclass(frozen=True)
class StoreStats:
    """What a store holds now, in samples and bytes.

    `nbytes` are those of tensors that take up room: of samples that are held, and of those that were
    freed or superseded and are still read. They are what `limit_bytes` limits.
    """

    samples: int
    nbytes: int
    limit_bytes: int | None  # None where nothing limits it
    open_handles: int  # of this store object; a handle that was closed counts no more
    free_bytes: int | None = None  # on the medium below, where that is known


class FeatureStore(Protocol):
    """Keeps samples' features. One conformance suite holds every store to this.

    `uri` is what another process opens to reach the same samples, where several can; every ref
    carries it. A store may be called by several threads. After `close` its methods raise `StoreError`.
    Who writes a store from the ground up derives from this class; others from `BaseStore`.
    """

    uri: str

    def put(self, item: StoreItem) -> SampleRef:
        """Store one sample, as `put_many` does."""
        return self.put_many([item])[0]

    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        """Store samples, all or none, and return their refs in this order; a re-put supersedes.

        All or none holds for errors, for full media and for a process that is killed: then an id has
        its old sample or its new one. Later edits of the tensors that were given change nothing.
        Raises `StoreFull` where it would exceed the limit, or `StoreAway` where it may work later.
        """

    def get(
        self, ref: SampleRef, device: str = "cpu", names: Sequence[str] | None = None
    ) -> Handle:
        """Open a sample for reading. A stale, freed, short or torn one raises `StoreError`."""
        return self.get_many([ref], device, names)[0]

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[Handle, ...]:
        """Open samples for reading, all or none: a handle each, of the tensors `names` on `device`."""

    def lookup(self, feature_ids: Sequence[str]) -> dict[str, SampleRef]:
        """Return the current ref of each id that is held, as its put did; others are left out."""

    def free(self, refs: Iterable[SampleRef]) -> None:
        """Drop samples: idempotent, deferred while handles are open, never a newer generation."""

    def abort(self, feature_id: str) -> None:
        """Drop whatever is held of an id, for one who has no ref: a producer that begins again.

        `free` drops a generation and is what a trainer calls. An id that is not held is no error.
        """
        self.free(self.lookup([feature_id]).values())

    def stats(self) -> StoreStats:
        """Say what is held and read now."""

    def close(self) -> None:
        """Let go of the medium; closing twice is harmless.

        Open handles stay valid. What a durable store holds stays; of another one nobody may count
        on it once its last process has closed it.
        """


class DurableStore(FeatureStore, Protocol):
    """A store of capability `durable`: it outlives its processes, and notices altered bytes.

    A run keeps features in it that others only pass on and free. Its manifest says what the samples
    are (of which data, target and cut, and whether they are complete), so that a later run, or a
    training host, knows without them whether it may train from this store.
    """

    def read_manifest(self) -> dict[str, Any] | None:
        """Return what was written last, by any process; None if nothing was."""

    def write_manifest(self, data: Mapping[str, Any]) -> None:
        """Replace the manifest as a whole by this JSON data; who is killed leaves the old one."""


class StoreError(DraftcoreError):
    """A sample cannot be read as its ref says: stale, freed, torn or altered."""


class StoreAway(StoreError):  # noqa: N818  a state that producers wait out
    """The store does not answer now, and may again: whether it holds a sample is not known."""


class StoreFull(DraftcoreError):  # noqa: N818  a state that producers wait out
    """A put would exceed the store's bytes. Nothing was stored; free samples and put again.

    `needed` and `free` are in bytes; `limit` names what `free` is left of.
    """

    def __init__(
        self, uri: str, *, needed: int, samples: int, free: int, limit: str, remedy: str
    ) -> None:
        self.needed, self.free = needed, max(free, 0)
        asked = f"needed: {format_size(needed)} for {samples} samples"
        left = f"free: {format_size(self.free)} of {limit}"
        super().__init__(f"the store {uri} is full\n  {asked}\n  {left}\n  {remedy}")
