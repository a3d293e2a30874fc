"""The contract of graph backends and graph plugins; who uses them are the runners beside this file.

Two axes are kept apart. A *runner* owns a phase: which shapes there are, what lies in the static
buffers, when a batch may replay, how outputs are cut. A *backend* owns a mechanism: how the work
of one shape is recorded and replayed. A backend never imports a phase, a runner no mechanism.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from draftcore.graphs.parts import DividedRow

# A tensor, None, or a dict, tuple or list of outputs.
Outputs: TypeAlias = Any
# The static buffers of a bucket by name, or a part of their rows.
Batch: TypeAlias = "Mapping[str, Tensor]"


@dataclass(frozen=True, order=True)
class ShapeKey:
    """The bucket that a graph was captured for.

    `rows` are those of the padded batch. `length` is, in prefill, the padded tokens of a row and,
    in decoding, the cache slots that attention covers. `variant` names what else was captured
    apart, such as the features asked for.
    """

    rows: int
    length: int = 1
    variant: str = ""


class GraphBackend(ABC):
    """A graph mechanism. It owns no phase; the base has neither state nor defaults.

    A failure inside `fn` leaves the backend usable: the key is as if it was never captured.
    """

    @abstractmethod
    def capture_session(self) -> AbstractContextManager[None]:
        """Wrap a runner's whole loop over its buckets, the largest first.

        A mechanism that the garbage collector would disturb keeps it out here.
        """

    @abstractmethod
    def capture_one(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
        """Call `fn` twice to warm up, then once more to record it, inside a capture session.

        `fn` reads and writes static buffers only. A key that was captured before is replaced.
        """

    @abstractmethod
    def can_run(self, batch: Batch, key: ShapeKey) -> bool:
        """Say whether this static batch can be replayed under this key."""

    @abstractmethod
    def replay_session(self) -> AbstractContextManager[None]:
        """Wrap one replay, the filling of the static buffers included."""

    @abstractmethod
    def replay(self, key: ShapeKey) -> Outputs:
        """Do what was recorded on what the static buffers hold now.

        The outputs have the type, keys, dtypes and shapes that `fn` returned. They may alias the
        outputs of the next call; a runner's never do.
        """

    @abstractmethod
    def cleanup(self) -> None:
        """Drop graphs, outputs and memory pools; captures may follow again."""


class Work(Protocol):
    """What is done for a bucket, and recorded."""

    def __call__(
        self, batch: Batch, *, ends: DividedRow | None = None, begins: DividedRow | None = None
    ) -> Outputs:
        """Work on these rows, and return outputs [rows, ...], those per token [rows, tokens, ...].

        The batch may be a part of the bucket's rows, and fewer of their tokens, in prefill only:
        elsewhere a part raises DraftcoreError. A row may be divided between two parts: its
        beginning is the last row of the one that it `ends`, its rest the first row of the one
        that it `begins`, which is called second.
        """
        ...


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
