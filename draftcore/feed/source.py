"""The samples of each step in plan order, from whatever is behind the channel.

What producers elsewhere send is checked before it is trained on; what does not fit, or cannot be
read, is freed and captured again, with its whole group. A sample that fails to the last attempt is
*given up*: left out of every step from then on, reported, and kept in the checkpoint. The others of
its group are trained on as that attempt brought them. Where a capture itself raises there are none.

A step is needed now, or it is looked for ahead of time. Looking ahead changes nothing that the step
before relies on, and what stands in its way is left to the call that needs the step: it is then met
again, where everybody waits for it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from draftcore.contracts.channel import Channel, PlannedStep
from draftcore.contracts.store import FeatureStore, SampleRef, StoreFull
from draftcore.data.plan import Plan
from draftcore.errors import DraftcoreError
from draftcore.feed.producer import SHORT, Producer

logger = logging.getLogger(__name__)
IDLE = 0.002  # seconds between two looks for features that others capture
Found = tuple[PlannedStep, tuple[SampleRef, ...]] | None


class Source:
    """The refs of each step; without a producer of its own it waits for others'.

    `stop` says that it shall wait no longer.
    """

    def __init__(
        self,
        plan: Plan,
        store: FeatureStore,
        channel: Channel,
        producer: Producer | None,
        *,
        names: Sequence[str],
        dtype: str,
        width: int,
        provenance: str,
    ) -> None:
        self.plan, self.store, self.channel, self.producer = plan, store, channel, producer
        self.names, self.dtype, self.width = frozenset(names), dtype, width
        self.provenance = provenance
        self.given_up: dict[str, str] = {}
        self.stop: Callable[[], bool] = lambda: False
        self._warned = False  # that there is too little room for what is captured ahead

    def start(self, step: int) -> None:
        """Ask for the groups of each epoch anew; what the store holds is not captured again."""
        self.channel.offer(self.plan.captures(step))

    def launch(self, planned: PlannedStep) -> None:
        """Launch captures that a step lacks, for `fetch` to store; nothing is waited for.

        No more than a step has samples, as they lie on the device until they are stored. The rest, and
        what stands in the way, a first capture among it, is left to the call that needs the step.
        """
        producer = self.producer
        if producer is None or not (producer.begun and producer.is_local):
            return
        ids = {sample.feature_id for sample in self._remaining(planned).samples}
        try:
            lacking, room = ids - self.store.lookup(tuple(ids)).keys(), len(planned.rows)
            while lacking and room > 0 and not self.stop() and (task := producer.launch()):
                lacking -= set(task.group.feature_ids)
                room -= len(task.group.rows)
        except torch.OutOfMemoryError as error:
            self._warn_of_room(error)
        except DraftcoreError:
            pass

    def fetch(self, planned: PlannedStep, *, wait: bool = True, capture: bool = True) -> Found:
        """Return a step without the samples that were given up, and its refs; None when stopped.

        Without `wait` it looks ahead: it does not wait for others, frees nothing, meets no error of
        theirs, captures nothing here that was not launched and gives way where there is no room. It
        returns None then, and the next call does all that.
        """
        while True:
            step = self._remaining(planned)
            try:
                refs = self.channel.receive(step)
            except DraftcoreError:
                if self._give_up(step):
                    continue
                if wait or self.producer:
                    raise
                return None
            if refs is None:
                if self.stop() or not self._more(step, wait, capture):
                    return None
                continue
            pairs = zip(step.rows, refs, strict=True)
            wrong = {ref: why for row, ref in pairs if (why := self._misfit(row, ref))}
            if not wrong:
                return step, refs
            if not wait:
                return None
            self.reject(wrong)

    def reject(self, wrong: Mapping[SampleRef, str]) -> None:
        """Free refs that cannot be trained on, by reason, and have their groups captured again."""
        self.store.free(self.channel.reject(wrong))

    def unreadable(self, refs: Sequence[SampleRef], error: DraftcoreError) -> None:
        """Some rank could not read a step's features: have what is lost captured again.

        Raises the error in a colocated run, where the user is there to look.
        """
        if self.producer is not None:
            raise error
        lost = [ref for ref in refs if not self._readable(ref)]
        logger.warning("features are captured again: %s", error)
        self.reject(dict.fromkeys(lost or refs, str(error)))

    def close(self, *, finished: bool) -> None:
        if self.producer is not None:
            self.producer.close()
        self.channel.close("finished" if finished else "failed")

    def _more(self, step: PlannedStep, wait: bool, capture: bool) -> bool:
        """Bring some of the step's samples nearer; False where that is left to a later call."""
        if self.producer is not None:
            return self._produce(self.producer, step, wait, capture)
        if not wait:
            return False
        time.sleep(IDLE)
        if spare := self.channel.evict(step, self.plan.captures(step.index)):
            self.store.free(spare)
            self._warn(
                "the store is full: features that are needed later are dropped and captured again\n"
                "  raise max_bytes in the store's URI; in a new run, train.window may be lower"
            )
        return True

    def _produce(self, producer: Producer, step: PlannedStep, wait: bool, capture: bool) -> bool:
        elsewhere = capture and producer.begun and not producer.is_local
        if not (wait or elsewhere or producer.has_next):
            return False
        try:
            done = producer.run_once() is not None
        except (StoreFull, torch.OutOfMemoryError) as error:
            if wait:
                raise
            self._warn_of_room(error)
            return False
        if wait and not done:
            raise DraftcoreError(f"step {step.index} waits for samples that nobody captures")
        return done

    def _warn_of_room(self, error: Exception) -> None:
        self._warn(
            "there is no room for the next step's features beside this one, so they are made after it\n"
            f"  {str(error).partition(chr(10))[0]}\n"
            "  set train.overlap=false to spare the attempt, or lower capture.batch"
        )

    def _warn(self, text: str) -> None:
        """Say once what the run does about too little room."""
        if not self._warned:
            self._warned = True
            logger.warning(text)

    def _remaining(self, step: PlannedStep) -> PlannedStep:
        if not any(sample.feature_id in self.given_up for sample in step.samples):
            return step
        pairs = zip(step.samples, step.rows, strict=True)
        kept = [(s, row) for s, row in pairs if s.feature_id not in self.given_up]
        return dataclasses.replace(
            step, samples=tuple(s for s, _ in kept), rows=tuple(row for _, row in kept)
        )

    def _give_up(self, step: PlannedStep) -> bool:
        """Note samples whose last attempt failed; False where that is not what is wrong."""
        if self.producer is not None:
            return False
        failed = self.channel.given_up
        lost = {s.feature_id: failed[s.feature_id] for s in step.samples if s.feature_id in failed}
        for feature_id, reason in lost.items():
            logger.warning("sample %s is given up: %s", feature_id, reason)
        self.given_up |= lost
        return bool(lost)

    def _misfit(self, row: int, ref: SampleRef) -> str:
        """Say what is wrong with a ref from elsewhere; '' for one that fits."""
        if ref.provenance != self.provenance:
            return (
                f"sample {ref.feature_id} was captured as {ref.provenance}, not {self.provenance}"
            )
        length, lacking = self.plan.length(row), self.names - {spec.name for spec in ref.tensors}
        if lacking:
            return f"sample {ref.feature_id} lacks {', '.join(sorted(lacking))}"
        short = [spec.name for spec in ref.tensors if spec.shape[:1] != (length,)]
        if short or ref.tokens != length:
            return (
                f"sample {ref.feature_id} has not {length} rows of {', '.join(short) or 'tokens'}\n"
                f"  {SHORT}"
            )
        form = (length, self.width), self.dtype
        for spec in ref.tensors:
            if spec.name in self.names and (spec.shape, spec.dtype) != form:
                return (
                    f"sample {ref.feature_id} has {spec.name} of shape {list(spec.shape)} and "
                    f"{spec.dtype}, not of {list(form[0])} and {self.dtype}"
                )
        return ""

    def _readable(self, ref: SampleRef) -> bool:
        try:
            self.store.get(ref).close()
        except DraftcoreError:
            return False
        return True
