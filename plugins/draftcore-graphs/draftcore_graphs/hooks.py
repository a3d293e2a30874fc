"""The hook of the kind `graph-plugin`, which this dist brings."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import Any

from draftcore import hookspec
from draftcore_graphs.graph_plugin import GraphPlugin

NEEDED = {"graph-plugin": ("graph_plugin",)}


class Specs:
    """Hooks as in `draftcore.contracts.hooks`."""

    @hookspec(firstresult=True)
    def graph_plugin(self, name: str, options: Any) -> GraphPlugin:
        """Open the cross-cutting graph feature `name`. First result."""
