"""How a run that is under way stands, and who waits for whom: `draftcore status`."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from draftcore.contracts.run import OpenRun
from draftcore.errors import DraftcoreError
from draftcore.files import regular
from draftcore.uris import format_size
from draftcore_disagg.queue import RemoteQueue
from draftcore_disagg.queued import open_channel, queue_address

LATEST = 20  # lines of metrics.jsonl that are looked at
FIGURES = ("step", "loss", "seconds", "fetch_seconds", "tokens")  # of a line, that are shown
PATIENCE = 10.0  # seconds that the trainer has to answer


def lines(run: OpenRun, seconds: float) -> Iterator[tuple[str, str]]:
    """Yield names and values of a table; rates are those of the next `seconds`.

    Raises DraftcoreError where the trainer does not answer, or nothing was trained yet.
    """
    waits = 0.0
    for draft in run.drafts:
        steps = latest(draft.folder / "metrics.jsonl")
        last, spent = steps[-1], sum(one["seconds"] for one in steps)
        waits = sum(one["fetch_seconds"] for one in steps) / spent
        tokens = sum(one["tokens"] for one in steps) / spent
        stands = f"{last['step']}, loss {last['loss']:.4g}, {tokens:,.0f} tokens/s"
        yield f"{draft.prefix}step", stands
        yield f"{draft.prefix}waits for features", f"{waits:.0%} of its time"
    if not (address := queue_address(run)):
        yield "queue", "none: the trainer captures for itself, or is not at work"
        return
    with closing(open_channel(run).connect(lambda: address)) as client:
        before = asked(RemoteQueue(client), address)
        time.sleep(seconds)
        now = asked(RemoteQueue(client), address)
    rate = (now["captured"] - before["captured"]) / seconds
    yield "producers", f"{now['producers']}, capturing {rate:.2f} batches/s"
    yield "batches", f"{now['claimed']} with producers, {now['ready']} ready for the trainer"
    yield "held in the store", format_size(now["nbytes"])
    if waits > 0.05 and now["producers"]:
        enough = math.ceil(now["producers"] / (1 - min(waits, 0.99)))
        yield "advice", f"about {enough} producers would keep the ranks busy"
    elif not now["claimed"]:
        yield "advice", "producers wait for the trainer: fewer would do"


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
