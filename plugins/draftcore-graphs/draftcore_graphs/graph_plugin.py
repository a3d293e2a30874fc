"""What sees every recording and replay of a graph: the kind `graph-plugin`, which this dist brings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from draftcore.contracts.runner import Batch, Outputs, ShapeKey


class Work(Protocol):
    """What is done for a bucket, and recorded."""

    def __call__(
        self, batch: Batch, *, ends: Any | None = None, begins: Any | None = None
    ) -> Outputs:
        """Work on these rows, and return outputs [rows, ...], those per token [rows, tokens, ...].

        The batch may be a part of the bucket's rows, and fewer of their tokens, in prefill only:
        elsewhere a part raises DraftcoreError. A row may be divided between two parts: its
        beginning is the last row of the one that it `ends`, its rest the first row of the one
        that it `begins`, which is called second. The runner's dist says how a row is divided.
        """


class GraphPlugin(ABC):
    """A cross-cutting feature, told of each capture and each replay.

    `batch` holds the static buffers by name, padded. `live_B` among them is true for the rows that
    are no padding, whose lengths `lengths_B` says; what else is in rows of padding is the phase's.
    A plugin writes only into buffers that it allocated before capture, and waits for no device.
    """

    @abstractmethod
    def on_capture(self, key: ShapeKey, batch: Batch, work: Work) -> Work:
        """Return what is recorded for the bucket `key`: `work`, or what does it in another way.

        Called before each capture of the bucket. What is returned is called on `batch`, and
        gives the outputs of `work(batch)` within rounding.
        """

    @abstractmethod
    def on_replay(self, key: ShapeKey, batch: Batch) -> None:
        """Called before each replay of `key`, when the batch is filled."""
