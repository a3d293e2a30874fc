"""Joins the ranks that a launcher or `torchrun` started; a single one needs no plugin."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from draftcore.config import TrainConfig
from draftcore.contracts.run import Ranks
from draftcore.errors import ExitStatus, UsageError
from draftcore.plugins import catalog
from draftcore.plugins.binding import bind
from draftcore.plugins.registry import Registry

SINGLE_RANK = Ranks()


@contextmanager
def join(config: TrainConfig, registry: Registry, *, alone: bool = False) -> Iterator[Ranks]:
    """Join the ranks that torchrun started until the block ends; without it there is a single one.

    Raises UsageError where ranks cannot be, lack a device each or the work is for one `alone`;
    DraftcoreError where they do not come together; on every rank, the error of any.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield SINGLE_RANK
        return
    if alone:
        raise UsageError(
            f"torchrun started {size} ranks, and of all verbs only train knows what to do with them\n"
            "  start this one without torchrun"
        )
    hook = bind(registry, "ranks", name := catalog.default("ranks")).hook
    ranks = hook.ranks(name=name, config=config)
    try:
        with redirect_stdout(io.StringIO() if ranks.rank else sys.stdout):
            yield ranks
    except BaseException as error:
        if error is not ranks.last_common_error:
            ranks.leave(error)
            raise
        ranks.close()
        if ranks.rank:  # rank 0 tells it
            raise SystemExit(getattr(error, "exit_status", ExitStatus.FAILED)) from None
        raise
    ranks.close()
