"""Store `mooncake`: samples in memory that processes lend to the clients of a Mooncake master.

Whoever has a sample's ref reads the sample; `lookup` reads the record of a feature id, which names
its current generation. So every process knows which generation is current and which bytes are
whole. None can know whether another one is just reading, and Mooncake gives the memory of a removed
object to the next one at once. Therefore a put that supersedes removes nothing; only `free` does,
which one party calls, and it removes what a sample superseded as well. It waits for the handles of
its own process. A read elsewhere that is overtaken does not have its digests and raises.

A sample costs two calls to put: object and record in one batch; then the record is read back, as
Mooncake answers 0 to a put of a key that exists, and writes nothing. A get is one call, and another
one where only some of the tensors are asked for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from draftcore_file.base import Key, describe_items, new_generation, require_room, select_names
from torch import Tensor

from draftcore.contracts.store import (
    FeatureStore,
    Handle,
    SampleRef,
    StoreAway,
    StoreError,
    StoreFull,
    StoreItem,
    StoreStats,
)
from draftcore_mooncake.buffers import BufferPool
from draftcore_mooncake.engine import (
    FULL,
    NOT_FOUND,
    TRANSFER,
    Engine,
    explain,
    load,
    package_folder,
)
from draftcore_mooncake.master import Master
from draftcore_mooncake.objects import Record
from draftcore_mooncake.settings import Settings
from draftcore_mooncake.transfer import PAUSE_SECONDS, TRIES, Transfer, TransferError


class MooncakeStore(FeatureStore):
    """The samples of one name on one master. Thread-safe; not to be used in a forked process."""

    def __init__(self, settings: Settings, engine: Engine, master: Master | None = None) -> None:
        self.uri = replace(settings, segment=engine.segment).joining()
        self.max_bytes = settings.max_bytes
        self.buffers = BufferPool(engine.allocate, engine.release, keep_bytes=settings.buffers)
        self.engine, self.master = engine, master
        self._transfer = Transfer(engine, self.buffers, settings.name)
        self._held: dict[Key, Record] = {}  # of samples that this process put, read or looked up
        self._readers: Counter[Key] = Counter()
        self._leaving: dict[Key, SampleRef] = {}  # freed, and still read here
        self._to_remove: dict[Key, SampleRef] = {}  # with the next batch
        self._reserved_bytes = 0  # of puts in progress
        self._mutex = threading.RLock()
        self._closed = False

    @classmethod
    def open(cls, uri: str) -> MooncakeStore:
        """Open `mooncake://HOST:PORT/NAME?max_bytes=64GiB`; see `settings` and the README.

        Raises UsageError or StoreError within seconds where library or master are not there.
        """
        settings = Settings.parse(uri)
        if settings.address:
            return cls(settings, Engine.share(settings))
        load()
        master = Master(package_folder())
        try:
            settings = replace(settings, address=master.address)
            return cls(settings, Engine.share(settings), master)
        except BaseException:
            master.stop()
            raise

    # ------------------------------------------------------------ writing

    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        """Store samples, all or none.

        Raises StoreFull when `max_bytes` or the lent memory is used up, and StoreAway when for
        longer than `patience` the master, or the process that lends the memory, did not answer.
        """
        refs = self._describe(items)
        self._require_open()
        self._remove()
        self._reserve(refs)
        try:
            held = self._store(items, refs)
            with self._mutex:
                self._held |= {one.ref.key: one for one in held}
        finally:
            with self._mutex:
                self._reserved_bytes -= _total(refs)
        return tuple(one.ref for one in held)

    def free(self, refs: Iterable[SampleRef]) -> None:
        """Remove samples, and what they superseded; those that are read here, after the reads."""
        unique = {ref.key: ref for ref in refs}
        self._require_open()
        unknown = [ref for key, ref in unique.items() if key not in self._held]
        records = self._transfer.records([ref.feature_id for ref in unknown])
        with self._mutex:
            for key, ref in unique.items():
                known = self._held.get(key) or records.get(ref.feature_id)
                older = known.older if known and known.ref.generation == ref.generation else ()
                self._let_go([replace(ref, generation=one) for one in (*older, ref.generation)])
        self._remove()

    # ------------------------------------------------------------ reading

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[Handle, ...]:
        """Read samples, or of each one only the tensors `names`.

        The tensors lie in buffers of this store, which are used again once a handle is closed.
        """
        wanted = [select_names(ref, names) for ref in refs]
        self._require_open()
        with self._mutex:
            for ref in refs:
                if self._is_freed(ref):
                    raise StoreError(
                        f"sample {ref.feature_id!r} of generation {ref.generation} was freed\n"
                        "  look it up again, or capture it again"
                    )
            self._readers.update(ref.key for ref in refs)
        try:
            found = self._transfer.read(refs, wanted)
        except BaseException:
            for ref in refs:
                self._unpin(ref)
            raise
        pairs = list(zip(refs, found, strict=True))
        self._remember(
            replace(record, ref=ref) for ref, (*_, record) in pairs if record is not None
        )
        return tuple(
            self._hand_out(ref, buffer, {name: held[name] for name in names}, device)
            for (ref, (buffer, held, _)), names in zip(pairs, wanted, strict=True)
        )

    def lookup(self, feature_ids: Sequence[str]) -> dict[str, SampleRef]:
        self._require_open()
        records = self._transfer.records(list(dict.fromkeys(feature_ids)))
        with self._mutex:
            current = [one for one in records.values() if not self._is_freed(one.ref)]
        there = self.engine.exist([self._transfer.key(record.ref) for record in current])
        found = [record for record, exists in zip(current, there, strict=True) if exists]
        self._remember(found)
        return {record.ref.feature_id: record.ref for record in found}

    def stats(self) -> StoreStats:
        """Count what this process put, read or looked up and what is still there of it.

        The bytes include superseded generations, which take up memory until a free.
        """
        self._require_open()
        self._forget_what_is_gone()
        with self._mutex:
            samples = len({feature_id for feature_id, _ in self._held})
            return StoreStats(samples, self._held_bytes(), self.max_bytes, self._readers.total())

    def close(self) -> None:
        """Disconnect, and take back the memory that was lent with all that it holds.

        Tensors of open handles stay valid. Closing twice is harmless.
        """
        if self.engine.foreign:  # a forked child: nothing here is its own
            self._closed = True
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._to_remove |= self._leaving  # their bytes were copied out when they were read
        if self._to_remove and self.engine.master_answers():
            with contextlib.suppress(StoreError):  # the master was lost since, with all it held
                self._remove()
        self.buffers.clear()
        self.engine.close()
        if self.master is not None:
            self.master.stop()

    # ------------------------------------------------------------ the steps of a put

    def _reserve(self, refs: Sequence[SampleRef]) -> None:
        """Raise StoreFull unless there is room, also after a look at what others have freed."""
        try:
            self._require_room(refs)
        except StoreFull:
            self._forget_what_is_gone()
            self._require_room(refs)

    def _require_room(self, refs: Sequence[SampleRef]) -> None:
        with self._mutex:
            if self.max_bytes is not None:
                held_bytes = self._held_bytes() + self._reserved_bytes
                require_room(self.uri, refs, held_bytes, self.max_bytes)
            self._reserved_bytes += _total(refs)

    def _store(self, items: Sequence[StoreItem], refs: Sequence[SampleRef]) -> list[Record]:
        """Write samples; after a failed attempt anew, under keys that nothing was written to."""
        attempts = chain([refs], iter(lambda: self._describe(items), None))
        return self.engine.patiently(lambda: self._try_to_write(items, next(attempts)))

    def _try_to_write(self, items: Sequence[StoreItem], refs: Sequence[SampleRef]) -> list[Record]:
        for left in reversed(range(TRIES)):
            try:
                return self._transfer.write(items, refs)
            except TransferError as error:
                self._remove_later(refs)
                self._remove()
                if error.code in (FULL, TRANSFER) and not self.engine.has_lender():
                    raise StoreAway(
                        f"the memory of the store {self.uri} is not there: {explain(error.code)}\n"
                        "  the process that opened it with max_bytes lends it: start that, or wait "
                        "for it"
                    ) from None
                if error.code == FULL:
                    raise self._full(refs) from None
                if not left:
                    kind = StoreAway if error.code == TRANSFER else StoreError
                    raise kind(
                        f"{len(refs)} samples cannot be stored: {explain(error.code)}\n"
                        "  check the processes that lend memory to the store, then go on"
                    ) from None
            except BaseException:
                self._remove_later(refs)
                raise
            time.sleep(PAUSE_SECONDS)
            refs = self._describe(items)
        raise AssertionError

    def _describe(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        return describe_items(items, new_generation(), self.uri)

    def _full(self, refs: Sequence[SampleRef]) -> StoreFull:
        with self._mutex:
            free = 0 if self.max_bytes is None else self.max_bytes - self._held_bytes()
        return StoreFull(
            self.uri,
            needed=_total(refs),
            samples=len(refs),
            free=free,
            limit="the memory that is lent to the store",
            remedy="free samples, or lend more: max_bytes in the URI that the lending process opens",
        )

    # ------------------------------------------------------------ what is held, read and removed

    def _remember(self, found: Iterable[Record]) -> None:
        with self._mutex:
            for one in found:
                if not self._is_freed(one.ref):
                    self._held[one.ref.key] = one

    def _is_freed(self, ref: SampleRef) -> bool:
        return ref.key in self._leaving or ref.key in self._to_remove

    def _held_bytes(self) -> int:
        return _total([*(one.ref for one in self._held.values()), *self._leaving.values()])

    def _forget_what_is_gone(self) -> None:
        """Hold no longer what others have freed, or what was lost with its lender."""
        with self._mutex:
            refs = [one.ref for one in self._held.values()]
        there = self.engine.exist([self._transfer.key(ref) for ref in refs])
        with self._mutex:
            for ref, exists in zip(refs, there, strict=True):
                if not exists:
                    self._held.pop(ref.key, None)

    def _let_go(self, refs: Sequence[SampleRef]) -> None:
        """Hold generations no more; what is read here is removed after the reads."""
        for ref in refs:
            self._held.pop(ref.key, None)
            where = self._leaving if self._readers[ref.key] else self._to_remove
            where[ref.key] = ref

    def _unpin(self, ref: SampleRef) -> None:
        with self._mutex:
            self._readers[ref.key] -= 1
            if not self._readers[ref.key]:
                del self._readers[ref.key]
                if ref.key in self._leaving:
                    self._to_remove[ref.key] = self._leaving.pop(ref.key)

    def _remove_later(self, refs: Sequence[SampleRef]) -> None:
        with self._mutex:
            self._to_remove |= {ref.key: ref for ref in refs}

    def _remove(self) -> None:
        """Remove what is to be removed, in one batch; what cannot be yet stays for the next one."""
        with self._mutex:
            refs = list(self._to_remove.values())
        codes = self.engine.remove([self._transfer.key(ref) for ref in refs])
        with self._mutex:
            for ref, code in zip(refs, codes, strict=True):
                if code in (0, NOT_FOUND):
                    self._to_remove.pop(ref.key, None)

    def _hand_out(
        self, ref: SampleRef, buffer: Tensor, held: Mapping[str, Tensor], device: str
    ) -> Handle:
        tensors = {name: tensor.to(device) for name, tensor in held.items()}
        if torch.device(device).type != "cpu":
            self.buffers.give(buffer)
            return Handle(ref, tensors, self._unpin)

        def close(ref: SampleRef) -> None:
            self._unpin(ref)
            self.buffers.give(buffer)

        return Handle(ref, tensors, close)

    def _require_open(self) -> None:
        self.engine.require_process()  # before any lock, which a fork may have left held
        if self._closed:
            raise StoreError(f"the store {self.uri} is closed\n  open it again")


def _total(refs: Iterable[SampleRef]) -> int:
    return sum(ref.nbytes for ref in refs)
