"""The messages between a capture and its server: an ordinary `/generate` with a field of ours.

    sampling_params.custom_params = {"draftcore": {...}}     an Ask, or {"about": true}
    meta_info["draftcore"] = [{...}]                         its receipt

A receipt is `{"ref": ...}`, a `SampleRef` of what is stored by then, or `{"error": kind, "reason":
text}`; an answer without one comes from a server that does not run this dist. An ask names a sample
and features, never a place: where features go is in the server's launch environment alone, and
whatever does not have the form below is refused before anything is done with it.
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from draftcore.errors import DraftcoreError

FIELD = "draftcore"
VERSION: Literal[2] = 2
Name = Annotated[str, Field(pattern=r"^(hidden\.[0-9]{1,4}|last_hidden)$")]
Beside = Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
BesideDtype = Annotated[str, Field(pattern=r"^(int64|int32|bool|float32)$")]
# Kinds of error. The first four cannot go better another time.
REFUSED, SHORT, NOT_FINITE, MISREAD = "refused", "short", "not-finite", "misread"
FULL, AWAY, BUSY, FAILED = "full", "away", "busy", "failed"


class Refusal(DraftcoreError):  # noqa: N818  a state that some clients wait out
    """A capture that was asked for and does not happen; `kind` is the receipt's."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        super().__init__(reason)

    @property
    def receipt(self) -> dict[str, Any]:
        return {"error": self.kind, "reason": str(self)}


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Ask:
    """A sample to capture: its features, and [T] tensors that are stored beside them.

    `lent` says that the client only wants to read it, and frees it then. `read` is the digest of its
    tokens where the server writes those of its images itself.
    """

    sample: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
    names: Annotated[tuple[Name, ...], Field(min_length=1)]
    dtype: Annotated[str, Field(pattern=r"^(float32|bfloat16|float16)$")]
    origin: Annotated[str, Field(max_length=4096)]
    beside: Annotated[dict[Beside, tuple[BesideDtype, str]], Field(max_length=8)]  # packed
    lent: bool = False
    read: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    version: Literal[2] = VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Ask:
        """Read an ask from outside. Raises Refusal for all that is not of this form."""
        try:
            return _ASK.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, (FIELD, *first["loc"])))
            raise Refusal(REFUSED, f"the request's {where!r}: {first['msg']}") from None


_ASK = TypeAdapter(Ask)


def digest(tokens: Iterable[int]) -> str:
    """Return what tells tokens from others."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


def pack(value_T: Tensor) -> tuple[str, str]:
    """Write a tensor [T] as its dtype and base64."""
    raw = value_T.contiguous().numpy().tobytes()
    return str(value_T.dtype).removeprefix("torch."), base64.b64encode(raw).decode()


def unpack(dtype: str, text: str) -> Tensor:
    """Read what `pack` wrote. Raises ValueError for text that is not."""
    raw = bytearray(base64.b64decode(text, validate=True))
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
