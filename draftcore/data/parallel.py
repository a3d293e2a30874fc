"""Render many rows on all cores, in their order, and say how far it is.

The work is Python's own (templates), so it needs processes: loky's, which do not import the caller's
script once more.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from draftcore.data.conversations import BadRow, Rendered, parse_row
from draftcore.data.rendering import Renderer
from draftcore.errors import DraftcoreError

Place = tuple[str, Any]  # a row as its source has it
Made = list[Rendered | BadRow]

FEW = 4096  # rows that are rendered here: other processes take seconds to start
CHUNK = 512
MOST = 16  # processes, of a few hundred megabytes each
ALONE = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SECONDS = 10.0  # between two lines about progress, where there is no terminal


def render_all(renderer: Renderer, rows: Iterable[Place]) -> Iterator[Rendered | BadRow]:
    """Render rows in their order, and the same whatever number of processes does it."""
    waiting = iter(rows)
    yield from _render(renderer, itertools.islice(waiting, FEW))
    chunks = iter(lambda: list(itertools.islice(waiting, CHUNK)), [])
    if (first := next(chunks, None)) is None:
        return
    from loky import ProcessPoolExecutor  # 0.1 s

    count = min(len(os.sched_getaffinity(0)), MOST)
    pool = ProcessPoolExecutor(count, env=ALONE, initializer=_begin, initargs=(renderer,))
    under_way = deque[Future[Made]]()
    try:
        for chunk in itertools.chain([first], chunks):
            under_way.append(pool.submit(_work, chunk))
            if len(under_way) > 2 * count:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    except BrokenProcessPool as error:
        raise DraftcoreError(
            f"a process that rendered rows ended\n  {error}\n"
            "  what it said stands above; is memory short?"
        ) from error
    finally:
        pool.shutdown(kill_workers=True)


_own: list[Renderer] = []  # of a process that renders


def _begin(renderer: Renderer) -> None:
    _own.append(renderer)


def _work(chunk: list[Place]) -> Made:
    return list(_render(_own[0], chunk))


def _render(renderer: Renderer, rows: Iterable[Place]) -> Iterator[Rendered | BadRow]:
    return renderer.render(itertools.starmap(parse_row, rows))


def shown(rows: Iterable[Rendered | BadRow]) -> Iterator[Rendered | BadRow]:
    """Say on stderr how many rows are rendered and how fast: live, or a line every few seconds."""
    live = sys.stderr.isatty()
    began = told = time.monotonic()
    for done, row in enumerate(rows, start=1):
        now = time.monotonic()
        if now - told >= (0.2 if live else SECONDS):
            line, told = f"rendered {done:,} rows, {done / (now - began):,.0f} a second", now
            print(line, end="   \r" if live else "\n", file=sys.stderr, flush=True)
        yield row
