"""What a run will take, before it starts: rows, steps, disk, device memory and hours: `draftcore plan`.

No weights are read. Rows are rendered as `train` renders them, and kept for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftcore import planned
from draftcore.contracts.run import OpenRun
from draftcore.uris import format_size


@dataclass(frozen=True)
class RunPlan:
    """What a run takes. Bytes, seconds and shares; None is what nobody knows.

    `rows` and what follows from them are extrapolated where only `sampled` rows were read. `lengths`
    are median, p95 and max. `vocabulary` has, by the label of each draft with a vocabulary of its own,
    its size and the share of the learned tokens in it. `memory` has `target`, `capture` (its
    activations), `drafts` by label (the peak of a step), and `together` where they share the `device`,
    which has `device_bytes`. `lower` are settings, in the order to try, each with the bytes that the
    device then needs. `hours` are of `capture`, `training` and `evaluation`.
    """

    run: str
    device: str
    device_bytes: int | None
    rows: int
    tokens: int
    learned: float
    lengths: Mapping[str, int]
    padding: float
    steps: int
    epochs: int
    batch: int
    vocabulary: Mapping[str, tuple[int, float]]
    store: str
    store_bytes: int
    disk_free: int | None
    memory: Mapping[str, Any]
    lower: tuple[tuple[str, int], ...]
    hours: Mapping[str, float | None]
    sampled: int | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool | None:
        """Whether the device's memory suffices; None where that is not known."""
        need = self.memory["together"]
        return None if need is None or self.device_bytes is None else need <= self.device_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield names and values for people."""
        yield "rows", f"{self.rows:,}, {self.tokens:,} tokens, {self.learned:.1%} of them learned"
        names = {"median": "median", "p95": "95 %", "max": "longest"}
        yield "lengths", ", ".join(f"{names[k]} {v:,}" for k, v in self.lengths.items())
        yield "steps", f"{self.steps:,} in {self.epochs} epochs, {self.padding:.1%} padding"
        yield "store", f"{self.store}: {format_size(self.store_bytes)}"


def plan_run(
    run: OpenRun, *, device: str | None = None, device_bytes: int | None = None, rows: int = 0
) -> RunPlan:
    """Say what a run takes, as it is configured.

    `device` is one of the table of devices; the run's own is measured without it. `device_bytes` stand
    for the memory that it has. Of `rows` alone all others are inferred. Raises UsageError as `train`
    does before it begins.
    """
    request, samples, plan = planned(run, rows)
    lengths, summary, train = samples.lengths, samples.summary, run.config.train
    median, p95, longest = np.quantile(lengths, [0.5, 0.95, 1], method="inverted_cdf").tolist()
    padded = sum(len(batch) * plan.padded(batch) for batch in plan.batches)
    counts = sorted(summary.token_counts.values(), reverse=True)
    sizes = {d.label: getattr(d.options, "draft_vocab_size", None) for d in run.drafts}
    uri = run.config.store
    return RunPlan(
        run=str(run.folder),
        device=device or str(run.ranks.device(train.device)),
        device_bytes=device_bytes,
        rows=len(lengths),
        tokens=summary.tokens,
        learned=summary.loss_tokens / summary.tokens,
        lengths={"median": median, "p95": p95, "max": longest},
        padding=1 - summary.tokens / padded,
        steps=plan.total_steps,
        epochs=train.epochs,
        batch=train.batch,
        vocabulary={
            label: (size, sum(counts[:size]) / sum(counts)) for label, size in sizes.items() if size
        },
        store=uri,
        store_bytes=0 if uri == "auto" else summary.tokens * request.token_bytes(run.width),
        disk_free=shutil.disk_usage(Path.cwd()).free,
        memory={"target": None, "capture": None, "drafts": {}, "together": None},
        lower=(),
        hours={"capture": None, "training": None, "evaluation": None},
    )
