"""Who runs target and draft in a phase, and through which graph mechanism.

Two axes are kept apart. A *runner* owns a phase (prefill is the target's forward in capture, decode
the draft and verify rounds): which shapes there are, what lies in static buffers, when a batch may
replay. A *graph backend* owns a mechanism: how the work of one shape is recorded and replayed. A
backend never imports a phase, a runner no mechanism. Without a plugin both phases run eagerly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

    from draftcore.contracts.algorithm import Drafter
    from draftcore.contracts.offers import Bound, Kind
    from draftcore.contracts.target import PrefillRunner, TargetModel, TargetSpec

PhaseName = Literal["prefill", "decode"]

# ---------------------------------------------------------------- runners


@dataclass(frozen=True)
class RunnerContext:
    """What a runner is told of the run, before the target is loaded.

    `rows` and `longest` bound the batches of the phase: `longest` counts the tokens of a row in
    prefill and the positions that are read and decoded in decode. `capture` names the run's capture.
    `bind` reaches another offer by kind, name and its options; `offered` maps the usable offers of a
    kind to their capabilities.
    """

    phase: PhaseName
    rows: int
    longest: int
    temperature: float
    capture: str
    bind: Callable[..., Bound]
    offered: Callable[[Kind], Mapping[str, frozenset[str]]]


class Runner(Protocol):
    """Opens what runs the target, or target and draft, in one phase."""

    def check(self, target: TargetSpec) -> None:
        """Raise UsageError for what cannot work with this target, before its weights are read."""

    def prefill(self, model: TargetModel) -> PrefillRunner:
        """Return what runs the target for capture: one per model, for all captures of the run."""

    def decode(self, model: TargetModel, drafter: Drafter, module: nn.Module) -> Any:
        """Return what decodes with this draft, whose weights are those of `module`.

        Who evaluates says what that is.
        """

    def report(self) -> Iterable[str]:
        """Yield a line for each thing that people should know of what was run, once it was."""


# ---------------------------------------------------------------- graphs

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
