"""How long kernels of several streams ran at once, computed from a trace of `torch.profiler`.

A trace is what `profile.export_chrome_trace` writes: a kernel there is an event of the category
`kernel` with its beginning and duration in microseconds, and its device and stream.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Span = tuple[float, float]


@dataclass(frozen=True)
class Busy:
    """Milliseconds in which each stream, by (device, stream), ran kernels, and several did at once."""

    streams: dict[tuple[int, int], float]
    at_once: float

    @property
    def share(self) -> float:
        """Of the time that the second busiest stream was at work; 1 where it was never alone."""
        second = sorted(self.streams.values())[-2:-1]
        return self.at_once / second[0] if second and second[0] else 0.0


def busy_streams(trace: Path) -> Busy:
    """Read a trace."""
    spans: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "kernel" and event.get("ph") == "X":
            where = int(event["args"]["device"]), int(event["args"]["stream"])
            spans[where].append((event["ts"], event["ts"] + event["dur"]))
    joined = {where: join(of_stream) for where, of_stream in spans.items()}
    alone = {where: sum(end - begin for begin, end in s) / 1e3 for where, s in joined.items()}
    return Busy(alone, at_once([span for s in joined.values() for span in s]) / 1e3)


def at_once(spans: Iterable[Span]) -> float:
    """How long at least two of the spans lasted together."""
    edges = sorted(edge for begin, end in spans for edge in ((begin, 1), (end, -1)))
    running, since, total = 0, 0.0, 0.0
    for moment, change in edges:
        if running >= 2:
            total += moment - since
        running, since = running + change, moment
    return total


def join(spans: Iterable[Span]) -> list[Span]:
    """The time that is in any span, as spans that do not touch."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined
