"""Render many rows on all cores, in their order, and say how far it is.

The work is Python's own (templates), so it needs processes. They are started by hand: those of
`multiprocessing` would import the caller's script once more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from draftcore.data.conversations import BadRow, Rendered, parse_row
from draftcore.data.rendering import Renderer
from draftcore.errors import DraftcoreError

Place = tuple[str, Any]  # a row as its source has it
Made = list[Rendered | BadRow]

FEW = 4096  # rows that are rendered here: other processes take seconds to start
CHUNK = 512
MOST = 16  # processes, of a few hundred megabytes each
SECONDS = 10.0  # between two lines about progress, where there is no terminal
START = "import sys; sys.path[:] = {!r}; from draftcore.data import parallel; parallel.serve()"


def render_all(renderer: Renderer, rows: Iterable[Place]) -> Iterator[Rendered | BadRow]:
    """Render rows in their order, and the same whatever number of processes does it."""
    waiting = iter(rows)
    yield from _render(renderer, itertools.islice(waiting, FEW))
    chunks = iter(lambda: list(itertools.islice(waiting, CHUNK)), [])
    if (first := next(chunks, None)) is None:
        return
    count = min(len(os.sched_getaffinity(0)), MOST)
    idle = queue.SimpleQueue[Any]()

    def begin(process: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # that it ended is met by the first chunk
            pickle.dump(renderer, process.stdin)
        idle.put(process)

    def work(chunk: list[Place]) -> Made:
        process = idle.get()
        try:
            pickle.dump(chunk, process.stdin)
            process.stdin.flush()
            made: Made = pickle.load(process.stdout)
            return made
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            what = f"a process that rendered rows ended with exit code {process.wait()}"
            raise DraftcoreError(
                f"{what}\n  what it said stands above; is memory short?"
            ) from error
        finally:
            idle.put(process)

    with ThreadPoolExecutor(count) as pool, contextlib.ExitStack() as stack:
        for _ in range(count):
            pool.submit(begin, stack.enter_context(_started()))
        under_way = deque[Future[Made]]()
        for chunk in itertools.chain([first], chunks):
            under_way.append(pool.submit(work, chunk))
            if len(under_way) > 2 * count:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()


@contextlib.contextmanager
def _started() -> Iterator[Any]:
    """Start a process that renders, and end it."""
    alone = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", START.format(sys.path)]
    pipe, env = subprocess.PIPE, {**os.environ, **alone}
    process: Any = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def serve() -> None:
    """Render the chunks that come in at stdin, until no more come: what such a process runs."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what others print must not get between
        renderer = pickle.load(sys.stdin.buffer)
        with contextlib.suppress(EOFError):
            while True:
                made = list(_render(renderer, pickle.load(sys.stdin.buffer)))
                pickle.dump(made, out)
                out.flush()


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
