"""The hook of the kind `prompts`, which this dist brings."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Sequence

from draftcore import hookspec
from draftcore_bench.prompts import Prompt

NEEDED = {"prompts": ("prompts",)}


class Specs:
    """Hooks as in `draftcore.contracts.hooks`."""

    @hookspec(firstresult=True)
    def prompts(self, name: str, uri: str) -> Sequence[Prompt]:
        """Read the prompt set `name`; `uri` is its name, or NAME:PLACE. First result."""
