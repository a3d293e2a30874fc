"""Metrics are ratios of sums, added up before they are divided; and the file they are kept in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def totals(counts: Iterable[Mapping[str, tuple[Tensor, Tensor]]]) -> tuple[list[str], Tensor]:
    """Add up numerators and denominators of each metric; returns names and a table [names, 2]."""
    sums: dict[str, list[Tensor]] = {}
    for one in counts:
        for name, (numerator, denominator) in one.items():
            have = sums.setdefault(
                name, [torch.zeros_like(numerator), torch.zeros_like(denominator)]
            )
            have[0], have[1] = have[0] + numerator, have[1] + denominator
    names = sorted(sums)
    if not names:
        return [], torch.zeros(0, 2, dtype=torch.double)
    return names, torch.stack([torch.stack([t.double() for t in sums[name]]) for name in names])


def ratios(names: Sequence[str], table: Tensor) -> dict[str, float]:
    """Divide what `totals` added up: never a mean of means."""
    rows = table.tolist()  # one transfer for all metrics instead of two per metric
    return {name: top / bottom for name, (top, bottom) in zip(names, rows, strict=True) if bottom}


class MetricsLog:
    """metrics.jsonl: a line per `every` steps; lines past a resumed step are dropped first."""

    def __init__(self, file: Path, step: int, every: int) -> None:
        self.file, self.every = file, every
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(file) if line["step"] <= step]
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % self.every == 0 or step == 1:
            self._append({"step": step, **metrics})

    def evaluation(self, step: int, report: Mapping[str, Any]) -> None:
        self._append({"step": step, "evaluation": dict(report)})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def _lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a half-written last one is dropped."""
    lines = []
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
