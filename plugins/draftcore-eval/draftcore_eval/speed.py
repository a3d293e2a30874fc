"""How fast an engine decodes with a draft on this machine, by drafts a round, beside the target alone.

Measured, prompt after prompt, one at a time; the result lies beside the draft, for its card.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftcore.contracts.run import OpenDraft
from draftcore.errors import UsageError, plural
from draftcore.files import write_atomic
from draftcore_eval.engines import Serving
from draftcore_eval.runner import Prompts
from draftcore_eval.served import Asking, folder_of, opened

COUNTS = (1, 2, 3, 5, 7, 10, 15)  # drafts a round that are tried, beside what the draft is set to
FILE = "speed-{}.json"


def measure(
    draft: OpenDraft, export: Path, num_drafts: int, prompts: Prompts, limit: int, asking: Asking
) -> dict[str, Any]:
    """Decode prompts alone and by each number of drafts; returns JSON data.

    A draft of blocks is served as it was trained. Raises UsageError for a server that runs.
    """
    if asking.url is not None:
        raise UsageError(
            "--speed starts the engine for each number of drafts, and a server that runs has its own\n"
            "  name the engine; draftcore bench measures servers"
        )
    longest, run = max(map(len, prompts)) + limit, draft.run
    dtype = str(run.target.dtype).removeprefix("torch.")
    alone = Serving(folder_of(run), None, 0, longest, dtype)
    counts = [count for count in COUNTS if count < num_drafts] + [num_drafts]
    if "parallel" in draft.algorithm.capabilities:
        counts = [num_drafts]
    plain, _ = timed(draft, asking, alone, prompts, limit)
    found = {}
    for count in counts:
        serving = replace(alone, export=export, num_drafts=count)
        found[count] = timed(draft, asking, serving, prompts, limit)
    best = max(counts, key=lambda count: found[count][0]["tokens_per_second"])
    return {
        "engine": asking.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {plural(os.cpu_count() or 1, 'core')}",
        "dtype": dtype,
        "prompts": len(prompts),
        "plain": plain,
        "drafts": {str(count): figures for count, (figures, _) in found.items()},
        "num_drafts": best,
        "command": found[best][1],
    }


def timed(
    draft: OpenDraft, asking: Asking, serving: Serving, prompts: Prompts, limit: int
) -> tuple[dict[str, Any], str]:
    """Start an engine and decode prompts; returns what that took, and the engine's command, if it has one."""
    with opened(draft.run, asking.name, serving, asking.options) as engine:
        engine.decode(prompts[0], 2)  # the first takes longer
        began = time.perf_counter()
        answers = [engine.decode(prompt, limit) for prompt in prompts]
        seconds = time.perf_counter() - began
        tokens = sum(len(answer.tokens) for answer in answers)
        figures = {"tokens": tokens, "rounds": sum(answer.rounds for answer in answers)}
        command = getattr(engine, "command", lambda: "")()
    return {**figures, "seconds": seconds, "tokens_per_second": tokens / seconds}, command


def write(speed: Mapping[str, Any], weights: str | None, folder: Path) -> None:
    """Write what was measured of a draft's weights into its folder."""
    data = json.dumps({"weights": weights, **speed}, indent=1)
    write_atomic(folder / FILE.format(speed["engine"]), data)


def lines(speed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values for people."""
    plain = speed["plain"]
    yield (
        f"{speed['engine']} here, alone",
        f"{plain['tokens_per_second']:.0f} tokens/s ({plain['tokens']} tokens in {plain['rounds']} rounds)",
    )
    for count, figures in speed["drafts"].items():
        yield (
            f"  {plural(int(count), 'draft')} a round",
            f"{figures['tokens_per_second']:.0f} tokens/s, {gain(speed, count):.2f}x "
            f"({figures['rounds']} rounds)",
        )
    yield "best here", advice(speed)


def table(speed: Mapping[str, Any]) -> list[list[str]]:
    """Return what was measured as cells: numbers of drafts, tokens a second, rounds."""
    columns = {"0": speed["plain"], **speed["drafts"]}
    return [
        ["drafts a round", *columns],
        ["tokens/s", *(f"{figures['tokens_per_second']:.0f}" for figures in columns.values())],
        ["rounds", *(str(figures["rounds"]) for figures in columns.values())],
    ]


def gain(speed: Mapping[str, Any], count: str) -> float:
    """Return how many times as fast as alone a number of drafts is."""
    drafted = speed["drafts"][count]["tokens_per_second"]
    return float(drafted / speed["plain"]["tokens_per_second"])


def advice(speed: Mapping[str, Any]) -> str:
    """Say by how many drafts the engine was fastest, and whether that is faster than none."""
    best = plural(speed["num_drafts"], "draft")
    times = gain(speed, str(speed["num_drafts"]))
    if times > 1:
        return f"{best} a round, {times:.2f}x of the target alone"
    return f"no draft: {best} a round, the fastest, are {times:.2f}x of the target alone"
