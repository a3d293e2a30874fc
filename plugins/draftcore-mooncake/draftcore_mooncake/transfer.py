"""Move samples between tensors and the store: pack, write, read, and check.

No tensor is serialised. Large contiguous CPU tensors go to the wire from where they lie; all others,
and everything for RDMA, through a pooled buffer. A read goes into a pooled
buffer, and its tensors are views of that. What lies in memory that this process lends is copied into
the buffer without the library, so that digests are taken while the bytes are in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from draftcore_file.base import bytes_of, copy_digested, sealed
from torch import Tensor
from xxhash import xxh3_64

from draftcore.contracts.store import SampleRef, StoreError, StoreItem, TensorSpec
from draftcore_mooncake.buffers import BufferPool
from draftcore_mooncake.engine import (
    INVALID,
    NOT_FOUND,
    NOT_READY,
    TRANSFER,
    Engine,
    Part,
    Piece,
    explain,
)
from draftcore_mooncake.objects import (
    RECORD_BYTES,
    Record,
    object_bytes,
    object_key,
    places,
    record_key,
    tensors_in,
)

TRIES = 3
PAUSE_SECONDS = 0.02
RECORDS_AT_ONCE = 64
BATCH_BYTES = 16 << 20
PIECE_BYTES = 256 << 10  # less is copied together: the wire takes 0.1 ms per piece of an object
NOTHING_WAS_READ = (NOT_FOUND, NOT_READY, INVALID)


class _Packed(NamedTuple):
    """A sample that is ready for the wire: with digests, and where its parts and its record lie."""

    buffer: Tensor
    ref: SampleRef
    pieces: list[Piece]
    record: Piece


@dataclass(eq=False)
class _Reading:
    """A sample that is being read: which of its tensors, to where, and what came of it."""

    ref: SampleRef
    specs: tuple[TensorSpec, ...]
    nbytes: int
    buffer: Tensor
    code: int = 0  # of its object
    intact: bool = False  # all bytes came, and have their digests
    record: Record | None = None

    @property
    def is_whole(self) -> bool:
        return self.specs == self.ref.tensors

    def parts(self) -> list[Part]:
        """Say where these tensors go in a buffer and where in the object they lie."""
        lies = {place.spec: place.start for place in places(self.ref.tensors)}
        found = [(to.start, lies[to.spec], to.nbytes) for to in places(self.specs)]
        return found or [(0, 0, 0)]  # which is refused where there is no object


class TransferError(Exception):
    """A put failed with this code; some of its keys may exist."""

    def __init__(self, code: int) -> None:
        super().__init__(explain(code))
        self.code = code


class Transfer:
    """Samples of one name, through one client and its buffers. Thread-safe, and without state."""

    def __init__(self, engine: Engine, pool: BufferPool, name: str) -> None:
        self._engine, self._pool, self._name = engine, pool, name

    def key(self, ref: SampleRef) -> str:
        return object_key(self._name, ref.feature_id, ref.generation)

    # ------------------------------------------------------------ writing

    def write(self, items: Sequence[StoreItem], refs: Sequence[SampleRef]) -> list[Record]:
        """Write samples and their records, and return these.

        While one batch is on the wire the next one is sealed. Raises TransferError, after which the
        caller removes what was written.
        """
        if not refs:
            return []
        packed: list[_Packed] = []
        *early, last = _batches(refs)
        try:
            with ThreadPoolExecutor(1) as wire:
                sent = [
                    wire.submit(self._engine.put, *self._objects(items[some], refs[some], packed))
                    for some in early
                ]
                keys, objects = self._objects(items[last], refs[last], packed)
                codes = [code for one in sent for code in one.result()]
                _require_success(codes + self._engine.put(keys, objects))
        finally:
            for one in packed:
                self._pool.give(one.buffer)
        return self._make_current([one.ref for one in packed])

    def _objects(
        self, items: Sequence[StoreItem], refs: Sequence[SampleRef], packed: list[_Packed]
    ) -> tuple[list[str], list[list[Piece]]]:
        """Return the keys and pieces of samples and records; `packed` gets what they lie in."""
        keys: list[str] = []
        objects: list[list[Piece]] = []
        for item, ref in zip(items, refs, strict=True):
            packed.append(self._pack(item, ref))
            keys += [self.key(ref), record_key(self._name, ref.feature_id, 0)]
            objects += [packed[-1].pieces, [packed[-1].record]]
        return keys, objects

    def _pack(self, item: StoreItem, ref: SampleRef) -> _Packed:
        laid = [(place, item.tensors[place.spec.name].detach()) for place in places(ref.tensors)]
        staged = sum(place.nbytes for place, tensor in laid if not self._goes_as_it_is(tensor))
        buffer = self._pool.take(staged + RECORD_BYTES)
        pieces: list[Piece] = []
        tensors: dict[str, Tensor] = {}
        start = 0
        for place, tensor in laid:
            if not self._goes_as_it_is(tensor):
                room = buffer[start : start + place.nbytes].view(place.dtype).view(tensor.shape)
                tensor = room.copy_(tensor)
                start += place.nbytes
            if place.nbytes:
                pieces.append((tensor.data_ptr(), place.nbytes))
            tensors[place.spec.name] = tensor
        ref = sealed(ref, tensors)
        record = Record(ref).pack()
        buffer[start : start + len(record)] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        at = buffer.data_ptr() + start
        return _Packed(buffer, ref, _joined(pieces or [(at, 1)]), (at, len(record)))

    def _goes_as_it_is(self, tensor: Tensor) -> bool:
        if not self._engine.in_place or tensor.nbytes < PIECE_BYTES:
            return False
        in_memory = tensor.device.type == "cpu" and tensor.is_contiguous()
        return in_memory and not (tensor.is_conj() or tensor.is_neg())

    def _make_current(self, refs: Sequence[SampleRef]) -> list[Record]:
        """Write the next record of ids that had one already, which the put has left as it was."""
        found = self.records([ref.feature_id for ref in refs])
        records = []
        for ref in refs:
            last = found.get(ref.feature_id)
            if last is None:  # who wrote the first one was killed
                records.append(Record(ref, (), 1))
            elif last.ref.generation == ref.generation:
                records.append(last)
            else:
                records.append(Record(ref, (last.ref.generation, *last.older), last.turn + 1))
        olds = [replace(one.ref, generation=old) for one in records for old in one.older]
        there = self._engine.exist([self.key(old) for old in olds])
        held = {old.key for old, exists in zip(olds, there, strict=True) if exists}
        for at, one in enumerate(records):
            older = tuple(old for old in one.older if (one.ref.feature_id, old) in held)
            records[at] = replace(one, older=older)
        self._replace_records([one for one in records if one.turn])
        return records

    def _replace_records(self, records: Sequence[Record]) -> None:
        packed = [record.pack() for record in records]
        tail = b"".join(packed)
        if not tail:
            return
        buffer = self._pool.take(len(tail))
        try:
            buffer[: len(tail)] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
            ends = list(accumulate(map(len, packed)))
            starts = [
                buffer.data_ptr() + end - len(one) for end, one in zip(ends, packed, strict=True)
            ]
            keys = [record_key(self._name, one.ref.feature_id, one.turn) for one in records]
            pieces = list(zip(starts, map(len, packed), strict=True))
            _require_success(self._engine.replace(keys, pieces))
        finally:
            self._pool.give(buffer)

    # ------------------------------------------------------------ reading

    def read(
        self, refs: Sequence[SampleRef], names: Sequence[Sequence[str]]
    ) -> list[tuple[Tensor, Mapping[str, Tensor], Record | None]]:
        """Read these tensors of samples, each into a buffer that the caller gives back.

        They come with the id's record. Raises StoreError for a sample that is gone, superseded, torn
        or of another size. A sample that is asked for twice is read once: of one key twice in a call,
        Mooncake fills one buffer and reports both as full.
        """
        last = {ref: at for at, ref in enumerate(refs)}
        readings = {ref: self._begin(ref, names[at]) for ref, at in last.items()}
        waiting = list(readings.values())
        try:
            for left in reversed(range(TRIES)):
                if waiting := self._read_some(waiting, left):
                    time.sleep(PAUSE_SECONDS)
        except BaseException:
            for one in readings.values():
                self._pool.give(one.buffer)
            raise
        outcome = []
        for at, ref in enumerate(refs):
            one = readings[ref]
            buffer = one.buffer
            if last[ref] != at:
                buffer = self._pool.take(one.nbytes)
                buffer[: one.nbytes] = one.buffer[: one.nbytes]
            outcome.append((buffer, tensors_in(buffer, one.specs), one.record))
        return outcome

    def _begin(self, ref: SampleRef, names: Sequence[str]) -> _Reading:
        specs = tuple(spec for spec in ref.tensors if spec.name in names)
        nbytes = object_bytes(ref)
        if specs != ref.tensors:
            nbytes = sum(place.nbytes for place in places(specs))
        return _Reading(ref, specs, nbytes, self._pool.take(nbytes))

    def _read_some(self, readings: Sequence[_Reading], left: int) -> list[_Reading]:
        """Read samples with their records; return those whose transfer failed."""
        if not readings:
            return []
        table = self._pool.take(2 * RECORD_BYTES * len(readings))
        try:
            record_codes = self._get(readings, table)
            for one in readings:
                if one.code < 0 and one.code not in NOTHING_WAS_READ:
                    self._pool.set_aside(one.buffer)
                    one.buffer = self._pool.take(one.nbytes)
            failed = []
            for row, (one, codes) in enumerate(zip(readings, record_codes, strict=True)):
                if self._judge(one, left):
                    failed.append(one)
                    continue
                one.record = _latest(table, row, one.ref.feature_id, codes)
                if one.record is not None and one.record.ref.generation != one.ref.generation:
                    raise _unreadable(one.ref, "was put again since")
            return failed
        finally:
            self._pool.give(table)

    def _get(self, readings: Sequence[_Reading], table: Tensor) -> list[tuple[int, int]]:
        """Read objects and records, whole ones in one call; return the codes of the records."""
        far = self._copy_own(readings)
        whole, some = ([one for one in far if one.is_whole is kind] for kind in (True, False))
        keys, room = self._record_pieces([one.ref.feature_id for one in readings], table)
        codes = self._engine.get(
            [self.key(one.ref) for one in whole] + keys,
            [(one.buffer.data_ptr(), one.nbytes) for one in whole] + room,
        )
        parts = self._engine.get_parts(
            [self.key(one.ref) for one in some], [(one.buffer, one.parts()) for one in some]
        )
        for one, code in zip(whole + some, codes[: len(whole)] + parts, strict=True):
            one.code, tensors = code, tensors_in(one.buffer, one.specs)
            one.intact = code == one.nbytes and sealed(one.ref, tensors) == one.ref
        return _pairs(codes[len(whole) :])

    def _copy_own(self, readings: Sequence[_Reading]) -> list[_Reading]:
        """Copy what lies in memory of this process; return what does not."""
        far = []
        with self._engine.own_objects([self.key(one.ref) for one in readings]) as own:
            for one in readings:
                data = own.get(self.key(one.ref))
                if data is None or len(data) != object_bytes(one.ref):
                    far.append(one)
                    continue
                room, digests = bytes_of(one.buffer), list[str]()
                for to, lies, nbytes in one.parts():
                    digest = xxh3_64()
                    copy_digested(room[to : to + nbytes], data[lies : lies + nbytes], digest)
                    digests.append(digest.hexdigest())
                wanted = [place.spec.digest for place in places(one.specs)]
                one.code, one.intact = one.nbytes, digests[: len(wanted)] == wanted
        return far

    def _judge(self, one: _Reading, left: int) -> bool:
        """Say whether a read is to be tried again. Raises StoreError if that is hopeless."""
        ref, size, code = one.ref, object_bytes(one.ref), one.code
        if one.intact:
            return False
        if code == one.nbytes:
            raise _unreadable(ref, "is torn: it was removed while it was read")
        if code >= 0 or code == INVALID:
            raise _unreadable(ref, f"has an object of another size than {size} bytes")
        if code == NOT_FOUND:
            raise _unreadable(ref, "is not held: freed or lost")
        if not left:
            raise _unreadable(ref, f"cannot be read: {explain(code)}")
        return True

    def records(self, feature_ids: Sequence[str]) -> dict[str, Record]:
        """Return the records of those ids that have one which can be read."""
        found: dict[str, Record] = {}
        for start in range(0, len(feature_ids), RECORDS_AT_ONCE):
            found |= self._some_records(feature_ids[start : start + RECORDS_AT_ONCE])
        return found

    def _some_records(self, feature_ids: Sequence[str]) -> dict[str, Record]:
        found: dict[str, Record] = {}
        table = self._pool.take(2 * RECORD_BYTES * len(feature_ids))
        keys, pieces = self._record_pieces(feature_ids, table)
        try:
            for _ in range(TRIES):
                codes = _pairs(self._engine.get(keys, pieces))
                for row, (feature_id, both) in enumerate(zip(feature_ids, codes, strict=True)):
                    record = _latest(table, row, feature_id, both)
                    if record is not None:
                        found[feature_id] = record
                read = zip(feature_ids, codes, strict=True)
                if all(i in found or (max(both) < 0 and NOT_READY not in both) for i, both in read):
                    break
                time.sleep(PAUSE_SECONDS)  # somebody is writing the first record, or died doing so
        finally:
            self._pool.give(table)
        return found

    def _record_pieces(
        self, feature_ids: Sequence[str], table: Tensor
    ) -> tuple[list[str], list[Piece]]:
        """Return the keys of both records of each id, and their places in a table."""
        keys = [record_key(self._name, one, turn) for one in feature_ids for turn in (0, 1)]
        starts = range(table.data_ptr(), table.data_ptr() + RECORD_BYTES * len(keys), RECORD_BYTES)
        return keys, [(start, RECORD_BYTES) for start in starts]


def _require_success(codes: Sequence[int]) -> None:
    failed = sorted(code for code in codes if code != 0)
    if failed:
        raise TransferError(TRANSFER if TRANSFER in failed else failed[-1])


def _batches(refs: Sequence[SampleRef]) -> Iterator[slice]:
    """Cut samples into batches that each take the wire longer than a call does."""
    start, nbytes = 0, 0
    for at, ref in enumerate(refs, 1):
        nbytes += ref.nbytes
        if nbytes >= BATCH_BYTES or at == len(refs):
            yield slice(start, at)
            start, nbytes = at, 0


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Make one piece of those that lie one behind the other."""
    joined = [pieces[0]]
    for start, nbytes in pieces[1:]:
        last, last_bytes = joined[-1]
        if start == last + last_bytes:
            joined[-1] = (last, last_bytes + nbytes)
        else:
            joined.append((start, nbytes))
    return joined


def _pairs(codes: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(codes[::2], codes[1::2], strict=True))


def _latest(table: Tensor, row: int, feature_id: str, codes: tuple[int, int]) -> Record | None:
    """Return the later one of an id's records in a table; None if neither can be read."""
    start = 2 * RECORD_BYTES * row
    texts = [
        table[at : at + code]
        for at, code in zip((start, start + RECORD_BYTES), codes, strict=True)
        if code > 0
    ]
    found = (Record.unpack(feature_id, bytes_of(text)) for text in texts)
    return max(filter(None, found), key=lambda record: record.turn, default=None)


def _unreadable(ref: SampleRef, why: str) -> StoreError:
    return StoreError(
        f"sample {ref.feature_id!r} of generation {ref.generation} {why}\n"
        "  look it up again, or capture it again"
    )
