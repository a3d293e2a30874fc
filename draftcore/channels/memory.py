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

These are also the books of every channel between processes. So each handing-out of a task has a
name, the claim: a task whose producer left or failed is handed out again, before anything else,
and what comes in late under the old name is *stale*. Stale refs are never served; `advance`
returns them to be freed, but only once no producer can have published them a second time, having
found them in the store.

A store that is full is emptied for the step that the trainer waits for (`evict`), in *rounds*: what
a producer says counts only if it has tried to put its features since the last refs were freed.
"""

import bisect
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence

from draftcore.channels import require_claim, require_metadata, require_refs_of
from draftcore.channels.books import Books, Group
from draftcore.contracts.algorithm import SampleId
from draftcore.contracts.capture import CaptureGroup
from draftcore.contracts.channel import CaptureTask, Credit, PlannedStep, Standing
from draftcore.contracts.store import SampleRef
from draftcore.errors import DraftcoreError, UsageError
from draftcore.uris import format_size, parse_uri

UNLIMITED = sys.maxsize  # who pumps on demand, as a colocated run does, never runs ahead
RESUME_AT = 0.75  # of the limits, so that producers work in stretches and not group by group


class MemoryChannel:
    """The queue of one run. `limit_refs` and `limit_bytes` bound what is captured ahead.

    A claimed group counts in refs at once and in bytes when it is published, so bytes may exceed
    their limit by one group per producer. A group whose capture fails is handed out `attempts`
    times, to another producer if there is one; here once, as a colocated run fails at once anyway.
    `session` begins the names of all claims.
    """

    def __init__(
        self,
        run_id: str,
        *,
        limit_refs: int = UNLIMITED,
        limit_bytes: int = UNLIMITED,
        attempts: int = 1,
        session: str = "",
    ) -> None:
        self.run_id, self.attempts = run_id, attempts
        self.session = session or uuid.uuid4().hex
        self.limit = Credit(limit_refs, limit_bytes)
        self._used = Credit(0, 0)
        self._paused = False
        self._books = Books()
        self._closed = False
        self._mutex = threading.Condition(threading.Lock())

    @classmethod
    def open(cls, uri: str, run_id: str, role: str = "both") -> "MemoryChannel":
        """Open `memory:` or `memory:?limit_refs=1024&limit_bytes=4GiB`."""
        parsed = parse_uri(uri, known=["limit_refs", "limit_bytes"])
        if role != "both":
            raise UsageError(
                f"the channel {uri!r} has no {role}'s end: it does not leave its process\n"
                "  set channel to sqlite:FILE for processes of one host, or to another that "
                "`draftcore list-plugins` shows as shared"
            )
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
            books.exhausted, books.leaving = False, set()
            books.cursor = books.epoch = 0
            books.narrow, books.emptied, books.freeing = frozenset(), False, False
            books.round, books.full = books.round + 1, set()
            books.evicted.clear()
            for group in books.groups.values():
                group.promised = -1  # uses before the cursor may come again
            self._mutex.notify_all()

    def claim(self, producer: str, wait: float = 0.0) -> CaptureTask | None:
        """Hand out a task that came back, else the next one whose group is not held, or None.

        Raises DraftcoreError where the trainer waits for a sample that no task will bring.
        """
        with self._mutex:
            task = self._claim(producer)
            deadline = time.monotonic() + wait if wait and task is None else 0.0
            while task is None and (left := deadline - time.monotonic()) > 0:
                self._mutex.wait(left)
                task = self._claim(producer)
            return task

    def publish(self, task: CaptureTask, refs: Sequence[SampleRef] | Exception) -> None:
        with self._mutex:
            self._require_open()
            require_claim(task)
            group = self._current(task)
            if isinstance(refs, Exception):
                if group is not None:
                    self._fail(group, refs)
                return
            require_metadata(refs)
            require_refs_of(task, refs)
            if group is None:
                self._keep_stale(task, refs)
                return
            group.outcome = tuple(refs)
            if self._books.given_up:
                for feature_id in task.group.feature_ids:
                    self._books.given_up.pop(feature_id, None)
            self._books.captured += len(refs)
            self._use(refs=0, nbytes=sum(ref.nbytes for ref in refs))

    def give_back(self, task: CaptureTask) -> None:
        """Hand a claimed task out again; harmless for a claim that is published or void."""
        with self._mutex:
            group = self._current(task)
            if group is not None:
                self._return(group)

    def leave(self, producer: str) -> None:
        """A producer is gone: hand its claims out again, before anything else."""
        with self._mutex:
            self._books.producers.discard(producer)
            for group in self._books.groups.values():
                if group.producer == producer and group.claim and group.outcome is None:
                    self._return(group)

    @property
    def given_up(self) -> Mapping[str, str]:
        with self._mutex:
            return dict(self._books.given_up)

    def credit(self) -> Credit:
        with self._mutex:
            return Credit(0, 0) if self._paused else self._left()

    def standing(self) -> Standing:
        with self._mutex:
            books, used = self._books, self._used
            return Standing(len(books.producers), books.captured, used.refs, used.nbytes)

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
            books.waiting, books.leaving = None, set()
            if books.freeing:
                books.round, books.freeing, books.full = books.round + 1, False, set()
                self._mutex.notify_all()
            refs = [self._ref(sample) for sample in step.samples]
            published = tuple(ref for ref in refs if ref is not None)
            if len(published) < len(refs):
                books.waiting = step
                self._mutex.notify_all()
                return None
            books.narrow, books.emptied = frozenset(), False
            self._mutex.notify_all()
            self._next_task()  # notes the promises this step relies on, before they are kept
            if step.index not in books.steps:
                books.steps[step.index] = step
                for sample in step.samples:
                    books.group_of[sample.feature_id].received += 1
            return published

    def advance(self, step_index: int) -> tuple[SampleRef, ...]:
        """Move the cursor to a step; release the groups that no later step is due to use."""
        with self._mutex:
            self._require_open()
            books = self._books
            touched: dict[int, Group] = {}
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
            books.leaving = {group.task.group.index for group in done}
            released = [ref for group in done for ref in self._release(group)]
            if books.late or (books.inherited and books.exhausted):
                released += self._stale_of_no_group(inherited=books.exhausted)
            books.freeing |= bool(released)
            self._mutex.notify_all()
            return tuple(released)

    def reject(self, wrong: Mapping[SampleRef, str]) -> tuple[SampleRef, ...]:
        with self._mutex:
            self._require_open()
            rejected: list[SampleRef] = []
            for ref, reason in wrong.items():
                group = self._books.group_of.get(ref.feature_id)
                if group is None or ref not in group.refs:
                    continue  # captured again already, with another one of its refs
                last = len(group.failed_by) + 1 >= self.attempts
                gone = (ref,) if last and len(group.refs) > 1 else group.refs
                rejected += gone
                self._use(refs=0, nbytes=-sum(member.nbytes for member in gone))
                if gone != group.refs:
                    self._spoil(group, ref, reason)
                    continue
                self._books.leaving.add(group.task.group.index)
                group.outcome = None
                self._fail(group, DraftcoreError(reason))
            self._books.freeing |= bool(rejected)
            return tuple(rejected)

    def wait_for_room(self, task: CaptureTask, wait: float) -> bool:
        with self._mutex:
            self._require_open()
            group = self._current(task)
            if group is not None:
                tried = group.tried
                self._mutex.wait_for(lambda: self._closed or self._tell(task, tried) != tried, wait)
                self._require_open()
                group.tried = self._books.round
            return self._tell(task, -1) is not None

    @property
    def round(self) -> int:
        """How often the trainer has freed something."""
        return self._books.round

    def tell_full(self, task: CaptureTask, tried: int) -> int | None:
        """Note that features had no room when they were put in a round.

        Returns the present round, in which to try again if it is another one; None for a claim
        that is void.
        """
        with self._mutex:
            return self._tell(task, tried)

    def evict(self, step: PlannedStep, tasks: Iterable[CaptureTask]) -> tuple[SampleRef, ...]:
        with self._mutex:
            self._require_open()
            books, needed = self._books, frozenset(sample.feature_id for sample in step.samples)
            if not books.full:
                return ()
            flying = {i: g for i, g in books.groups.items() if g.claim and g.outcome is None}
            books.full &= flying.keys()
            coming = any(g.serves(needed) for i, g in flying.items() if i not in books.full)
            if coming or not books.full:
                return ()
            held = [g for g in books.groups.values() if g.claim and not g.failed]
            ahead = [group for group in held if not group.serves(needed)]
            spare = [group for group in ahead if group.refs and not group.received]
            if not ahead and not books.late and not books.inherited:
                spare = self._last_resort(step)
            books.narrow = needed
            books.tasks, books.upcoming, books.exhausted = iter(tasks), None, False
            refs = [ref for group in spare for ref in self._set_aside(group)]
            refs += self._stale_of_no_group(inherited=True)
            books.leaving |= {group.task.group.index for group in spare}
            books.freeing |= bool(refs)
            self._mutex.notify_all()
            return tuple(refs)

    def announce(self, about: Mapping[str, str]) -> None:
        """Nobody else is there to be told."""

    def about(self, wait: float) -> Mapping[str, str]:
        return {}

    def close(self, state: str = "finished") -> None:
        """End both sides: whatever is called from now on raises."""
        with self._mutex:
            self._closed = True
            self._books = Books()
            self._mutex.notify_all()

    # ------------------------------------------------------------ tasks

    def _claim(self, producer: str) -> CaptureTask | None:
        self._require_open()
        books = self._books
        books.producers.add(producer)
        group = self._returned_for(producer) if books.returned else None
        if group is None:
            missing = self._missing()
            task = self._next_task()
            if task is None:
                if missing:
                    raise self._starved(missing[0])
                return None
            if not self._may_go(task.group):
                return None
            if not missing and not self._has_credit(len(task.group.rows)):
                return None
            books.upcoming = None
            group = self._start(task)
        books.claims += 1
        group.claim, group.producer = f"{self.session}.{books.claims}", producer
        group.tried = books.round
        return CaptureTask(group.task.epoch, group.task.group, group.claim)

    def _returned_for(self, producer: str) -> Group | None:
        """Take the first returned group, but one that this producer failed only if all others did.

        A returned group has kept its credit.
        """
        for at, group in enumerate(self._books.returned):
            others = self._books.producers - set(group.failed_by)
            if self._may_go(group.task.group) and (producer not in group.failed_by or not others):
                return self._books.returned.pop(at)
        return None

    def _may_go(self, group: CaptureGroup) -> bool:
        """Say whether a group may be handed out at this moment."""
        books = self._books
        if group.index in books.leaving:  # its producer would find in the store what is being freed
            return False
        return self._is_wanted(group)

    def _is_wanted(self, group: CaptureGroup) -> bool:
        """Say whether a group may take up room just now."""
        narrow = self._books.narrow
        return not narrow or not narrow.isdisjoint(group.feature_ids)

    def _current(self, task: CaptureTask) -> Group | None:
        """Return the group that is in flight under a task's claim; None where the claim is void."""
        group = self._books.groups.get(task.group.index)
        if group is None or not group.claim or group.outcome is not None:
            return None
        return group if group.claim == task.claim else None

    def _return(self, group: Group) -> None:
        group.claim = ""
        bisect.insort(self._books.returned, group, key=lambda group: group.place)
        self._mutex.notify_all()

    def _fail(self, group: Group, error: Exception) -> None:
        group.failed_by.append(group.producer)
        if len(group.failed_by) < self.attempts:
            self._return(group)
            return
        group.outcome = error
        self._books.given_up |= dict.fromkeys(group.task.group.feature_ids, str(error))
        self._use(refs=-len(group.task.group.rows), nbytes=0)
        self._mutex.notify_all()

    def _spoil(self, group: Group, ref: SampleRef, reason: str) -> None:
        """Give up one member after the last attempt; the others' features are as good as ever."""
        group.outcome = tuple(other for other in group.refs if other != ref)
        group.due = {sample for sample in group.due if sample.feature_id != ref.feature_id}
        group.spoilt[ref.feature_id] = self._books.given_up[ref.feature_id] = reason

    def _next_task(self) -> CaptureTask | None:
        """Peek at the next task, passing over those whose group is in flight or published."""
        books = self._books
        while True:
            if books.upcoming is None:
                books.upcoming = next(books.tasks, None)
            if books.upcoming is None:
                books.exhausted = True
                return None
            held = books.groups.get(books.upcoming.group.index)
            if held is None or held.failed:
                return books.upcoming
            held.promise(books.upcoming.epoch)
            books.upcoming = None

    def _start(self, task: CaptureTask) -> Group:
        books, index = self._books, task.group.index
        stale = books.late.pop(index, {}) | books.inherited.pop(index, {})
        group = books.evicted.pop(index, None) or Group(task, set(), 0, {})
        group.task, group.place, group.stale = task, books.claims, stale
        group.due = {sample for sample in group.due if sample.epoch >= books.epoch}
        group.promise(task.epoch)
        books.groups[index] = group
        books.group_of.update(dict.fromkeys(task.group.feature_ids, group))
        self._use(refs=len(task.group.rows), nbytes=0)
        return group

    def _missing(self) -> list[SampleId]:
        """The samples of the step that the trainer waits for which are not even in flight.

        Not those whose capture has just failed: the trainer is about to hear of that.
        """
        if self._books.waiting is None:
            return []
        held = self._books.group_of
        return [
            sample
            for sample in self._books.waiting.samples
            if (group := held.get(sample.feature_id)) is None
            or (group.failed and sample not in group.due)
        ]

    def _starved(self, sample: SampleId) -> DraftcoreError:
        assert self._books.waiting is not None
        return DraftcoreError(
            f"step {self._books.waiting.index} waits for sample {sample.feature_id!r} of epoch "
            f"{sample.epoch}, and no task is left that would capture it\n"
            "  offer the tasks from this step on: its features were released, or never offered"
        )

    def _too_small(self, step: PlannedStep) -> DraftcoreError:
        held = sum(ref.nbytes for group in self._books.groups.values() for ref in group.refs)
        return DraftcoreError(
            f"the store is full with what step {step.index} needs, {format_size(held)}, and lacks room "
            "for the rest of it\n"
            "  raise max_bytes in the store's URI, or lower train.batch or capture.batch"
        )

    # ------------------------------------------------------------ room in the store

    def _tell(self, task: CaptureTask, tried: int) -> int | None:
        books, group = self._books, self._current(task)
        if group is None:
            return None
        if not self._is_wanted(task.group):
            self._return(group)
            return None
        if tried == books.round:
            books.full.add(task.group.index)
        return books.round

    def _last_resort(self, step: PlannedStep) -> list[Group]:
        """All that is held of a step that finds no room: put anew, it may lie closer together.

        Raises DraftcoreError where this was done before.
        """
        held = [g for g in self._books.groups.values() if g.refs and not g.received]
        if self._books.emptied or not held:
            raise self._too_small(step)
        self._books.emptied = True
        return held

    def _set_aside(self, group: Group) -> tuple[SampleRef, ...]:
        """Let go of a group that will be offered again, but not of its uses. Returns its refs."""
        refs = self._release(group)
        group.outcome, group.claim = None, ""
        self._books.evicted[group.task.group.index] = group
        return refs

    # ------------------------------------------------------------ refs

    def _ref(self, sample: SampleId) -> SampleRef | None:
        """Return a sample's ref, or None. Raises what its capture raised, in the epoch it did."""
        group = self._books.group_of.get(sample.feature_id)
        if group is None:
            return None
        if isinstance(group.outcome, Exception) and sample in group.due:
            raise group.outcome
        if sample.feature_id in group.spoilt:
            raise DraftcoreError(group.spoilt[sample.feature_id])
        return next((ref for ref in group.refs if ref.feature_id == sample.feature_id), None)

    def _end_epochs_before(self, epoch: int) -> dict[int, Group]:
        """Forget uses that never came: those before the step at which a run was resumed."""
        self._books.epoch = epoch
        for group in self._books.groups.values():
            group.due = {sample for sample in group.due if sample.epoch >= epoch}
        return {
            index: group for index, group in self._books.groups.items() if group.outcome is not None
        }

    def _release(self, group: Group) -> tuple[SampleRef, ...]:
        del self._books.groups[group.task.group.index]
        for feature_id in group.task.group.feature_ids:
            del self._books.group_of[feature_id]
        if not group.failed:
            nbytes = sum(ref.nbytes for ref in group.refs)
            self._use(refs=-len(group.task.group.rows), nbytes=-nbytes)
        return (*group.refs, *(ref for ref in group.stale if ref not in group.refs))

    def _keep_stale(self, task: CaptureTask, refs: Sequence[SampleRef]) -> None:
        """Note refs of a void claim, or of a second publication, until they can be freed."""
        books, index = self._books, task.group.index
        group, ours = books.groups.get(index), task.claim.startswith(f"{self.session}.")
        if group is None:
            kept = (books.late if ours else books.inherited).setdefault(index, {})
        else:
            kept = group.stale
        kept |= dict.fromkeys(refs)

    def _stale_of_no_group(self, *, inherited: bool) -> list[SampleRef]:
        """Take the stale refs of groups that are not held, and are not about to be captured."""
        books = self._books
        stale, books.late = books.late, {}
        if inherited:
            stale, books.inherited = stale | books.inherited, {}
        books.leaving |= stale.keys()
        return [ref for refs in stale.values() for ref in refs]

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
