"""From the plan to samples with features: the one path that every topology shares.

A `Producer` satisfies capture tasks: from what a durable store already holds (an offline run is
one in which it holds everything), else by running the target. A `Source` asks the channel for the
samples of a step: in a colocated run it pumps the producer until they are there, else it waits for
producers elsewhere. A `Feed` opens them for reading: on several ranks each has one and opens its own
share, and rank 0 alone a source. While a step is trained on, a thread of its own opens the next.

What producers elsewhere send is checked before it is trained on; what does not fit, or cannot be
read, is freed and captured again, with its whole group. A sample that fails to the last attempt is
*given up*: left out of every step from then on, reported, and kept in the checkpoint. The others of
its group are trained on as that attempt brought them. Where a capture itself raises there are none.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from draftcore.channels import Channel
from draftcore.errors import DraftcoreError
from draftcore.plan import Plan
from draftcore.records import (
    Capture,
    CaptureInput,
    CaptureTask,
    FeatureStore,
    Handle,
    PlannedStep,
    Sample,
    SampleId,
    SampleRef,
    StoreItem,
    StoringCapture,
)
from draftcore.stores import StoreAway, StoreError
from draftcore.training.ranks import Ranks
from draftcore.uris import format_size

logger = logging.getLogger(__name__)
IDLE = 0.002  # seconds between two looks for features that others capture
SHORT = "a short capture comes from chunked prefill or a prefix cache"
TEXT = ("token_ids", "loss_mask")  # stored beside the features, so that a store is all one needs


class Tokens(Protocol):
    """What a producer needs of a dataset."""

    def tokens(self, row: int) -> NDArray[np.int64]: ...
    def loss_mask(self, row: int) -> NDArray[np.bool_]: ...


class Producer:
    """Turns capture tasks into stored samples. `open_capture` is called at the first real capture."""

    def __init__(
        self,
        open_capture: Callable[[], Capture],
        tokens: Tokens,
        store: FeatureStore,
        channel: Channel,
        provenance: str,
    ) -> None:
        self.open_capture, self.tokens = open_capture, tokens
        self.store, self.channel, self.provenance = store, channel, provenance
        self.capture: Capture | None = None

    def run_once(self) -> CaptureTask | None:
        """Claim one task and publish its samples; None when there is nothing to claim."""
        task = self.channel.claim("local")
        if task is not None:
            self.channel.publish(task, self.refs(task))
        return task

    def refs(self, task: CaptureTask) -> tuple[SampleRef, ...]:
        """The refs of a task's samples: those that the store holds, or captured ones."""
        if (held := self.held(task)) is not None:
            return held
        return self.captured(task)()

    def close(self) -> None:
        if self.capture is not None:
            self.capture.close()

    def held(self, task: CaptureTask) -> tuple[SampleRef, ...] | None:
        """The group's refs where the store has every member, captured the same way."""
        ids = task.group.feature_ids
        try:
            held = self.store.lookup(ids)
        except StoreError:  # torn or altered: as if it was not there
            forget(self.store, ids)
            return None
        refs = tuple(held[i] for i in ids if i in held and held[i].provenance == self.provenance)
        return refs if len(refs) == len(ids) else None

    def captured(self, task: CaptureTask) -> Callable[[], tuple[SampleRef, ...]]:
        """Capture the group; what is returned puts it into the store, and may be called again.

        Where the capture reaches the store from where it runs, the call does both.
        """
        if self.capture is None:
            self.capture = self.open_capture()
        rows = task.group.rows
        group = CaptureInput(task.group, tuple(self.tokens.tokens(row).tolist() for row in rows))
        text = [
            {
                "token_ids": torch.from_numpy(self.tokens.tokens(row)),
                "loss_mask": torch.from_numpy(self.tokens.loss_mask(row)),
            }
            for row in rows
        ]
        if isinstance(self.capture, StoringCapture) and self.capture.reaches(self.store):
            deliver = self.capture.deliver
            return lambda: deliver(group, text, self.provenance, self.store)
        (captured,) = self.capture.features([group])
        items = [
            StoreItem(feature_id, {**features, **own}, len(own["token_ids"]), self.provenance)
            for feature_id, features, own in zip(
                task.group.feature_ids, captured.features, text, strict=True
            )
        ]
        for item in items:
            require_whole(item)
        return lambda: self.store.put_many(items)


@dataclass(frozen=True)
class Opening:
    """A step that is being opened: its refs, and this rank's positions with what opens them."""

    step: PlannedStep
    refs: tuple[SampleRef, ...]
    own: range
    handles: Callable[[], Sequence[Handle]]


@dataclass(frozen=True)
class Fetched:
    """A step as it can be trained, without samples that were given up, and this rank's samples."""

    step: PlannedStep
    samples: Mapping[int, Sample]


class Source:
    """The refs of each step in plan order, from whatever is behind the channel.

    Without a producer of its own it waits for others'. `stop` says that it shall wait no longer.
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
        self._warned = False  # that the store is too small for what is captured ahead

    def start(self, step: int) -> None:
        """Ask for the groups of each epoch anew; what the store holds is not captured again."""
        self.channel.offer(self.plan.captures(step))

    def fetch(
        self, planned: PlannedStep, *, wait: bool = True
    ) -> tuple[PlannedStep, tuple[SampleRef, ...]] | None:
        """Return a step without the samples that were given up, and its refs; None when stopped.

        Without `wait` it does not wait for others, frees nothing and meets no error of theirs: it
        returns None, and the next call does all that.
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
                if not self._wait(step, wait):
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

    def _wait(self, step: PlannedStep, wait: bool) -> bool:
        if self.stop() or not (wait or self.producer):
            return False
        if self.producer is None:
            time.sleep(IDLE)
            if spare := self.channel.evict(step, self.plan.captures(step.index)):
                self.store.free(spare)
                self._warn_of_full_store()
        elif self.producer.run_once() is None:
            raise DraftcoreError(f"step {step.index} waits for samples that nobody captures")
        return True

    def _warn_of_full_store(self) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "the store is full: features that are needed later are dropped and captured again\n"
            "  raise max_bytes in the store's URI; in a new run, train.window may be lower"
        )

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


class Feed:
    """The samples of each step for the ranks of a run. `open_source` is called on rank 0 alone.

    `ahead` says that a step may be fetched while the one before is trained on.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: FeatureStore,
        open_source: Callable[[], Source],
        *,
        names: Sequence[str],
        durable: bool,
        ahead: bool,
    ) -> None:
        self.ranks, self.store, self.open_source = ranks, store, open_source
        self.durable, self.names = durable, (*names, *TEXT)
        self.finished = False  # said by who trains: the run needs no features any more
        self._next: Opening | None = None
        self._worker = ThreadPoolExecutor(1, "feed") if ahead else None

    @functools.cached_property
    def source(self) -> Source:
        return self.open_source()

    def start(self, step: int, stop: Callable[[], bool], given_up: Mapping[str, str]) -> None:
        """Begin, or begin again, at a step: nothing before it is captured or read.

        `stop` ends a wait for features; samples in `given_up` are left out.
        """

        def begin() -> None:
            if not self.durable:  # what a killed run left has a place in nobody's books
                forget(self.store, self.source.plan.feature_ids)
            self.source.stop = stop
            self.source.given_up |= given_up
            self.source.start(step)

        self.ranks.first(begin)

    @property
    def given_up(self) -> Mapping[str, str]:
        """The samples that are left out, with the reason; known on rank 0."""
        return self.source.given_up if "source" in self.__dict__ else {}

    def capturing(self) -> str:
        """Say how capture elsewhere stands, on rank 0; nothing where a step captures for itself."""
        source = self.__dict__.get("source")
        if source is None or source.producer is not None:
            return ""
        now = source.channel.standing()
        held = f"{now.refs} samples, {format_size(now.nbytes)}"
        return f"producers {now.producers}, captured {now.captured}, held {held}"

    @contextmanager
    def samples(self, planned: PlannedStep) -> Iterator[Fetched | None]:
        """Open this rank's samples of a step by position; they are valid inside the `with` block.

        A rank that has none gets the first one, to keep step with. None when asked to stop.
        """
        with ExitStack() as stack:
            while True:
                opening = self._take(planned) or self._fetch(planned)
                if opening is None:
                    yield None
                    return
                try:
                    with self.ranks.together():
                        handles = [stack.enter_context(handle) for handle in opening.handles()]
                    break
                except DraftcoreError as error:
                    lost = error
                    stack.close()
                self.ranks.wait()  # until nobody holds what may be freed now
                self.ranks.first(functools.partial(self._unreadable, opening.refs, lost))
            step = opening.step
            yield Fetched(
                step,
                {
                    at: _sample(step.samples[at], dict(handle.tensors))
                    for at, handle in zip(opening.own, handles, strict=True)
                },
            )

    def prefetch(self, planned: PlannedStep) -> None:
        """Begin to open a step whose features are there already, for the next call of `samples`."""
        if self._worker is None:
            return
        self._next = self._fetch(planned, wait=False)
        if self._next is not None:
            handles = self._worker.submit(self._next.handles).result
            self._next = dataclasses.replace(self._next, handles=handles)

    def release(self, step: PlannedStep) -> None:
        """A step is done: a volatile store drops what only it needed; a durable one keeps it."""
        if not self.durable:
            self.ranks.wait()  # until nobody reads any more
        self.ranks.first(lambda: self._release(step))

    def close(self) -> None:
        self._drop_next()
        if self._worker is not None:
            self._worker.shutdown()
        if "source" in self.__dict__:
            self.source.close(finished=self.finished)
            if self.finished and not self.durable:
                with suppress(StoreAway):  # what it held went with it, and is not needed
                    forget(self.store, self.source.plan.feature_ids)
        self.store.close()

    def _fetch(self, planned: PlannedStep, *, wait: bool = True) -> Opening | None:
        """Return what opens this rank's samples of a step, once all refs are there."""
        found = self.ranks.first(
            lambda: self.source.fetch(planned, wait=wait), pack=_packed, unpack=_unpacked
        )
        if found is None:
            return None
        step, refs = found
        own = (self.ranks.own(len(refs)) or range(1)) if refs else range(0)
        mine = [refs[at] for at in own]
        return Opening(step, refs, own, lambda: self.store.get_many(mine, names=self.names))

    def _take(self, planned: PlannedStep) -> Opening | None:
        """Return the prefetched step if it is this one; it is given once."""
        if self._next is None or self._next.step.index != planned.index:
            self._drop_next()
            return None
        opening, self._next = self._next, None
        return opening

    def _drop_next(self) -> None:
        opening, self._next = self._next, None
        if opening is not None:
            with suppress(DraftcoreError):
                for handle in opening.handles():
                    handle.close()

    def _unreadable(self, refs: Sequence[SampleRef], error: DraftcoreError) -> None:
        self.source.unreadable(refs, error)

    def _release(self, step: PlannedStep) -> None:
        used = self.source.channel.advance(step.index + 1)
        if not self.durable:
            self.store.free(used)


def require_whole(item: StoreItem) -> None:
    """Raise DraftcoreError where a tensor has not one row per token."""
    for name, value in item.tensors.items():
        if value.shape[0] != item.tokens:
            raise DraftcoreError(
                f"capture returned {value.shape[0]} rows of {name!r} for the {item.tokens} tokens of "
                f"sample {item.feature_id}\n  {SHORT}"
            )


def forget(store: FeatureStore, feature_ids: Sequence[str]) -> None:
    """Free all that a store holds of these samples, readable or not."""
    try:
        store.free(store.lookup(feature_ids).values())
    except StoreAway:
        raise
    except StoreError:
        for feature_id in feature_ids:
            store.abort(feature_id)


def _packed(found: tuple[PlannedStep, tuple[SampleRef, ...]] | None) -> Any:
    if found is None:
        return None
    step, refs = found
    return {"step": dataclasses.asdict(step), "refs": [ref.to_json() for ref in refs]}


def _unpacked(data: Any) -> tuple[PlannedStep, tuple[SampleRef, ...]] | None:
    if data is None:
        return None
    samples = tuple(SampleId(**sample) for sample in data["step"]["samples"])
    step = PlannedStep(**{**data["step"], "samples": samples, "rows": tuple(data["step"]["rows"])})
    return step, tuple(map(SampleRef.from_json, data["refs"]))


def _sample(identity: SampleId, tensors: dict[str, torch.Tensor]) -> Sample:
    token_ids_T, loss_mask_T = (tensors.pop(name) for name in TEXT)
    return Sample(identity, token_ids_T, loss_mask_T, tensors)
