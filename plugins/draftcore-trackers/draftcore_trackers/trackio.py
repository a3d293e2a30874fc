"""The observer `trackio`: a project on this machine, or in the Space of TRACKIO_SPACE_ID."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftcore_trackers.tracker import PROJECT, RunTracker


class Trackio(RunTracker):
    name = module = "trackio"

    def open(self, run: Path, run_id: str, config: Mapping[str, Any]) -> None:
        import trackio

        self.picture_of = trackio.Image
        self.tracked = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run_id[:6]}",  # a run is known by its name
            config={**config},
            resume="allow",
            embed=False,
        )
        self.known = getattr(self.tracked, "_next_step", 0) - 1  # of no public name

    def close(self, reason: str) -> None:
        self.tracked.finish()


plugin = Trackio()
