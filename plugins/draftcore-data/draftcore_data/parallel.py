"""Render many rows on all cores, in their order, and say how far it is.

The work is Python's own (templates), so it needs processes: loky's, which do not import the caller's
script once more.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from draftcore.errors import DraftcoreError
from draftcore_data.conversations import BadRow, Rendered, parse_row
from draftcore_data.rendering import Renderer

SourceRow = tuple[str, Any]  # its place, and the row as its source has it

ROWS_RENDERED_HERE = 4096  # and those after them by other processes, which take seconds to start
ROWS_PER_TASK = 512
MAX_PROCESSES = 16  # of a few hundred megabytes each
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES": ""}
SECONDS_BETWEEN_LINES = 10.0  # about progress, where there is no terminal


def render_all(
    renderer: Renderer,
    rows: Iterable[SourceRow],
    columns: Mapping[str, str],
    unread: Counter[str],
) -> Iterator[Rendered | BadRow]:
    """Render rows in their order, and the same whatever number of processes does it.

    `columns` and `unread` are as `parse_row` takes them.
    """
    waiting = iter(rows)
    yield from _render(renderer, itertools.islice(waiting, ROWS_RENDERED_HERE), columns, unread)
    tasks = iter(lambda: list(itertools.islice(waiting, ROWS_PER_TASK)), [])
    if (first := next(tasks, None)) is None:
        return
    from loky import ProcessPoolExecutor  # 0.1 s

    count = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    given = renderer, columns
    pool = ProcessPoolExecutor(count, env=ENVIRONMENT, initializer=_begin, initargs=given)
    under_way = deque[Future[tuple[list[Rendered | BadRow], Counter[str]]]]()

    def finished() -> Iterator[Rendered | BadRow]:
        rendered, keys = under_way.popleft().result()
        unread.update(keys)
        yield from rendered

    try:
        for task in itertools.chain([first], tasks):
            under_way.append(pool.submit(_render_task, task))
            if len(under_way) > 2 * count:
                yield from finished()
        while under_way:
            yield from finished()
    except BrokenProcessPool as error:
        raise DraftcoreError(
            f"a process that rendered rows ended\n  {error}\n"
            "  what it said stands above; is memory short?"
        ) from error
    finally:
        pool.shutdown(kill_workers=True)


_of_process: list[tuple[Renderer, Mapping[str, str]]] = []  # what a process renders with


def _begin(renderer: Renderer, columns: Mapping[str, str]) -> None:
    _of_process.append((renderer, columns))


def _render_task(rows: list[SourceRow]) -> tuple[list[Rendered | BadRow], Counter[str]]:
    (renderer, columns), unread = _of_process[0], Counter[str]()
    return list(_render(renderer, rows, columns, unread)), unread


def _render(
    renderer: Renderer, rows: Iterable[SourceRow], columns: Mapping[str, str], unread: Counter[str]
) -> Iterator[Rendered | BadRow]:
    return renderer.render(parse_row(*row, columns, unread) for row in rows)


def report_progress(rows: Iterable[Rendered | BadRow]) -> Iterator[Rendered | BadRow]:
    """Print on stderr how many rows are rendered and how fast: live, or a line every few seconds."""
    live = sys.stderr.isatty()
    began = printed = time.monotonic()
    for done, row in enumerate(rows, start=1):
        now = time.monotonic()
        if now - printed >= (0.2 if live else SECONDS_BETWEEN_LINES):
            line, printed = f"rendered {done:,} rows, {done / (now - began):,.0f} a second", now
            print(line, end="   \r" if live else "\n", file=sys.stderr, flush=True)
        yield row
