"""The contract of graph backends and graph plugins: mechanisms that own no phase.

Shape keys name the bucket a graph was captured for; runners own buffers, padding and buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, order=True)
class ShapeKey:
    """The bucket a graph was captured for: a batch size and, in prefill, a length."""

    batch: int
    length: int = 1


class GraphBackend(Protocol):
    """A graph mechanism; it owns no phase. See the graph runners for padding and buckets."""

    def capture_session(self) -> Any: ...
    def capture_one(self, key: ShapeKey, fn: Any) -> None: ...
    def can_run(self, batch: Any, key: ShapeKey) -> bool: ...
    def replay_session(self) -> Any: ...
    def replay(self, key: ShapeKey, **inputs: Tensor) -> Any: ...
    def cleanup(self) -> None: ...


class GraphPlugin(Protocol):
    """A cross-cutting graph feature: writes only into buffers it allocated before capture."""

    def on_capture(self, key: ShapeKey) -> None: ...
    def on_replay(self, key: ShapeKey, batch: Any) -> None: ...
