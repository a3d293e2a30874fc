"""An observer that holds a run up, so that faults find it at work on any machine."""

from __future__ import annotations

import os
import time

from draftcore import hookimpl


@hookimpl
def step_finished() -> None:
    time.sleep(float(os.environ.get("PACE", "0.25")))
