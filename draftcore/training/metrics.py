"""Metrics are ratios of sums, added up before they are divided; and the file they are kept in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftcore.contracts.algorithm import StepOutput
from draftcore.errors import DraftcoreError
from draftcore.files import no_link, regular

# Numerator and denominator of each metric, by name, and of each term of the loss, by number.
Sums = dict[str | int, list[float]]


def weighted(output: StepOutput) -> list[tuple[Tensor, Tensor]]:
    """Return each term of a loss as a numerator, times its weight, and a denominator."""
    return [(top if weight == 1 else weight * top, bottom) for top, bottom, weight in output.terms]


def totals(outputs: Iterable[StepOutput]) -> dict[str | int, Tensor]:
    """Add up numerators and denominators of the loss's terms and of each metric over batches.

    A double of [2] each, where the outputs are: nothing is waited for.
    """
    sums: dict[str | int, Tensor] = {}
    for output in outputs:
        pairs: dict[Any, Any] = {**output.counts, **dict(enumerate(weighted(output)))}
        for name, pair in pairs.items():
            pair_2 = torch.stack([part.detach().double() for part in pair])
            sums[name] = sums[name] + pair_2 if name in sums else pair_2
    return sums


def fetch(sums: Mapping[str | int, Tensor]) -> Callable[[], Sums]:
    """Start to copy sums from the device, in one transfer; returns what waits for that and reads them.

    The wait is for what the device was given until now, and for nothing that it is given later.
    """
    table, names = torch.stack(list(sums.values())), list(sums)
    copy = table.to("cpu", non_blocking=True)  # into pinned memory
    copied = torch.cuda.current_stream(table.device).record_event() if table.is_cuda else None

    def read() -> Sums:
        if copied is not None:
            copied.synchronize()
        return dict(zip(names, copy.tolist(), strict=True))

    return read


def ratios(parts: Iterable[Sums]) -> dict[str, float]:
    """Divide what the ranks added up, never a mean of means; `loss` is the sum over its terms."""
    sums: Sums = {}
    for part in parts:
        for name, (top, bottom) in part.items():
            so_far = sums.get(name, [0.0, 0.0])
            sums[name] = [so_far[0] + top, so_far[1] + bottom]
    divided = {name: top / bottom for name, (top, bottom) in sums.items() if bottom}
    named = {name: value for name, value in divided.items() if isinstance(name, str)}
    if terms := [value for name, value in divided.items() if isinstance(name, int)]:
        named["loss"] = sum(terms)
    return dict(sorted(named.items()))


class MetricsLog:
    """metrics.jsonl: lines of a step each; those past a resumed step are dropped first."""

    def __init__(self, file: Path, step: int) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        old, lines = regular(file).read_text(errors="replace") if file.exists() else "", list[str]()
        for line in old.splitlines():
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # torn, or not ours
                if json.loads(line)["step"] <= step:
                    lines.append(f"{line}\n")
        with open(file, "w", opener=no_link) as stream:
            stream.writelines(lines)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line. Raises DraftcoreError where the disk is full."""
        try:
            with open(self.file, "a", opener=no_link) as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            problem = f"cannot write {self.file}: {error}"
            remedy = "checkpoints are intact; free space and run the same command to go on"
            raise DraftcoreError(f"{problem}\n  {remedy}") from None
