"""The samples of each step for the ranks of a run, opened for reading ahead of time.

Ranks agree on a step's refs, which rank 0 finds; each opens its own share. While a step is trained
on, the next one is looked for: what is there already is opened by every rank's thread, and what has
to be captured is launched, and stored by rank 0's, where the run overlaps. What ranks do together, and
what lets go of features, stays in the thread that trains.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from draftcore.contracts.algorithm import Sample, SampleId
from draftcore.contracts.channel import PlannedStep
from draftcore.contracts.store import FeatureStore, Handle, SampleRef, StoreAway
from draftcore.errors import DraftcoreError
from draftcore.feed.aside import Aside
from draftcore.feed.producer import TEXT, forget
from draftcore.feed.source import Found, Source
from draftcore.training.ranks import Ranks
from draftcore.uris import format_size

T = TypeVar("T")


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


class Feed:
    """The samples of each step for the ranks of a run. `open_source` is called on rank 0 alone.

    `ahead` says that a step may be opened while the one before is trained on; `overlap` that it may
    be captured then, too, and on which device the target runs.
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
        overlap: torch.device | None = None,
    ) -> None:
        self.ranks, self.store, self.open_source = ranks, store, open_source
        self.durable, self.names = durable, (*names, *TEXT)
        self.finished = False  # said by who trains: the run needs no features any more
        self.overlaps = overlap is not None
        self._aside = Aside(overlap if ranks.rank == 0 else None) if ahead or overlap else None
        self._next: Opening | None = None  # what was there
        self._captured: Future[Found] | None = None  # what was not, on rank 0
        self._closing = False

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
            self.source.stop = lambda: self._closing or stop()
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
        """Look for a step that the next call of `samples` will ask for.

        What is there already begins to be opened; what is not is launched, where the run overlaps.
        """
        if self._aside is None:
            return
        self._next = self._fetch(planned, wait=False)
        if self._next is not None:
            handles = self._aside.begin(self._next.handles).result
            self._next = dataclasses.replace(self._next, handles=handles)
        elif self.overlaps and self.ranks.rank == 0:
            with self._aside.launching():
                self.source.launch(planned)
            store = functools.partial(self.source.fetch, planned, wait=False)
            self._captured = self._aside.begin(store)

    def settle(self) -> None:
        """Wait until nothing is being captured: who calls may use the target, or free features.

        An error of the capture is raised by the step that needs it.
        """
        if self._captured is not None:
            wait([self._captured])

    def beside(self, work: Callable[[], T]) -> T:
        """Do work that captures where this run's captures are made, after those that are begun."""
        if self._aside is None:
            return work()
        self.settle()
        with self._aside.launching():
            return self._aside.finish(work)

    def release(self, step: PlannedStep) -> None:
        """A step is done: a volatile store drops what only it needed; a durable one keeps it."""
        if not self.durable:
            self.ranks.wait()  # until nobody reads any more
        self.ranks.first(lambda: self._release(step))

    def close(self) -> None:
        """Close source and store; what is being captured is waited for, and left."""
        self._closing = True
        self._drop_next()
        if self._aside is not None:
            self._aside.close()
        if "source" in self.__dict__:
            self.source.close(finished=self.finished)
            if self.finished and not self.durable:
                with suppress(StoreAway):  # what it held went with it, and is not needed
                    forget(self.store, self.source.plan.feature_ids)
        self.store.close()

    def _fetch(self, planned: PlannedStep, *, wait: bool = True) -> Opening | None:
        """Return what opens this rank's samples of a step, once all refs are there."""
        find = functools.partial(self._find if wait else self._look, planned)
        found = self.ranks.first(find, pack=_packed, unpack=_unpacked)
        if found is None:
            return None
        step, refs = found
        own = (self.ranks.own(len(refs)) or range(1)) if refs else range(0)
        mine = [refs[at] for at in own]
        return Opening(step, refs, own, lambda: self.store.get_many(mine, names=self.names))

    def _find(self, planned: PlannedStep) -> Found:
        """The refs of a step that is needed now, on rank 0."""
        captured, self._captured = self._captured, None
        if captured is not None:
            found = captured.result()
            if found is not None and found[0].index == planned.index:
                return found
        return self.beside(lambda: self.source.fetch(planned))

    def _look(self, planned: PlannedStep) -> Found:
        """The refs of a step that is not needed yet, on rank 0, if they cost no capture."""
        return self.source.fetch(planned, wait=False, capture=False)

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
        self.settle()  # a capture may find in the store what is about to be freed
        used = self.source.channel.advance(step.index + 1)
        if not self.durable:
            self.store.free(used)


def _packed(found: Found) -> Any:
    if found is None:
        return None
    step, refs = found
    return {"step": dataclasses.asdict(step), "refs": [ref.to_json() for ref in refs]}


def _unpacked(data: Any) -> Found:
    if data is None:
        return None
    samples = tuple(SampleId(**sample) for sample in data["step"]["samples"])
    step = PlannedStep(**{**data["step"], "samples": samples, "rows": tuple(data["step"]["rows"])})
    return step, tuple(map(SampleRef.from_json, data["refs"]))


def _sample(identity: SampleId, tensors: dict[str, torch.Tensor]) -> Sample:
    token_ids_T, loss_mask_T = (tensors.pop(name) for name in TEXT)
    return Sample(identity, token_ids_T, loss_mask_T, tensors)
