"""Store `shm`: features in a ring of shared memory, for the processes of one host.

    shm:NAME                   /dev/shm/draftcore-UID-NAME: put the run's name in it
    shm:FOLDER/FILE            that file: any tmpfs; a file on a disk works, and is as slow as the disk
    ?max_bytes=8GiB            of blocks, 2 GiB by default; all of it is claimed when it is made
    ?run=ID                    refuse processes of another run, replace what an ended one left

Any process puts, gets, frees and looks up. A put copies the tensors into a block of the ring and
then commits the block. A get on the CPU copies nothing: its tensors are views of the ring. They are
valid until the handle closes, and must not be written to: that alters what others read, who notice it
by the seal.

    block = seal of the head | lengths | JSON of the ref | seal of each tensor | tensors

A seal is an xxh3 digest, taken by a put while it copies (`seals`); a tensor begins at a multiple of
64 bytes. A get checks the head and the tensors it hands out. That reads at 25 GB/s, so 20 MiB cost
0.8 ms beside 2.1 ms for one copy of them: little enough to notice every torn or altered byte.
Nothing else in a get grows with the bytes.

What is held outlives its processes, so that a restarted one finds it. The last process to close an
empty store removes it; what killed processes left goes when another store is opened, ten minutes
after its last use. A sample needs one contiguous stretch: give the ring twice what is in flight.
"""

import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import prod
from pathlib import Path
from urllib.parse import quote

import torch
import xxhash
from draftcore_file.base import (
    Key,
    bytes_of,
    describe_items,
    new_generation,
    select_names,
    stale_ref_error,
)
from torch import Tensor

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
from draftcore.errors import UsageError
from draftcore.uris import format_size, parse_uri
from draftcore_shm.seals import copy_sealed
from draftcore_shm.segment import (
    ALIGN,
    FREE,
    HELD,
    RUN,
    Claim,
    open_segment,
    remove_abandoned,
    round_up,
)

SHM = Path("/dev/shm")
DEFAULT_BYTES = 2 << 30
SEAL = struct.Struct("<Q")
COUNTS = struct.Struct("<II")  # bytes of JSON, number of tensors


@dataclass(frozen=True)
class _Block:
    """How a sample lies in its block: the JSON, and where each tensor of the ref begins."""

    text: bytes
    starts: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, ref: SampleRef, text: bytes) -> "_Block":
        head = _head_size(len(text), len(ref.tensors))
        sizes = (round_up(_nbytes(spec), ALIGN) for spec in ref.tensors)
        *starts, size = accumulate(sizes, initial=round_up(head, ALIGN))
        return cls(text, tuple(starts), size)


class ShmStore(FeatureStore):
    """Features in a segment of shared memory, at most `max_bytes` of them."""

    def __init__(self, place: str, *, max_bytes: int | None = None, run: str = "") -> None:
        """Open a name in /dev/shm, or a file where `place` has a slash. Raises UsageError."""
        self.path = path = _path(place)
        self.uri = uri = f"shm:{quote(str(path) if '/' in place else place)}"
        if len(run.encode()) > RUN.stop - RUN.start:
            raise UsageError(f"the run's name {run!r} is too long\n  give it 512 bytes at most")
        remove_abandoned(other for other in SHM.glob(_path("*").name) if other != path)
        self._segment = open_segment(path, uri, max_bytes=max_bytes, default=DEFAULT_BYTES, run=run)
        table = self._segment.table
        self.max_bytes = table.capacity
        self._blocks = torch.frombuffer(table.map, dtype=torch.uint8, offset=table.blocks_at)
        self._readers: Counter[Key] = Counter()
        self._slots: dict[Key, int] = {}  # of what is read here
        self._putting = 0  # in progress
        self._closed = False

    @classmethod
    def open(cls, uri: str) -> "ShmStore":
        """Open `shm:NAME` or `shm:FOLDER/FILE`, with options `max_bytes` and `run`."""
        parsed = parse_uri(uri, known=["max_bytes", "run"])
        if not parsed.path:
            raise UsageError(
                f"the store {uri!r} has no name\n  write shm:NAME, e.g. the run's name"
            )
        run = parsed.options.get("run", "")
        return cls(parsed.path, max_bytes=parsed.size("max_bytes"), run=run)

    # ------------------------------------------------------------ writing

    def put_many(self, items: Sequence[StoreItem]) -> tuple[SampleRef, ...]:
        """Copy samples into the ring. Raises StoreFull, or StoreError for more than it ever holds."""
        generation = new_generation()
        refs = describe_items(items, generation, self.uri)
        if not refs:
            return ()
        blocks = []
        for ref in refs:
            described = ref.to_json()
            del described["uri"]  # each reader knows the store by its own
            blocks.append(_Block.of(ref, json.dumps(described).encode()))
        with self._exclusive():
            slots = self._claim(refs, blocks, generation)
            starts = [self._start(slot) for slot in slots]
            self._putting += 1
        whole: list[int] = []
        try:
            for item, ref, block, start in zip(items, refs, blocks, starts, strict=True):
                self._copy(item, ref, block, start)
            whole = slots
        finally:
            with self._segment.exclusive():
                if whole:
                    self._segment.commit(whole)
                else:
                    self._segment.abandon(_attempt(generation))
                self._putting -= 1
                self._leave_if_unused()
        return refs

    def free(self, refs: Iterable[SampleRef]) -> None:
        with self._exclusive():
            for ref in refs:
                slot = self._segment.find(_id(ref.feature_id))
                if slot is not None and self._generation(slot) == ref.generation:
                    self._segment.drop(slot)

    def abort(self, feature_id: str) -> None:
        with self._exclusive():
            slot = self._segment.find(_id(feature_id))
            if slot is not None:
                self._segment.drop(slot)

    def _claim(
        self, refs: Sequence[SampleRef], blocks: Sequence[_Block], generation: str
    ) -> list[int]:
        claims = [
            Claim(_id(ref.feature_id), ref.nbytes, block.size)
            for ref, block in zip(refs, blocks, strict=True)
        ]
        slots = self._segment.claim(claims, _attempt(generation))
        if slots is None:
            self._segment.collect()
            slots = self._segment.claim(claims, _attempt(generation))
        if slots is None:
            raise self._full(refs, sum(claim.size for claim in claims))
        return slots

    def _full(self, refs: Sequence[SampleRef], size: int) -> StoreError | StoreFull:
        table = self._segment.table
        limit = f"max_bytes={format_size(self.max_bytes)}"
        if size > self.max_bytes or len(refs) > table.slots:
            return StoreError(
                f"the store {self.uri} can never hold {len(refs)} samples of together "
                f"{format_size(size)}: it has {limit} and {table.slots} slots\n"
                "  raise max_bytes in the store's URI, or put fewer samples at once"
            )
        return StoreFull(
            self.uri,
            needed=sum(ref.nbytes for ref in refs),
            samples=len(refs),
            free=self.max_bytes - int(table.size[table.state != FREE].sum()),
            limit=f"{limit} and of {table.slots} slots; what is free may lie scattered",
            remedy="free samples, or raise max_bytes in the store's URI",
        )

    def _copy(self, item: StoreItem, ref: SampleRef, block: _Block, start: int) -> None:
        seals = []
        for spec, at in zip(ref.tensors, block.starts, strict=True):
            digest, place = xxhash.xxh3_64(), self._segment.table.blocks_at + start + at
            room = memoryview(self._segment.table.map)[place : place + _nbytes(spec)]
            copy_sealed(room, item.tensors[spec.name], digest)
            seals.append(digest.intdigest())
        rest = COUNTS.pack(len(block.text), len(seals)) + block.text
        rest += struct.pack(f"<{len(seals)}Q", *seals)
        head = SEAL.pack(xxhash.xxh3_64_intdigest(rest)) + rest
        place = self._segment.table.blocks_at + start
        self._segment.table.map[place : place + len(head)] = head

    # ------------------------------------------------------------ reading

    def get_many(
        self, refs: Sequence[SampleRef], device: str = "cpu", names: Sequence[str] | None = None
    ) -> tuple[Handle, ...]:
        """Open samples. On the CPU the tensors are views of the ring, not to be written to."""
        wanted = [select_names(ref, names) for ref in refs]
        with ExitStack() as opened:
            with self._exclusive():
                slots = [self._require(ref) for ref in refs]
                for ref, slot in zip(refs, slots, strict=True):
                    self._readers[ref.key] += 1
                    self._slots[ref.key] = slot
                    self._segment.pin(slot)
                handles = [opened.enter_context(Handle(ref, {}, self._unpin)) for ref in refs]
                heads = [self._head(slot) for slot in slots]
                starts = [self._start(slot) for slot in slots]
            for handle, some, head, start in zip(handles, wanted, heads, starts, strict=True):
                tensors = self._tensors(handle.ref, some, head, start)
                handle.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
            opened.pop_all()
        return tuple(handles)

    def _unpin(self, ref: SampleRef) -> None:
        if self._segment.locks.forked:
            return  # the parent's handle, which only the parent closes
        with self._segment.exclusive():
            self._readers[ref.key] -= 1
            if not self._readers[ref.key]:
                del self._readers[ref.key]
                self._segment.unpin(self._slots.pop(ref.key))
            self._leave_if_unused()

    def lookup(self, feature_ids: Sequence[str]) -> dict[str, SampleRef]:
        with self._exclusive():
            slots = {name: self._segment.find(_id(name)) for name in feature_ids}
            heads = {name: self._head(slot) for name, slot in slots.items() if slot is not None}
        return {name: self._parse(name, head)[0] for name, head in heads.items()}

    def _require(self, ref: SampleRef) -> int:
        slot = self._segment.find(_id(ref.feature_id))
        if slot is None or self._generation(slot) != ref.generation:
            raise stale_ref_error(ref, superseded=slot is not None)
        return slot

    def _tensors(
        self, ref: SampleRef, names: Sequence[str], head: bytes, start: int
    ) -> dict[str, Tensor]:
        """Return views of a sample's tensors. Raises StoreError for what is not what was put."""
        own, text, seals = self._parse(ref.feature_id, head)
        if own.generation != ref.generation:
            raise self._torn(ref.feature_id, "it holds another put's bytes")
        tensors = {}
        for spec, at, seal in zip(own.tensors, _Block.of(own, text).starts, seals, strict=True):
            if spec.name in names:
                flat = self._blocks[start + at : start + at + _nbytes(spec)]
                if xxhash.xxh3_64_intdigest(bytes_of(flat)) != seal:
                    raise self._torn(ref.feature_id, f"tensor {spec.name!r} is torn or altered")
                tensors[spec.name] = flat.view(getattr(torch, spec.dtype)).view(spec.shape)
        return tensors

    def _head(self, slot: int) -> bytes:
        """Copy a block's head, as long as it says it is but never longer than the block."""
        table = self._segment.table
        place = table.blocks_at + self._start(slot)
        length = _head_size(*COUNTS.unpack_from(table.map, place + SEAL.size))
        return table.map[place : place + min(length, int(table.size[slot]))]

    def _parse(self, feature_id: str, head: bytes) -> tuple[SampleRef, bytes, tuple[int, ...]]:
        """Return a block's ref, its text and its tensors' seals."""
        (seal,), rest = SEAL.unpack_from(head), head[SEAL.size :]
        if seal != xxhash.xxh3_64_intdigest(rest):
            raise self._torn(feature_id, "its description is torn or altered")
        length, tensors = COUNTS.unpack_from(rest)
        text, seals = rest[COUNTS.size :][:length], rest[COUNTS.size + length :]
        ref = SampleRef.from_json({**json.loads(text), "uri": self.uri})
        return ref, text, struct.unpack(f"<{tensors}Q", seals)

    def _torn(self, feature_id: str, what: str) -> StoreError:
        return StoreError(
            f"sample {feature_id!r} cannot be read from {self.path}: {what}\n"
            "  abort it and capture it again; whoever reads the views of this store must not write"
        )

    # ------------------------------------------------------------ the rest

    def stats(self) -> StoreStats:
        """Bytes include those still read or being written; handles are this store's own."""
        with self._exclusive():
            self._segment.collect()
            table = self._segment.table
            samples, live = int((table.state == HELD).sum()), table.state != FREE
            nbytes, size = int(table.nbytes[live].sum()), int(table.size[live].sum())
            handles = self._readers.total()
        return StoreStats(samples, nbytes, self.max_bytes, handles, self.max_bytes - size)

    def close(self) -> None:
        """Leave the segment, or once the last open handle closes. What is held stays in it."""
        if self._closed or self._segment.locks.forked:
            return
        with self._segment.exclusive():
            self._closed = True
            self._leave_if_unused()

    def _leave_if_unused(self) -> None:
        if self._closed and not self._putting and not self._slots:
            self._segment.leave()
            del self._blocks

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the mutex of a segment that is open and in its place."""
        with self._segment.exclusive():
            if self._closed:
                raise StoreError(f"the store {self.uri} is closed\n  open it again")
            self._segment.require_present()
            yield

    def _start(self, slot: int) -> int:
        return int(self._segment.table.start[slot])

    def _generation(self, slot: int) -> str:
        table = self._segment.table
        return f"{table.attempt_high[slot]:016x}{table.attempt_low[slot]:016x}"


def _path(place: str) -> Path:
    if "/" in place:
        return Path(place).expanduser().absolute()
    return SHM / f"draftcore-{os.geteuid()}-{place}"


def _id(feature_id: str) -> tuple[int, int]:
    """Return 128 bits that stand for an id of any length; two ids never share them."""
    digest = blake2b(feature_id.encode(errors="surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _attempt(generation: str) -> tuple[int, int]:
    return int(generation[16:], 16), int(generation[:16], 16)


def _head_size(text: int, tensors: int) -> int:
    return SEAL.size + COUNTS.size + text + SEAL.size * tensors


def _nbytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return prod(spec.shape) * dtype.itemsize
