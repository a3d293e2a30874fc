"""The verbs as functions: `status`, `scale` and `produce`. What is heavy is imported inside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftcore import load_plugins, open_run
from draftcore.errors import UsageError
from draftcore.files import write_atomic
from draftcore_disagg.launcher import QUEUE, SCALE

if TYPE_CHECKING:
    from draftcore.options import Config
    from draftcore_disagg.status import DraftStatus, QueueStatus


@dataclass(frozen=True)
class Status:
    """How each draft of a run stands, and the queue of its trainer, if one is at work and has one."""

    drafts: list[DraftStatus]
    queue: QueueStatus | None


def status(config: Config, *overrides: str, seconds: float = 5.0, registry: Any = None) -> Status:
    """Return how a run stands, and who waits for whom; rates are taken over so many seconds."""
    from draftcore import load_config
    from draftcore_disagg.status import DraftStatus, QueueStatus, parts

    said = list(parts(load_config(config, overrides), registry or load_plugins(), seconds))
    drafts = [part for part in said if isinstance(part, DraftStatus)]
    return Status(drafts, next((part for part in said if isinstance(part, QueueStatus)), None))


def scale(config: Config, producers: int) -> None:
    """Ask for so many producers of a run that is under way, until it ends."""
    if not 1 <= producers <= 1000:
        raise UsageError(f"{producers} producers\n  1 to 1000 can be asked for")
    from draftcore import load_config

    run = load_config(config).run
    if not (run / QUEUE).exists():
        raise UsageError(
            f"no run with producers is under way in {run}\n"
            "  start one with topology.producers, and scale it while it goes on"
        )
    write_atomic(run / SCALE, f'{{"producers": {producers}}}')


def produce(
    config: Config, *overrides: str, registry: Any = None, say: Callable[[str], object] = print
) -> str:
    """Capture for a run's trainer until its run ends; returns `finished` or `interrupted`."""
    with open_run(config, overrides, registry) as run:
        from draftcore_disagg.produce import produce_features

        print(f"waiting for the trainer of {run.folder}", file=sys.stderr)
        state, line = produce_features(run)
    say(line)
    return state
