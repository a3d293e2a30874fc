"""How producers and the trainer talk about captures: metadata only, never a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from draftcore.contracts.algorithm import SampleId
from draftcore.contracts.capture import CaptureGroup
from draftcore.contracts.store import SampleRef
from draftcore.errors import UsageError


@dataclass(frozen=True)
class PlannedStep:
    """The samples of one optimizer step, in order; a pure function of dataset, seed and index."""

    index: int
    epoch: int
    samples: tuple[SampleId, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class CaptureTask:
    """A group to capture, for the samples' uses in `epoch` (and later ones, if refs are kept).

    `claim` names one handing-out of it, so that a late publication is told from a current one.
    """

    epoch: int
    group: CaptureGroup
    claim: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaptureTask:
        group = data["group"]
        lists = {"rows": tuple(group["rows"]), "feature_ids": tuple(group["feature_ids"])}
        return cls(data["epoch"], CaptureGroup(**(group | lists)), data["claim"])


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
