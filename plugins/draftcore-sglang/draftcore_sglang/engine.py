"""Share a running target between all captures of this process that ask for the same.

A run opens a second capture for its held-out samples, and the target is in memory once. With one
device it runs in this process, where sglang's globals allow a single one. With several, each rank
is a process of its own (see `ranks`), so that a rank that dies or hangs cannot take the run along,
and the run's own process groups are not sglang's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict

from torch import Tensor

from draftcore.errors import UsageError
from draftcore_sglang.internals import Limits, Pictures, Runner, Settings
from draftcore_sglang.ranks import Ranks


class Engine:
    """One target with its settings; started on demand, stopped when its last user leaves."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.users = settings, 0
        self.model: Runner | Ranks | None = None
        self._lock = threading.Lock()  # captures of several threads take turns

    @property
    def limits(self) -> Limits:
        assert self.model is not None
        return self.model.limits

    def start(self) -> None:
        self.model = Runner(self.settings) if self.settings.tp == 1 else Ranks(self.settings)

    def forward(
        self, prompts: Sequence[Sequence[int]], layers: Sequence[int], pictures: Pictures
    ) -> dict[str, Tensor]:
        """As `Runner.forward`."""
        assert self.model is not None
        with self._lock:
            return self.model.forward(prompts, layers, pictures)

    def leave(self) -> None:
        """End one use; the last one stops the target and frees its memory."""
        self.users -= 1
        if self.users == 0:
            del _open[self.settings]
            self.stop()

    def stop(self) -> None:
        model, self.model = self.model, None
        if model is not None:
            model.close()


def open_engine(settings: Settings) -> Engine:
    """Return the engine of these settings, for one more user, who calls `leave` at the end.

    Raises UsageError where this process already holds another of one device.
    """
    if settings not in _open:
        for other in _open:
            if settings.tp == other.tp == 1:
                held, asked = asdict(other), asdict(settings)
                differ = [name for name in asked if asked[name] != held[name]]
                raise UsageError(
                    "this process runs a target in sglang already, whose settings are global to it\n"
                    f"  running: { {name: held[name] for name in differ} }\n"
                    f"  asked:   { {name: asked[name] for name in differ} }\n"
                    "  close the other capture first, or capture in processes of their own "
                    "(topology.producers)"
                )
        _open[settings] = Engine(settings)
    _open[settings].users += 1
    return _open[settings]


_open: dict[Settings, Engine] = {}
