"""What the store writes: one object per sample, and two records per feature id.

    NAME/<id>/<generation>   the tensors' bytes, largest element type first, then a seal
    NAME/<id>/0, NAME/<id>/1 records of the current generation and of the one before: JSON, then a seal

<id> is the SHA-256 of the feature id, which may be any text. The generation is drawn anew for
each attempt, so an object is written once and never changed; only records are replaced. As the
library discards what it replaces first, and a writer may be killed then, records take turns: the
one of turn n replaces that of turn n - 2, and the latest that can be read is the current one. A seal
holds the generation, the length and the xxh3 digest of what it follows: a record that is read
while it is replaced, and an object whose memory was given to another one, do not pass.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote

import torch
import xxhash
from torch import Tensor

from draftcore.contracts.store import SampleRef, StoreError, TensorSpec
from draftcore.features.stores.seals import copy_bytes_sealed

SEAL = struct.Struct("<8s16sQQ")
MAGIC = b"drafts01"
RECORD_BYTES = 64 << 10


def object_key(name: str, feature_id: str, generation: str) -> str:
    return f"{quote(name, safe='')}/{sha256(feature_id.encode()).hexdigest()[:40]}/{generation}"


def record_key(name: str, feature_id: str, turn: int) -> str:
    return object_key(name, feature_id, str(turn % 2))


# ---------------------------------------------------------------- seals


def seal(generation: str, parts: Iterable[memoryview | bytes]) -> bytes:
    """Return the seal of an object made of these parts."""
    digest, length = xxhash.xxh3_64(), 0
    for part in parts:
        digest.update(part)
        length += len(part)
    return _seal(generation, length, digest)


def seal_holds(generation: str, data: memoryview) -> bool:
    """Say whether `data`, which ends with a seal, is whole and of this generation."""
    if len(data) < SEAL.size:
        return False
    body, found = data[: -SEAL.size], bytes(data[-SEAL.size :])
    return found == seal(generation, [body])


def copy_whole(generation: str, room: memoryview, data: memoryview) -> bool:
    """Copy an object with its seal to a room of its size; say whether what arrived is whole."""
    digest, length = xxhash.xxh3_64(), len(room) - SEAL.size
    copy_bytes_sealed(room[:length], data[:length], digest)
    room[length:] = data[length:]
    return bytes(room[length:]) == _seal(generation, length, digest)


def _seal(generation: str, length: int, digest: xxhash.xxh3_64) -> bytes:
    return SEAL.pack(MAGIC, bytes.fromhex(generation), length, digest.intdigest())


# ---------------------------------------------------------------- tensors in an object


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie in its object."""

    spec: TensorSpec
    dtype: torch.dtype
    start: int
    nbytes: int


def places(specs: Sequence[TensorSpec]) -> tuple[Place, ...]:
    """Lay tensors out so that each is aligned to its element size without padding."""
    typed: list[tuple[TensorSpec, torch.dtype]] = [(s, getattr(torch, s.dtype)) for s in specs]
    found, start = [], 0
    for spec, dtype in sorted(typed, key=lambda pair: -pair[1].itemsize):
        nbytes = torch.Size(spec.shape).numel() * dtype.itemsize
        found.append(Place(spec, dtype, start, nbytes))
        start += nbytes
    return tuple(found)


def tensors_in(buffer: Tensor, specs: Sequence[TensorSpec]) -> Mapping[str, Tensor]:
    """Return the tensors of an object as views of the buffer that it was read into."""
    return {
        place.spec.name: buffer[place.start : place.start + place.nbytes]
        .view(place.dtype)
        .view(place.spec.shape)
        for place in places(specs)
    }


# ---------------------------------------------------------------- records


@dataclass(frozen=True)
class Record:
    """A ref of a feature id, and the older generations that may still take up memory."""

    ref: SampleRef
    older: tuple[str, ...] = ()
    turn: int = 0

    def pack(self) -> bytes:
        """Return the record with its seal. The id is left out: it is known to who looks it up."""
        data = {**self.ref.to_json(), "feature_id": "", "older": self.older, "turn": self.turn}
        body = bytes.fromhex(self.ref.generation) + json.dumps(data, ensure_ascii=False).encode()
        if len(body) + SEAL.size > RECORD_BYTES:
            raise StoreError(
                f"the description of sample {self.ref.feature_id!r} takes {len(body)} bytes, and "
                f"{RECORD_BYTES - SEAL.size} are the most\n  shorten its provenance or tensor names"
            )
        return body + seal(self.ref.generation, [body])

    @classmethod
    def unpack(cls, feature_id: str, data: memoryview) -> Record | None:
        """Return a record, or None for one that was replaced while it was read."""
        generation = bytes(data[:16]).hex()
        if len(data) < 16 + SEAL.size or not seal_holds(generation, data):
            return None
        fields = json.loads(bytes(data[16 : -SEAL.size]))
        older, turn = tuple(fields.pop("older")), fields.pop("turn")
        return cls(SampleRef.from_json({**fields, "feature_id": feature_id}), older, turn)
