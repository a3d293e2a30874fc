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
from typing import Protocol

from torch import Tensor

from draftcore.errors import UsageError
from draftcore_sglang.internals import Limits, Runner, Settings


class Running(Protocol):
    """A model that runs, here or in other processes."""

    limits: Limits

    def forward(
        self, prompts: Sequence[Sequence[int]], layers: Sequence[int]
    ) -> dict[str, Tensor]: ...
    def close(self) -> None: ...


class Engine:
    """One target with its settings; started on demand, stopped when its last user leaves."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.users = settings, 0
        self._model: Running | None = None
        self._lock = threading.Lock()  # captures of several threads take turns

    @property
    def running(self) -> bool:
        return self._model is not None

    @property
    def limits(self) -> Limits:
        assert self._model is not None
        return self._model.limits

    def start(self) -> None:
        if self.settings.tp == 1:
            self._model = Runner(self.settings)
        else:
            from draftcore_sglang.ranks import Ranks

            self._model = Ranks(self.settings)

    def forward(self, prompts: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[str, Tensor]:
        """As `Runner.forward`."""
        assert self._model is not None
        with self._lock:
            return self._model.forward(prompts, layers)

    def leave(self) -> None:
        """End one use; the last one stops the target and frees its memory."""
        self.users -= 1
        if self.users == 0:
            del _open[self.settings]
            self.stop()

    def stop(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            model.close()


def open_engine(settings: Settings) -> Engine:
    """Return the engine of these settings, for one more user, who calls `leave` at the end.

    Raises UsageError where this process already holds another of one device.
    """
    if settings not in _open:
        for other in _open:
            if settings.tp == other.tp == 1:
                raise UsageError(_taken(settings, other))
        _open[settings] = Engine(settings)
    _open[settings].users += 1
    return _open[settings]


def _taken(settings: Settings, other: Settings) -> str:
    asked, held = asdict(settings), asdict(other)
    differs = {name: value for name, value in asked.items() if value != held[name]}
    return (
        "this process runs a target in sglang already, whose settings are global to the process\n"
        f"  running: { {name: held[name] for name in differs} }\n  asked:   {differs}\n"
        "  close the other capture first, or capture in processes of their own (topology.producers)"
    )


_open: dict[Settings, Engine] = {}
