"""The hook of the kind `engine`, which this dist brings."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import Any

from draftcore import hookspec
from draftcore_eval.engines import Engine, Serving

NEEDED = {"engine": ("engine",)}


class Specs:
    """Hooks as in `draftcore.contracts.hooks`."""

    @hookspec(firstresult=True)
    def engine(self, name: str, serving: Serving, options: Any) -> Engine:
        """Start the engine `name`, or find it at `serving.url`, to serve a draft. First result."""
