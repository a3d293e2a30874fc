"""What the store writes: one object per sample, and two records per feature id.

    NAME/<id>/<generation>   the tensors' bytes, largest element type first
    NAME/<id>/0, NAME/<id>/1 records of the current generation and of the one before: JSON, then a seal

<id> is the SHA-256 of the feature id, which may be any text. The generation is drawn anew for
each attempt, so an object is written once and never changed; only records are replaced. As the
library discards what it replaces first, and a writer may be killed then, records take turns: the
one of turn n replaces that of turn n - 2, and the latest that can be read is the current one.

A ref has the xxh3 digest of each tensor, so any of them is read alone, and the bytes of an object
whose memory was given to another one do not pass. A record that is read while it is replaced does
not pass its seal, which holds the generation, the length and the digest of what it follows.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote

import torch
import xxhash
from torch import Tensor

from draftcore.contracts.store import SampleRef, StoreError, TensorSpec

SEAL = struct.Struct("<8s16sQQ")
MAGIC = b"drafts01"
RECORD_BYTES = 64 << 10


def object_key(name: str, feature_id: str, generation: str) -> str:
    return f"{quote(name, safe='')}/{sha256(feature_id.encode()).hexdigest()[:40]}/{generation}"


def record_key(name: str, feature_id: str, turn: int) -> str:
    return object_key(name, feature_id, str(turn % 2))


# ---------------------------------------------------------------- seals


def seal(generation: str, body: bytes | memoryview) -> bytes:
    """Return the seal of a body."""
    digest = xxhash.xxh3_64_intdigest(body)
    return SEAL.pack(MAGIC, bytes.fromhex(generation), len(body), digest)


def seal_holds(generation: str, data: memoryview) -> bool:
    """Say whether `data`, which ends with a seal, is whole and of this generation."""
    body, found = data[: -SEAL.size], bytes(data[-SEAL.size :])
    return found == seal(generation, body)


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


def object_bytes(ref: SampleRef) -> int:
    return max(ref.nbytes, 1)  # there are no empty objects


def tensors_in(buffer: Tensor, specs: Sequence[TensorSpec]) -> Mapping[str, Tensor]:
    """Return tensors as views of the buffer that they, and no others, were read into."""
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
        return body + seal(self.ref.generation, body)

    @classmethod
    def unpack(cls, feature_id: str, data: memoryview) -> Record | None:
        """Return a record, or None for one that was replaced while it was read."""
        generation = bytes(data[:16]).hex()
        if len(data) < 16 + SEAL.size or not seal_holds(generation, data):
            return None
        fields = json.loads(bytes(data[16 : -SEAL.size]))
        older, turn = tuple(fields.pop("older")), fields.pop("turn")
        return cls(SampleRef.from_json({**fields, "feature_id": feature_id}), older, turn)
