"""The hooks of the kinds `channel` and `launcher`, which this dist brings."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import Any

from draftcore import hookspec
from draftcore_disagg.channel import Channel
from draftcore_disagg.launcher import Launcher

NEEDED = {"channel": ("channel",), "launcher": ("launcher",)}


class Specs:
    """Hooks as in `draftcore.contracts.hooks`."""

    @hookspec(firstresult=True)
    def channel(self, name: str, uri: str, secret: bytes, patience: float) -> Channel:
        """Open the way at `uri` from producers to the trainer's queue. First result.

        `secret` is what both ends of a run know, and nobody else. A call raises ChannelAway where no trainer
        answers for `patience` seconds.
        """

    @hookspec(firstresult=True)
    def launcher(self, name: str, options: Any) -> Launcher:
        """Open the launcher `name`, which starts the processes of a run. First result."""
