"""Where training data comes from, beside the files that the core reads itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class Source(Protocol):
    """The rows of one place, as often as they are asked for, in the same order."""

    def key(self) -> str:
        """Return what changes when a row does: rendered rows are reused while it is the same."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield each row with its place, for messages: a mapping, or a line of JSON as bytes."""
