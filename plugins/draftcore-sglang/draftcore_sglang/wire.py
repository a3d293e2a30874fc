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
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftcore.errors import DraftcoreError

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "draftcore"
VERSION = 1
SAMPLE_ID = re.compile(r"[0-9a-f]{16,64}")
NAME = re.compile(r"hidden\.\d{1,4}|last_hidden")
BESIDE = re.compile(r"[a-z][a-z_]{0,31}")
DTYPES = ("float32", "bfloat16", "float16")
BESIDE_DTYPES = ("int64", "int32", "bool", "float32")
MAX_BESIDE, MAX_ORIGIN = 8, 4096
# Kinds of error. The first three cannot go better another time.
REFUSED, SHORT, NOT_FINITE = "refused", "short", "not-finite"
FULL, AWAY, BUSY, FAILED = "full", "away", "busy", "failed"


class Refusal(DraftcoreError):  # noqa: N818  a state that some clients wait out
    """A capture that was asked for and does not happen; `kind` is the receipt's."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        super().__init__(reason)

    @property
    def receipt(self) -> dict[str, Any]:
        return {"error": self.kind, "reason": str(self)}


@dataclass(frozen=True)
class Ask:
    """A sample to capture: its features, and [T] tensors that are stored beside them.

    `lent` says that the client only wants to read it, and frees it then.
    """

    sample: str
    names: tuple[str, ...]
    dtype: str
    origin: str
    beside: Mapping[str, tuple[str, str]]  # name: dtype, base64 of the bytes
    lent: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            **vars(self),
            "names": list(self.names),
            "beside": {name: list(value) for name, value in self.beside.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Ask:
        """Read an ask from outside. Raises Refusal for all that is not of this form."""
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise Refusal(REFUSED, f"this server reads version {VERSION} of the request field")
        fields: dict[str, Any] = {name: data.get(name) for name in cls.__dataclass_fields__}
        sample, names, beside = fields["sample"], fields["names"], fields["beside"]
        wrong = next(
            (
                name
                for name, right in {
                    "sample": _matches(SAMPLE_ID, sample),
                    "names": _list_of(names, NAME),
                    "dtype": fields["dtype"] in DTYPES,
                    "origin": isinstance(fields["origin"], str)
                    and len(fields["origin"]) <= MAX_ORIGIN,
                    "beside": _are_beside(beside),
                    "lent": isinstance(fields["lent"], bool),
                }.items()
                if not right
            ),
            None,
        )
        if wrong is not None:
            raise Refusal(REFUSED, f"the request's {wrong!r} does not have the form it must have")
        pairs = {name: (value[0], value[1]) for name, value in beside.items()}
        return cls(**{**fields, "names": tuple(names), "beside": pairs})


def pack(value_T: Tensor) -> tuple[str, str]:
    """Write a tensor [T] as its dtype and base64."""
    raw = value_T.contiguous().numpy().tobytes()
    return str(value_T.dtype).removeprefix("torch."), base64.b64encode(raw).decode()


def unpack(dtype: str, text: str) -> Tensor:
    """Read what `pack` wrote. Raises ValueError for text that is not."""
    import torch  # the client's and the scheduler's processes have it; listing plugins does not

    raw = bytearray(base64.b64decode(text, validate=True))
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _list_of(values: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(values, list) and 0 < len(values) == len(
        {value for value in values if _matches(pattern, value)}
    )


def _are_beside(values: Any) -> bool:
    return (
        isinstance(values, dict)
        and len(values) <= MAX_BESIDE
        and all(
            _matches(BESIDE, name)
            and name != "last_hidden"
            and isinstance(value, list)
            and len(value) == 2
            and value[0] in BESIDE_DTYPES
            and isinstance(value[1], str)
            for name, value in values.items()
        )
    )
