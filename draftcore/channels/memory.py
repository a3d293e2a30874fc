"""Channel `memory`: producers and trainer in one process, pumped by a loop or by threads.

    while (refs := channel.receive(step)) is None:
        task = channel.claim("local")
        ...
        channel.publish(task, store.put_many(...))

A capture group is in flight from its claim to its publication and is released as a whole: when
`advance` has passed all uses of all its members. So while one member is needed nobody captures the
group again, which would supersede the refs the trainer holds; a task whose group is still held is
answered with what is there. That also makes a short run capture each group once, whatever its
epochs.

Credit bounds how far capture runs ahead. It yields to need: a step that the trainer waits for is
captured even where credit is used up, since only that step can lead to an `advance`.
"""

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from draftcore.channels import require_metadata
from draftcore.errors import DraftcoreError
from draftcore.records import CaptureTask, Credit, PlannedStep, SampleId, SampleRef
from draftcore.uris import parse_uri

UNLIMITED = sys.maxsize  # who pumps on demand, as a colocated run does, never runs ahead
RESUME_AT = 0.75  # of the limits, so that producers work in stretches and not group by group


@dataclass
class _Group:
    """A claimed group. `due` holds the uses that are not behind the cursor yet, `received` counts
    the uses between the trainer and the cursor."""

    task: CaptureTask
    due: set[SampleId]
    outcome: tuple[SampleRef, ...] | Exception | None = None  # None while in flight
    received: int = 0

    def promise(self, epoch: int) -> None:
        """Serve an epoch's uses too."""
        self.due |= {SampleId(feature_id, epoch) for feature_id in self.task.group.feature_ids}

    @property
    def refs(self) -> tuple[SampleRef, ...]:
        return self.outcome if isinstance(self.outcome, tuple) else ()

    @property
    def failed(self) -> bool:
        return isinstance(self.outcome, Exception)


@dataclass
class _Books:
    """Everything a channel remembers. Groups are found by their index and by their members."""

    tasks: Iterator[CaptureTask] = field(default_factory=lambda: iter(()))
    upcoming: CaptureTask | None = None  # taken from `tasks`, not claimed yet
    groups: dict[int, _Group] = field(default_factory=dict)
    group_of: dict[str, _Group] = field(default_factory=dict)
    steps: dict[int, PlannedStep] = field(default_factory=dict)  # received, not behind the cursor
    waiting: PlannedStep | None = None  # the step whose receive returned None
    cursor: int = 0
    epoch: int = 0  # of the last step behind the cursor


class MemoryChannel:
    """The queue of one run. `limit_refs` and `limit_bytes` bound what is captured ahead.

    A claimed group counts in refs at once and in bytes when it is published, so bytes may exceed
    their limit by one group per producer.
    """

    def __init__(
        self, run_id: str, *, limit_refs: int = UNLIMITED, limit_bytes: int = UNLIMITED
    ) -> None:
        self.run_id = run_id
        self.limit = Credit(limit_refs, limit_bytes)
        self._used = Credit(0, 0)
        self._paused = False
        self._books = _Books()
        self._closed = False
        self._mutex = threading.Lock()

    @classmethod
    def open(cls, uri: str, run_id: str) -> "MemoryChannel":
        """Open `memory:` or `memory:?limit_refs=1024&limit_bytes=4GiB`."""
        parsed = parse_uri(uri, known=["limit_refs", "limit_bytes"])
        return cls(
            run_id,
            limit_refs=parsed.count("limit_refs", UNLIMITED),
            limit_bytes=parsed.size("limit_bytes", UNLIMITED),
        )

    # ------------------------------------------------------------ the producer's side

    def offer(self, tasks: Iterable[CaptureTask]) -> None:
        """Set the tasks, and where the run stands; what is published or in flight stays."""
        with self._mutex:
            self._require_open()
            books = self._books
            books.tasks, books.upcoming, books.waiting = iter(tasks), None, None
            books.cursor = books.epoch = 0

    def claim(self, producer: str) -> CaptureTask | None:
        """Hand out the next task whose group is not held, or None.

        Raises DraftcoreError where the trainer waits for a sample that no task will bring.
        """
        with self._mutex:
            self._require_open()
            missing = self._missing()
            task = self._next_task()
            if task is None:
                if missing:
                    raise self._starved(missing[0])
                return None
            if not missing and not self._has_credit(len(task.group.rows)):
                return None
            self._books.upcoming = None
            self._start(task)
            return task

    def publish(self, task: CaptureTask, refs: Sequence[SampleRef] | Exception) -> None:
        with self._mutex:
            self._require_open()
            group = self._books.groups.get(task.group.index)
            if group is None or group.task != task or group.outcome is not None:
                raise DraftcoreError(
                    f"capture group {task.group.index} was published without a claim\n"
                    "  publish each claimed task once"
                )
            if isinstance(refs, Exception):
                group.outcome = refs
                self._use(refs=-len(task.group.rows), nbytes=0)
                return
            require_metadata(refs)
            _require_refs_of(task, refs)
            group.outcome = tuple(refs)
            self._use(refs=0, nbytes=sum(ref.nbytes for ref in refs))

    def credit(self) -> Credit:
        with self._mutex:
            return Credit(0, 0) if self._paused else self._left()

    # ------------------------------------------------------------ the trainer's side

    def receive(self, step: PlannedStep) -> tuple[SampleRef, ...] | None:
        with self._mutex:
            self._require_open()
            books = self._books
            if step.index < books.cursor:
                raise DraftcoreError(
                    f"step {step.index} is behind step {books.cursor}, to which the run advanced\n"
                    "  its features are released: offer the tasks from that step on again"
                )
            books.waiting = None
            refs = [self._ref(sample) for sample in step.samples]
            published = tuple(ref for ref in refs if ref is not None)
            if len(published) < len(refs):
                books.waiting = step
                return None
            self._next_task()  # notes the promises this step relies on, before they are kept
            if step.index not in books.steps:
                books.steps[step.index] = step
                for sample in step.samples:
                    books.group_of[sample.feature_id].received += 1
            return published

    def advance(self, step_index: int) -> tuple[SampleRef, ...]:
        """Move the cursor to a step and release the groups that no later step is due to use."""
        with self._mutex:
            self._require_open()
            books = self._books
            touched: dict[int, _Group] = {}
            for index in sorted(index for index in books.steps if index < step_index):
                step = books.steps.pop(index)
                if step.epoch > books.epoch:
                    touched |= self._end_epochs_before(step.epoch)
                for sample in step.samples:
                    group = books.group_of[sample.feature_id]
                    group.due.discard(sample)
                    group.received -= 1
                    touched[group.task.group.index] = group
            books.cursor = max(books.cursor, step_index)
            done = [group for group in touched.values() if not group.due and not group.received]
            return tuple(ref for group in done for ref in self._release(group))

    def close(self) -> None:
        """End both sides: whatever is called from now on raises."""
        with self._mutex:
            self._closed = True
            self._books = _Books()

    # ------------------------------------------------------------ tasks

    def _next_task(self) -> CaptureTask | None:
        """Peek at the next task, passing over those whose group is in flight or published."""
        books = self._books
        while True:
            if books.upcoming is None:
                books.upcoming = next(books.tasks, None)
            if books.upcoming is None:
                return None
            held = books.groups.get(books.upcoming.group.index)
            if held is None or held.failed:
                return books.upcoming
            held.promise(books.upcoming.epoch)
            books.upcoming = None

    def _start(self, task: CaptureTask) -> None:
        group = _Group(task, due=set())
        group.promise(task.epoch)
        self._books.groups[task.group.index] = group
        self._books.group_of.update(dict.fromkeys(task.group.feature_ids, group))
        self._use(refs=len(task.group.rows), nbytes=0)

    def _missing(self) -> list[SampleId]:
        """The samples of the step that the trainer waits for which are not even in flight."""
        if self._books.waiting is None:
            return []
        held = self._books.group_of
        return [
            sample
            for sample in self._books.waiting.samples
            if sample.feature_id not in held or held[sample.feature_id].failed
        ]

    def _starved(self, sample: SampleId) -> DraftcoreError:
        assert self._books.waiting is not None
        return DraftcoreError(
            f"step {self._books.waiting.index} waits for sample {sample.feature_id!r} of epoch "
            f"{sample.epoch}, and no task is left that would capture it\n"
            "  offer the tasks from this step on: its features were released, or never offered"
        )

    # ------------------------------------------------------------ refs

    def _ref(self, sample: SampleId) -> SampleRef | None:
        """Return a sample's ref, or None. Raises what its capture raised, in the epoch it did."""
        group = self._books.group_of.get(sample.feature_id)
        if group is None:
            return None
        if isinstance(group.outcome, Exception) and sample in group.due:
            raise group.outcome
        members = zip(group.task.group.feature_ids, group.refs, strict=False)
        return next((ref for member, ref in members if member == sample.feature_id), None)

    def _end_epochs_before(self, epoch: int) -> dict[int, _Group]:
        """Forget uses that never came: those before the step at which a run was resumed."""
        self._books.epoch = epoch
        for group in self._books.groups.values():
            group.due = {sample for sample in group.due if sample.epoch >= epoch}
        return {
            index: group for index, group in self._books.groups.items() if group.outcome is not None
        }

    def _release(self, group: _Group) -> tuple[SampleRef, ...]:
        del self._books.groups[group.task.group.index]
        for feature_id in group.task.group.feature_ids:
            del self._books.group_of[feature_id]
        if not group.failed:
            nbytes = sum(ref.nbytes for ref in group.refs)
            self._use(refs=-len(group.refs), nbytes=-nbytes)
        return group.refs

    # ------------------------------------------------------------ credit

    def _has_credit(self, refs: int) -> bool:
        """Say whether a group fits. Once one did not, wait until a good part is free again."""
        left = self._left()
        if refs > left.refs or left.nbytes == 0:
            self._paused = True
        return not self._paused

    def _left(self) -> Credit:
        refs, nbytes = self.limit.refs - self._used.refs, self.limit.nbytes - self._used.nbytes
        return Credit(max(refs, 0), max(nbytes, 0))

    def _use(self, *, refs: int, nbytes: int) -> None:
        self._used = Credit(self._used.refs + refs, self._used.nbytes + nbytes)
        if (
            self._used.refs <= RESUME_AT * self.limit.refs
            and self._used.nbytes <= RESUME_AT * self.limit.nbytes
        ):
            self._paused = False

    def _require_open(self) -> None:
        if self._closed:
            raise DraftcoreError(
                f"the channel of run {self.run_id} is closed\n  open a new one to go on"
            )


def _require_refs_of(task: CaptureTask, refs: Sequence[SampleRef]) -> None:
    """Raise DraftcoreError unless the refs are the group's members, in its order."""
    ids = tuple(ref.feature_id for ref in refs)
    if ids != task.group.feature_ids:
        raise DraftcoreError(
            f"capture group {task.group.index} was published with other samples than its own\n"
            f"  published: {', '.join(ids) or 'none'}\n"
            f"  the group: {', '.join(task.group.feature_ids)}\n"
            "  publish one ref per member, in the group's order"
        )
