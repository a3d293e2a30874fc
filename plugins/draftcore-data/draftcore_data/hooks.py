"""The hooks of the kinds `source` and `images`, which this dist brings."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING

from draftcore import hookspec
from draftcore_data.source import Source

if TYPE_CHECKING:
    from draftcore.contracts.capture import ImageProcessor
    from draftcore.contracts.target import TargetSpec

NEEDED = {"source": ("source",), "images": ("image_processor",)}


class Specs:
    """Hooks as in `draftcore.contracts.hooks`."""

    @hookspec(firstresult=True)
    def source(self, name: str, uri: str) -> Source:
        """Open the training data at `uri`, whose scheme is `name`. First result."""

    @hookspec(firstresult=True)
    def image_processor(self, name: str, target: TargetSpec) -> ImageProcessor:
        """Open what reads the images of rows for a target that sees. First result."""
