"""Where the time of a start went, from the command to its first step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import pairwise

# When phases ended, and the seconds that torch had compiled for by then. One begins where another ended.
marks = list[tuple[str, float, float]]()


def ended(phase: str) -> None:
    """Note that a phase of a start has ended."""
    compiler = sys.modules.get("torch._dynamo.utils")  # which takes seconds to import
    compiled = compiler.calculate_time_spent()["total_wall_time"] if compiler else 0.0
    marks.append((phase, time.perf_counter(), compiled))


def first_step(tell: Callable[[str], None]) -> dict[str, float]:
    """End a start with its first step, and tell of it in a line; returns seconds by phase, once.

    Compiling is a phase of its own, taken out of that step.
    """
    if not marks:
        return {}
    ended("step")
    spent = {phase: end - start for (_, start, _), (phase, end, _) in pairwise(marks)}
    spent["compile"] = marks[-1][2] - marks[0][2]
    spent["step"] -= spent["compile"]
    marks.clear()
    parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in spent.items())
    tell(f"first step after {sum(spent.values()):.1f} s: {parts}")
    return {f"start_{phase}": round(seconds, 3) for phase, seconds in spent.items()}
