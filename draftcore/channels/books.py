"""What the trainer's side of a channel remembers: groups that were handed out, and where all stands.

Data alone: `memory.MemoryChannel` says what may happen to it, and holds its lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from draftcore.contracts.algorithm import SampleId
from draftcore.contracts.channel import CaptureTask, PlannedStep
from draftcore.contracts.store import SampleRef


@dataclass
class Group:
    """A group that was handed out. `due` holds the uses that are not behind the cursor yet,
    `received` counts the uses between the trainer and the cursor, `place` is its place in order."""

    task: CaptureTask
    due: set[SampleId]
    place: int
    stale: dict[SampleRef, None]  # freed with the group; ordered, as a set is not
    outcome: tuple[SampleRef, ...] | Exception | None = None  # None while in flight
    received: int = 0
    claim: str = ""  # empty while it waits to be handed out again
    producer: str = ""
    failed_by: list[str] = field(default_factory=list)  # one name per attempt
    promised: int = -1  # the last epoch whose uses were added to `due`
    spoilt: dict[str, str] = field(default_factory=dict)  # members that are given up: reason
    tried: int = 0  # the round in which its features were put last, by a thread of this process

    def promise(self, epoch: int) -> None:
        """Serve an epoch's uses too; those that are over do not come back."""
        if epoch > self.promised:
            self.promised = epoch
            kept = [i for i in self.task.group.feature_ids if i not in self.spoilt]
            self.due |= {SampleId(feature_id, epoch) for feature_id in kept}

    def serves(self, needed: Collection[str]) -> bool:
        return any(feature_id in needed for feature_id in self.task.group.feature_ids)

    @property
    def refs(self) -> tuple[SampleRef, ...]:
        return self.outcome if isinstance(self.outcome, tuple) else ()

    @property
    def failed(self) -> bool:
        return isinstance(self.outcome, Exception)


@dataclass
class Books:
    """Everything a channel remembers. Groups are found by their index and by their members."""

    tasks: Iterator[CaptureTask] = field(default_factory=lambda: iter(()))
    upcoming: CaptureTask | None = None  # taken from `tasks`, not claimed yet
    exhausted: bool = False  # all of `tasks` are taken
    returned: list[Group] = field(default_factory=list)  # to be handed out again, in order
    claims: int = 0
    captured: int = 0  # samples that were published and served
    producers: set[str] = field(default_factory=set)
    groups: dict[int, Group] = field(default_factory=dict)
    group_of: dict[str, Group] = field(default_factory=dict)
    steps: dict[int, PlannedStep] = field(default_factory=dict)  # received, not behind the cursor
    waiting: PlannedStep | None = None  # the step whose receive returned None
    cursor: int = 0
    epoch: int = 0  # of the last step behind the cursor
    given_up: dict[str, str] = field(default_factory=dict)
    # A full store. Refs are being freed until the next `receive`, with which a new round begins.
    round: int = 0
    freeing: bool = False
    full: set[int] = field(default_factory=set)  # groups in flight that had no room in this round
    evicted: dict[int, Group] = field(default_factory=dict)  # to be captured again, and their uses
    narrow: frozenset[str] = frozenset()  # the samples of the step for which room is being made
    emptied: bool = False  # of that step's own samples too, as a last resort
    # Stale refs of groups that are not held: of those that were released, and of those that an
    # earlier session had handed out, which are likely to be found in the store and served again.
    late: dict[int, dict[SampleRef, None]] = field(default_factory=dict)
    inherited: dict[int, dict[SampleRef, None]] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)  # groups whose refs are being freed just now
