"""The hook of the kind `memory`, which this dist brings."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookspec

if TYPE_CHECKING:
    from torch import Tensor

    from draftcore.contracts.run import OpenDraft

NEEDED = {"memory": ("step_memory",)}


class Specs:
    """Hooks as in `draftcore.contracts.hooks`."""

    @hookspec(firstresult=True)
    def step_memory(self, name: str, draft: OpenDraft, masks: Sequence[Tensor]) -> Sequence[int]:
        """Return bytes that a draft takes between steps, and at most in one on rows of these loss masks.

        Raises where the algorithm needs what features hold. First result.
        """
