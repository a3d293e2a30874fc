"""How a run stands, and who waits for whom: `draftcore status`. It opens nothing, and so takes no torch."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftcore import bind
from draftcore.contracts.run import LOCK
from draftcore.errors import DraftcoreError
from draftcore.files import STEPS, read_sealed, regular
from draftcore.uris import format_size
from draftcore_disagg.queue import RemoteQueue
from draftcore_disagg.queued import channel_of, queue_address
from draftcore_disagg.secret import secret

if TYPE_CHECKING:
    from draftcore import RunConfig

LATEST = 20  # lines of metrics.jsonl that are looked at
FIGURES = ("step", "loss", "seconds", "fetch_seconds", "tokens")  # of a line, that are shown
PATIENCE = 10.0  # seconds that the trainer has to answer


@dataclass(frozen=True)
class DraftStatus:
    """How a draft's training stands, in words, its last step, and those that were logged last.

    `loss` is that of step `logged`; `waits` is the share of the time for features.
    """

    draft: str
    standing: str
    step: int
    logged: int
    loss: float
    tokens_per_second: float
    waits: float

    def lines(self) -> Iterator[tuple[str, str]]:
        prefix = f"{self.draft}: " if self.draft else ""
        yield f"{prefix}run", self.standing
        at = f" at {self.logged}" * (self.logged != self.step)
        stands = f"{self.step}, loss {self.loss:.4g}{at}, {self.tokens_per_second:,.0f} tokens/s"
        yield f"{prefix}step", stands
        yield f"{prefix}waits for features", f"{self.waits:.0%} of its time"


@dataclass(frozen=True)
class QueueStatus:
    """What producers do for a trainer: batches that they hold, and that lie ready, `nbytes` in the store."""

    producers: int
    batches_per_second: float
    claimed: int
    ready: int
    nbytes: int
    advice: str

    def lines(self) -> Iterator[tuple[str, str]]:
        yield "producers", f"{self.producers}, capturing {self.batches_per_second:.2f} batches/s"
        yield "batches", f"{self.claimed} with producers, {self.ready} ready for the trainer"
        yield "held in the store", format_size(self.nbytes)
        if self.advice:
            yield "advice", self.advice


def parts(
    config: RunConfig, registry: Any, seconds: float
) -> Iterator[DraftStatus | QueueStatus | None]:
    """Yield how each draft stands, and the queue of a trainer at work, None where it has none.

    Rates are those of the next `seconds`. Raises DraftcoreError where the trainer does not answer, or nothing
    was trained yet.
    """
    waits, place = 0.0, trainer_place(run := config.run)
    for label in config.drafts or [""]:
        steps = latest(run / label / "metrics.jsonl")
        last, spent = steps[-1], sum(one["seconds"] for one in steps)
        stands, step = standing(run, run / label / "checkpoints", last["step"], place)
        waits = sum(one["fetch_seconds"] for one in steps) / spent
        tokens = sum(one["tokens"] for one in steps) / spent
        yield DraftStatus(label, stands, step, last["step"], last["loss"], tokens, waits)
    if not place:
        return
    if not (address := queue_address(run)):
        yield None
        return
    offered = functools.partial(bind, registry, extras=config.plugins)
    channel = channel_of(config.channel, secret(run), offered)
    with closing(channel.connect(lambda: address)) as client:
        before = asked(RemoteQueue(client), address)
        time.sleep(seconds)
        now = asked(RemoteQueue(client), address)
    rate, advice = (now["captured"] - before["captured"]) / seconds, ""
    if waits > 0.05 and now["producers"]:
        enough = math.ceil(now["producers"] / (1 - min(waits, 0.99)))
        advice = f"about {enough} producers would keep the ranks busy"
    elif not now["claimed"]:
        advice = "producers wait for the trainer: fewer would do"
    held = now["claimed"], now["ready"], now["nbytes"]
    yield QueueStatus(now["producers"], rate, *held, advice)


def trainer_place(run: Path) -> str:
    """Return the machine of the process that trains in a folder; '' where none does.

    One that was killed on another machine is not known to be gone.
    """
    with suppress(OSError, ValueError):
        words, *_ = regular(run / LOCK).read_text().split("\n")
        _, pid, _, host = words.split()  # "process PID on HOST", by whoever holds the lock
        with suppress(PermissionError):  # it is another user's, and lives
            if host == socket.gethostname():
                os.kill(int(pid), 0)
        return host
    return ""


def standing(run: Path, checkpoints: Path, last: int, place: str) -> tuple[str, int]:
    """Say how a draft's training stands whose last logged step is `last`; returns its last step too."""
    state, (ended, at) = dict[str, Any](), ("", 0)
    with suppress(OSError, ValueError, KeyError):
        ended, at = read_sealed(run / "run.json")["ended"]
    with suppress(OSError, ValueError):
        newest = max(checkpoints.glob(f"{STEPS}/COMPLETE"), default=checkpoints)
        state = json.loads(newest.with_name("state.json").read_text())
    step, total = state.get("step", 0), state.get("total_steps", 0)
    of, known = f" of {total}" if total >= last else "", max(step, last)
    if place == socket.gethostname() or (place and last > at):
        return f"under way on {place}, step {known}{of}", known
    if reason := state.get("stopped"):
        return f"stopped, step {step}{of}: {reason}", step
    if total and step == total:
        return f"finished, step {step}{of}", step
    how = ended if last <= at else "killed"  # by who left no word
    return f"{how}, step {known}{of}; the same command goes on from step {step}", known


def latest(file: Path) -> list[dict[str, Any]]:
    """Return the last steps of a draft's metrics."""
    steps = list[dict[str, Any]]()
    with suppress(OSError):
        for line in regular(file).read_text(errors="replace").splitlines()[-LATEST:]:
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # torn, or no step's
                step = json.loads(line)
                figures = all(isinstance(step[name], int | float) for name in FIGURES)
                steps += [step] if figures and step["seconds"] > 0 else []
    if steps:
        return steps
    raise DraftcoreError(f"{file} has no step yet\n  start the run, or wait for its first step")


def asked(queue: RemoteQueue, address: str) -> dict[str, Any]:
    """Return the queue's status, or give up on a trainer that is gone."""
    found = list[dict[str, Any]]()
    caller = threading.Thread(target=lambda: found.append(queue.call("status")), daemon=True)
    caller.start()
    caller.join(PATIENCE)
    if not found:
        raise DraftcoreError(
            f"the trainer's queue at {address} does not answer\n"
            "  it may have ended without tidying up: start the run's command again"
        )
    return found[0]
