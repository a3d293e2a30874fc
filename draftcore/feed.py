"""From the plan to samples with features: the one path that every topology shares.

A `Producer` satisfies capture tasks: from what a durable store already holds (an offline run is
one in which it holds everything), else by running the target. A `Feed` asks the channel for the
samples of a step and, in a colocated run, pumps the producer until they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from draftcore.errors import DraftcoreError
from draftcore.plan import Plan
from draftcore.records import (
    Capture,
    CaptureInput,
    CaptureTask,
    Channel,
    FeatureStore,
    PlannedStep,
    Sample,
    SampleId,
    SampleRef,
    StoreItem,
)

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


class Feed:
    """The samples of each step in plan order, from whatever is behind channel and store."""

    def __init__(
        self,
        plan: Plan,
        store: FeatureStore,
        channel: Channel,
        producer: Producer,
        *,
        names: Sequence[str],
        durable: bool,
    ) -> None:
        self.plan, self.store, self.channel = plan, store, channel
        self.producer, self.durable = producer, durable
        self.names = (*names, *TEXT)

    def start(self, step: int) -> None:
        """Begin, or begin again, at a step: nothing before it is captured or read.

        Each epoch asks for its groups anew; what a durable store holds is then not captured again.
        """
        self.channel.offer(self.plan.captures(step))

    @contextmanager
    def samples(self, step: PlannedStep) -> Iterator[Sequence[Sample]]:
        """Open the samples of a step for reading; they are valid inside the `with` block."""
        while (refs := self.channel.receive(step)) is None:
            if self.producer.run_once() is None:
                raise DraftcoreError(f"step {step.index} waits for samples that nobody captures")
        with ExitStack() as stack:
            handles = [
                stack.enter_context(handle)
                for handle in self.store.get_many(refs, names=self.names)
            ]
            yield [
                _sample(identity, dict(handle.tensors))
                for identity, handle in zip(step.samples, handles, strict=True)
            ]

    def release(self, step: PlannedStep) -> None:
        """A step is done: a volatile store drops what only it needed; a durable one keeps it."""
        used = self.channel.advance(step.index + 1)
        if not self.durable:
            self.store.free(used)

    def close(self) -> None:
        self.producer.close()
        self.channel.close()
        self.store.close()


def _sample(identity: SampleId, tensors: dict[str, torch.Tensor]) -> Sample:
    token_ids_T, loss_mask_T = (tensors.pop(name) for name in TEXT)
    return Sample(identity, token_ids_T, loss_mask_T, tensors)
