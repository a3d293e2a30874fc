"""From a capture task to stored samples: what the store does not hold, the target is run for.

What a capture returns is whole and finite or refused here, before any store sees it. A task that was
claimed is kept until it is published, and what was captured for it until it is stored: a store that
was full is asked again for the same, and the target is not run twice.

A capture launches what the target computes and waits for no device; its check and its put do. So a
thread that trains may `launch` for tasks to come, and another one `run_once` through them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftcore.contracts.capture import Capture, CapturedGroup, CaptureInput, StoringCapture
from draftcore.contracts.channel import CaptureTask, Channel
from draftcore.contracts.store import FeatureStore, SampleRef, StoreAway, StoreError, StoreItem
from draftcore.errors import DraftcoreError
from draftcore.tensors import require_finite

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
        self._claimed = deque[CaptureTask]()  # not published yet
        self._puts: dict[CaptureTask, Put] = {}  # what brings the refs of those that were launched

    def run_once(self) -> CaptureTask | None:
        """Claim one task and publish its samples; None when there is nothing to claim.

        Where it raises, the next call goes on with the same task.
        """
        task = self._next()
        if task is not None:
            self.channel.publish(task, self.refs(task))
            self._claimed.popleft()
        return task

    @property
    def is_local(self) -> bool:
        """Whether the target is run in this process."""
        return not isinstance(self.capture, StoringCapture)

    @property
    def has_next(self) -> bool:
        """Whether the next task needs no capture: it was launched, or the store holds its samples."""
        task = self._next()
        return task is not None and (task in self._puts or self.held(task) is not None)

    def launch(self) -> CaptureTask | None:
        """Launch what one more task needs; None when there is nothing to claim."""
        task = next((task for task in self._claimed if task not in self._puts), None)
        task = task or self._claim()
        if task is not None:
            self._puts[task] = self._begin(task)
        return task

    def refs(self, task: CaptureTask) -> tuple[SampleRef, ...]:
        """The refs of a task's samples: those that the store holds, or captured ones."""
        if task not in self._puts:
            self._puts[task] = self._begin(task)
        refs = self._puts[task]()
        del self._puts[task]
        self.begun = self.capture is not None
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
        """Launch the group's capture; what is returned waits for it, checks it and puts it.

        That may be called again. Where the capture reaches the store from where it runs, it does all.
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
        return lambda: self._put(captured, text)

    def _put(
        self, captured: CapturedGroup, text: Sequence[dict[str, Tensor]]
    ) -> tuple[SampleRef, ...]:
        items = [
            StoreItem(feature_id, {**features, **own}, len(own["token_ids"]), self.provenance)
            for feature_id, features, own in zip(
                captured.group.feature_ids, captured.features, text, strict=True
            )
        ]
        for item in items:
            require_whole(item)
        require_finite(captured)
        return self.store.put_many(items)

    def _begin(self, task: CaptureTask) -> Put:
        held = self.held(task)
        return self.captured(task) if held is None else lambda: held

    def _next(self) -> CaptureTask | None:
        return self._claimed[0] if self._claimed else self._claim()

    def _claim(self) -> CaptureTask | None:
        task = self.channel.claim("local")
        if task is not None:
            self._claimed.append(task)
        return task


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
