"""Channels: the control plane between producers and the trainer. It carries metadata only.

`memory.MemoryChannel` holds the books of a run, in the trainer's process. Between processes a
`logged.LoggedChannel` carries messages to and from these books, over any transport that is a
`logged.Log`: `sqlite.SqliteLog`, `dir.DirLog`, or a plugin's.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftcore.errors import DraftcoreError, UsageError
from draftcore.records import CaptureTask, SampleRef

PLAIN = (str, int, float, bool, type(None))
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class ChannelEnded(DraftcoreError):  # noqa: N818  how a producer's work normally ends
    """The run is over, as its trainer said: a producer has nothing left to do."""


def require_name(kind: str, name: str) -> str:
    """Return a name that may become part of a path, a key or a file name; refuse any other.

    Letters, digits, `_`, `.` and `-`, at most 64, the first one neither `.` nor `-`.
    """
    if NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} cannot be the name of a {kind}\n"
            "  use up to 64 letters, digits, '_', '.' and '-', and begin with none of the last two"
        )
    return name


def require_claim(task: CaptureTask) -> None:
    """Raise DraftcoreError for a task that no `claim` has returned."""
    if not task.claim:
        raise DraftcoreError(
            f"capture group {task.group.index} was published without a claim\n"
            "  publish the tasks that `claim` returns"
        )


def require_refs_of(task: CaptureTask, refs: Sequence[SampleRef]) -> None:
    """Raise DraftcoreError unless the refs are the group's members, in its order."""
    ids = tuple(ref.feature_id for ref in refs)
    if ids != task.group.feature_ids:
        raise DraftcoreError(
            f"capture group {task.group.index} was published with other samples than its own\n"
            f"  published: {', '.join(ids) or 'none'}\n"
            f"  the group: {', '.join(task.group.feature_ids)}\n"
            "  publish one ref per member, in the group's order"
        )


def require_metadata(record: Any) -> None:
    """Raise TypeError, naming the field, where a record holds more than plain data.

    Features travel through a store: a tensor in here would be copied to every process that looks.
    """
    _walk(record, type(record).__name__)


def _walk(value: Any, place: str) -> None:
    if isinstance(value, PLAIN):
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _walk(getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _walk(item, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list, set, frozenset)):
        for at, item in enumerate(value):
            _walk(item, f"{place}[{at}]")
    else:
        raise TypeError(
            f"{place} is a {type(value).__name__}; the control plane carries plain data"
        )
