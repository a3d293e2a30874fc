"""From a capture task to stored samples: what the store does not hold, the target is run for.

What a capture returns is whole or refused here, before any store sees it. A task that was claimed
is kept until it is published, and what was captured for it until it is stored: a store that was
full is asked again for the same, and the target is not run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from draftcore.channels import Channel
from draftcore.errors import DraftcoreError
from draftcore.records import (
    Capture,
    CaptureInput,
    CaptureTask,
    FeatureStore,
    SampleRef,
    StoreItem,
    StoringCapture,
)
from draftcore.stores import StoreAway, StoreError

SHORT = "a short capture comes from chunked prefill or a prefix cache"
TEXT = ("token_ids", "loss_mask")  # stored beside the features, so that a store is all one needs

Put = Callable[[], tuple[SampleRef, ...]]


class Tokens(Protocol):
    """What a producer needs of a dataset."""

    def tokens(self, row: int) -> NDArray[np.int64]: ...
    def loss_mask(self, row: int) -> NDArray[np.bool_]: ...


class Producer:
    """Turns capture tasks into stored samples. `open_capture` is called at the first real capture.

    `begun` says that one was made: the target is loaded, checked and, where it is run through
    graphs, recorded, which changes what is the process's own and so is no work to do beside other.
    """

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
        self.begun = False
        self._claimed: CaptureTask | None = None  # not published yet
        self._unstored: tuple[CaptureTask, Put] | None = None

    def run_once(self) -> CaptureTask | None:
        """Claim one task and publish its samples; None when there is nothing to claim.

        Where it raises, the next call goes on with the same task.
        """
        task = self._next()
        if task is not None:
            self.channel.publish(task, self.refs(task))
            self._claimed = None
        return task

    def holds_next(self) -> bool:
        """Say whether the next task needs no capture: the store holds its samples."""
        task = self._next()
        return task is not None and self.held(task) is not None

    def refs(self, task: CaptureTask) -> tuple[SampleRef, ...]:
        """The refs of a task's samples: those that the store holds, or captured ones."""
        if self._unstored is None or self._unstored[0] != task:
            if (held := self.held(task)) is not None:
                return held
            self._unstored = task, self.captured(task)
        refs = self._unstored[1]()
        self._unstored, self.begun = None, True
        return refs

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

    def captured(self, task: CaptureTask) -> Put:
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

    def _next(self) -> CaptureTask | None:
        if self._claimed is None:
            self._claimed = self.channel.claim("local")
        return self._claimed


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
