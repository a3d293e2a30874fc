"""The schedule warm-up, stable, decay: the peak rate holds, and falls to zero in the last fifth.

draftcore --plugin examples/plugins/wsd.py train run.yaml
"""

from draftcore import hookimpl

DECAY = 0.2  # of all steps


@hookimpl
def schedule(step: int, total_steps: int, warmup_ratio: float) -> float:
    rising = step / max(1, warmup_ratio * total_steps)
    falling = (total_steps + 1 - step) / max(1, DECAY * total_steps)
    return min(1.0, rising, falling)
