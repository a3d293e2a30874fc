"""Store `memory`: a dictionary of CPU tensors, for runs of one process.

A put copies, so that a producer may reuse its buffers; a get on the CPU does not, so a reader must
not write into the tensors.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from draftcore.contracts.store import SampleRef, StoreError, StoreItem, StoreStats
from draftcore.features.stores.base import (
    Key,
    Ledger,
    OpenHandle,
    describe_items,
    new_generation,
    require_room,
    select_names,
)
from draftcore.uris import parse_uri


class MemoryStore:
    """Features in this process's memory, at most `max_bytes` of them."""

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self.uri = "memory:"
        self.max_bytes = max_bytes
        self._tensors: dict[Key, Mapping[str, Tensor]] = {}
        self._nbytes = 0
        self._ledger = Ledger(self._reclaim)
        self._closed = False
        self._mutex = threading.Lock()

    @classmethod
    def open(cls, uri: str) -> "MemoryStore":
        """Open `memory:` or `memory:?max_bytes=8GiB`."""
        return cls(max_bytes=parse_uri(uri, known=["max_bytes"]).size("max_bytes"))

    def put(self, item: StoreItem) -> SampleRef:
        return self.put_many([item])[0]

    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        refs = describe_items(items, new_generation(), self.uri)
        with self._mutex:
            self._require_open()
            require_room(self.uri, refs, held_bytes=self._nbytes, max_bytes=self.max_bytes)
            copies = [{name: _cpu_copy(t) for name, t in item.tensors.items()} for item in items]
            for ref, tensors in zip(refs, copies, strict=True):
                self._tensors[ref.key] = tensors
                self._nbytes += ref.nbytes
                self._ledger.add(ref)
        return refs

    def get(
        self, ref: SampleRef, device: str = "cpu", names: Sequence[str] | None = None
    ) -> OpenHandle:
        return self.get_many([ref], device, names)[0]

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[OpenHandle, ...]:
        with self._mutex:
            self._require_open()
            for ref in refs:
                self._ledger.require(ref)
            found = [self._select(ref, device, names) for ref in refs]
            for ref in refs:
                self._ledger.open(ref)
        handles = zip(refs, found, strict=True)
        return tuple(OpenHandle(ref, tensors, self._close_handle) for ref, tensors in handles)

    def lookup(self, feature_ids: Sequence[str]) -> dict[str, SampleRef]:
        with self._mutex:
            self._require_open()
            held = self._ledger.held
            return {
                feature_id: held[feature_id] for feature_id in feature_ids if feature_id in held
            }

    def free(self, refs: Iterable[SampleRef]) -> None:
        with self._mutex:
            for ref in refs:
                self._ledger.drop(ref)

    def abort(self, feature_id: str) -> None:
        self.free(self.lookup([feature_id]).values())

    def stats(self) -> StoreStats:
        with self._mutex:
            handles = self._ledger.open_handles
            return StoreStats(len(self._ledger.held), self._nbytes, self.max_bytes, handles)

    def close(self) -> None:
        """Forget everything; tensors of open handles stay valid."""
        with self._mutex:
            self._closed = True
            for ref in list(self._ledger.held.values()):
                self._ledger.drop(ref)

    def _select(
        self, ref: SampleRef, device: str, names: Sequence[str] | None
    ) -> Mapping[str, Tensor]:
        held = self._tensors[ref.key]
        chosen = select_names(self._ledger.held[ref.feature_id], names)
        if device == "cpu":  # `to` would return the tensor itself, in 2 us
            return {name: held[name] for name in chosen}
        return {name: held[name].to(device) for name in chosen}

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.uri} is closed\n  open it again")

    def _close_handle(self, ref: SampleRef) -> None:
        with self._mutex:
            self._ledger.close(ref)

    def _reclaim(self, ref: SampleRef) -> None:
        del self._tensors[ref.key]
        self._nbytes -= ref.nbytes


def _cpu_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in CPU memory, in one move whatever the strides and the device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
