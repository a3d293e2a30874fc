"""Channels: the control plane between producers and the trainer. It carries metadata only.

`memory.MemoryChannel` holds the books of a run, in the trainer's process. Between processes a
`logged.LoggedChannel` carries messages to and from these books, over any transport that is a
`log.Log`: `sqlite.SqliteLog`, `dir.DirLog`, or a plugin's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftcore.errors import DraftcoreError, UsageError
from draftcore.records import CaptureTask, PlannedStep, SampleRef

PLAIN = (str, int, float, bool, type(None))
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Credit:
    """How much more a producer may publish before it waits."""

    refs: int
    nbytes: int


@dataclass(frozen=True)
class Standing:
    """How capture stands, as the trainer knows it: who captures, what was published, what is held.

    `captured` counts samples since this trainer began; `refs` and `nbytes` are what the store holds
    for it now, groups in flight included in `refs`.
    """

    producers: int
    captured: int
    refs: int
    nbytes: int


class Channel(Protocol):
    """The queue between producers and the trainer: metadata only, rebuildable at any time."""

    def offer(self, tasks: Iterable[CaptureTask]) -> None:
        """Set what is to be captured, in the order it is needed; consumed lazily."""
        ...

    def claim(self, producer: str, wait: float = 0.0) -> CaptureTask | None:
        """Hand out the next task; None when, for `wait` seconds, there is none or no credit."""
        ...

    def publish(self, task: CaptureTask, refs: Sequence[SampleRef] | Exception) -> None:
        """Announce a task's refs in the group's order, or why it failed."""
        ...

    def receive(self, step: PlannedStep) -> tuple[SampleRef, ...] | None:
        """Return the refs of a step in plan order; None while some are not published yet.

        A later epoch may use a publication of an earlier one that was not released. A failed
        task that the step needs raises its exception.
        """
        ...

    @property
    def given_up(self) -> Mapping[str, str]:
        """The samples whose last attempt at a capture failed, by feature id, with the reason."""
        ...

    def reject(self, wrong: Mapping[SampleRef, str]) -> tuple[SampleRef, ...]:
        """Take back refs that cannot be used, by reason: their groups are captured again, whole.

        After the last attempt just these samples are given up, and the others of their groups are
        served. Returns the refs to be freed before the next `receive`.
        """
        ...

    def wait_for_room(self, task: CaptureTask, wait: float) -> bool:
        """A producer holds a task's features, and the store has no room for them.

        Tells the trainer, and returns when there may be room, after `wait` seconds at the latest.
        False where nobody waits for the features any more: drop them, and claim anew. Raises as
        `claim` does.
        """
        ...

    def evict(self, step: PlannedStep, tasks: Iterable[CaptureTask]) -> tuple[SampleRef, ...]:
        """Make room for `step`, for which the trainer waits, where producers find none.

        Lets go of what the step does not need, also of claims, and returns the refs to be freed
        before the next `receive`; none where nobody waits for room. `tasks` are what is to be
        captured from this step on; until it is received, only what it needs is handed out. Raises
        DraftcoreError where the store cannot hold the step.
        """
        ...

    def announce(self, about: Mapping[str, str]) -> None:
        """Tell producers what they need to know of the trainer, such as where to put features."""
        ...

    def about(self, wait: float) -> Mapping[str, str]:
        """Return what the trainer announced, waiting for it. Raises DraftcoreError after `wait` s."""
        ...

    def credit(self) -> Credit: ...
    def standing(self) -> Standing: ...
    def advance(self, step_index: int) -> tuple[SampleRef, ...]:
        """Forget the steps before `step_index`; return the refs that nobody is going to use.

        Free them before the next `receive`: until then their groups are not handed out.
        """
        ...

    def close(self, state: str = "finished") -> None:
        """End this side; the trainer's ends the run as `finished`, or `failed` if it may go on."""
        ...


class ChannelEnded(UsageError):  # noqa: N818  how a producer's work normally ends
    """The run is over, as its trainer said: a producer has nothing left to do.

    `state` is `finished`, or `failed` for a run that may be resumed.
    """

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


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
    found = _foreign(record)
    if found is not None:
        place, value = found
        raise TypeError(
            f"{type(record).__name__}{place} is a {type(value).__name__}; the control plane carries "
            "plain data"
        )


def _foreign(value: Any) -> tuple[str, Any] | None:
    """Return what is no plain data in `value`, and its place. Runs over all that is published."""
    if isinstance(value, PLAIN):
        return None
    if hasattr(type(value), "__dataclass_fields__"):
        keyed: Iterable[tuple[Any, Any]] = vars(value).items()
        form = ".{}"
    elif isinstance(value, Mapping):
        keyed, form = value.items(), "[{!r}]"
    elif isinstance(value, (tuple, list, set, frozenset)):
        keyed, form = enumerate(value), "[{}]"
    else:
        return "", value
    for key, item in keyed:
        if type(item) not in PLAIN and (found := _foreign(item)) is not None:
            return form.format(key) + found[0], found[1]
    return None
