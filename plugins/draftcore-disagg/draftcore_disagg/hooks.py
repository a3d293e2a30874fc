"""The hook of the kind `channel`, which this dist brings."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from draftcore import hookspec
from draftcore_disagg.channel import Channel

NEEDED = {"channel": ("channel",)}


class Specs:
    """Hooks as in `draftcore.contracts.hooks`."""

    @hookspec(firstresult=True)
    def channel(self, name: str, uri: str, secret: bytes) -> Channel:
        """Open the way at `uri` from producers to the trainer's queue. First result.

        `secret` is what both ends of a run know, and nobody else.
        """
