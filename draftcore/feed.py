"""From the plan to samples with features: the one path that every topology shares.

A `Producer` satisfies capture tasks: from what a durable store already holds (an offline run is
one in which it holds everything), else by running the target. A `Source` asks the channel for the
samples of a step and, in a colocated run, pumps the producer until they are there. A `Feed` opens
them for reading: on several ranks each has one and opens its own share, and rank 0 alone a source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
    PlannedStep,
    Sample,
    SampleId,
    SampleRef,
    StoreItem,
)
from draftcore.training.ranks import Ranks

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
            self.channel.publish(task, self._held(task) or self._captured(task))
        return task

    def close(self) -> None:
        if self.capture is not None:
            self.capture.close()

    def _held(self, task: CaptureTask) -> tuple[SampleRef, ...] | None:
        """The group's refs where the store has every member, captured the same way."""
        ids = task.group.feature_ids
        held = self.store.lookup(ids)
        refs = tuple(held[i] for i in ids if i in held and held[i].provenance == self.provenance)
        return refs if len(refs) == len(ids) else None

    def _captured(self, task: CaptureTask) -> tuple[SampleRef, ...]:
        if self.capture is None:
            self.capture = self.open_capture()
        rows = task.group.rows
        group = CaptureInput(task.group, tuple(self.tokens.tokens(row).tolist() for row in rows))
        (captured,) = self.capture.features([group])
        items = []
        for row, feature_id, features in zip(
            rows, task.group.feature_ids, captured.features, strict=True
        ):
            self._require_whole(feature_id, len(self.tokens.tokens(row)), features)
            text = {
                "token_ids": torch.from_numpy(self.tokens.tokens(row)),
                "loss_mask": torch.from_numpy(self.tokens.loss_mask(row)),
            }
            items.append(
                StoreItem(feature_id, {**features, **text}, len(text["token_ids"]), self.provenance)
            )
        return self.store.put_many(items)

    def _require_whole(
        self, feature_id: str, length: int, features: Mapping[str, torch.Tensor]
    ) -> None:
        for name, value in features.items():
            if value.shape[0] != length:
                raise DraftcoreError(
                    f"capture returned {value.shape[0]} rows of {name!r} for the {length} tokens of "
                    f"sample {feature_id}\n  a short capture comes from chunked prefill or a prefix cache"
                )


class Source:
    """The refs of each step in plan order, from whatever is behind the channel."""

    def __init__(self, plan: Plan, channel: Channel, producer: Producer) -> None:
        self.plan, self.channel, self.producer = plan, channel, producer

    def start(self, step: int) -> None:
        """Ask for the groups of each epoch anew; what a durable store holds is not captured again."""
        self.channel.offer(self.plan.captures(step))

    def refs(self, step: PlannedStep) -> tuple[SampleRef, ...]:
        while (refs := self.channel.receive(step)) is None:
            if self.producer.run_once() is None:
                raise DraftcoreError(f"step {step.index} waits for samples that nobody captures")
        return refs

    def close(self) -> None:
        self.producer.close()
        self.channel.close()


class Feed:
    """The samples of each step for the ranks of a run. `open_source` is called on rank 0 alone."""

    def __init__(
        self,
        ranks: Ranks,
        store: FeatureStore,
        open_source: Callable[[], Source],
        *,
        names: Sequence[str],
        durable: bool,
    ) -> None:
        self.ranks, self.store, self.open_source = ranks, store, open_source
        self.durable, self.names = durable, (*names, *TEXT)

    @functools.cached_property
    def source(self) -> Source:
        return self.open_source()

    def start(self, step: int) -> None:
        """Begin, or begin again, at a step: nothing before it is captured or read."""
        self.ranks.first(lambda: self.source.start(step))

    @contextmanager
    def samples(self, step: PlannedStep) -> Iterator[Mapping[int, Sample]]:
        """Open this rank's samples of a step, by position; they are valid inside the `with` block.

        A rank that has none gets the first one, to keep step with.
        """
        refs = self.ranks.first(lambda: self.source.refs(step), pack=_packed, unpack=_unpacked)
        own = self.ranks.own(len(refs)) or range(1)
        with ExitStack() as stack:
            with self.ranks.together():
                handles = self.store.get_many([refs[at] for at in own], names=self.names)
                for handle in handles:
                    stack.enter_context(handle)
            yield {
                at: _sample(step.samples[at], dict(handle.tensors))
                for at, handle in zip(own, handles, strict=True)
            }

    def release(self, step: PlannedStep) -> None:
        """A step is done: a volatile store drops what only it needed; a durable one keeps it."""
        if not self.durable:
            self.ranks.wait()  # until nobody reads any more
        self.ranks.first(lambda: self._release(step))

    def _release(self, step: PlannedStep) -> None:
        used = self.source.channel.advance(step.index + 1)
        if not self.durable:
            self.store.free(used)

    def close(self) -> None:
        if "source" in self.__dict__:
            self.source.close()
        self.store.close()


def _packed(refs: Sequence[SampleRef]) -> list[dict[str, Any]]:
    return [ref.to_json() for ref in refs]


def _unpacked(data: Sequence[Mapping[str, Any]]) -> tuple[SampleRef, ...]:
    return tuple(map(SampleRef.from_json, data))


def _sample(identity: SampleId, tensors: dict[str, torch.Tensor]) -> Sample:
    token_ids_T, loss_mask_T = (tensors.pop(name) for name in TEXT)
    return Sample(identity, token_ids_T, loss_mask_T, tensors)
