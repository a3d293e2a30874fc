"""What a run will take, before it starts: rows, steps, disk, device memory and hours: `draftcore plan`.

No weights are read. Rows are rendered as `train` renders them, and kept for it.
"""

from __future__ import annotations

import copy
import functools
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftcore import Plan
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.run import OpenDraft, OpenRun, Samples
from draftcore.uris import format_size
from draftcore_tools.costs import (
    Device,
    StepCost,
    device_here,
    device_named,
    step_cost,
    target_cost,
    with_option,
    with_train,
)

# How much longer work takes than its matrix products alone (docs/performance.md).
CAPTURE, EAGER, COMPILED = 1.7, 2.1, 1.5
COMPILED_MEMORY = 0.8  # of what a step takes uncompiled; 0.6 to 1.04 were measured
COMPILED_STEPS = 1000  # from so many on `train.compile: auto` compiles on a GPU
LAYER_SECONDS = 1e-3  # of a decoded token at least, however little is computed
UNEVEN = 3  # times the median batch: the largest, from which a note says so
ACCEPTED = 2.5  # tokens a round of a draft that nobody knows yet
FEWER = {"num_anchors": (256, 128), "draft_vocab_size": (32_000,)}  # options that cost memory


@dataclass(frozen=True)
class RunPlan:
    """What a run takes. Bytes, hours and shares; None is what nobody knows.

    `rows` and what follows from them are inferred where only `sampled` rows were read. `lengths` are
    median, p95 and max. `vocabulary` has, by the label of each draft with a vocabulary of its own, its
    size and the share of the learned tokens in it. `memory` has the `target`'s weights, `capture` (its
    activations), `features` of a batch, `drafts` (each one's `held` between steps and `peak`, by label),
    and `together`, on the device that trains, which has `device_bytes`. `lower` are settings until that
    fits, each with those before it, and the bytes needed then. `hours` are of `capture`, `training` and
    `evaluation`.
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
    batch_tokens: int | None
    vocabulary: Mapping[str, tuple[int, float]]
    store: str
    store_bytes: int
    disk_free: int | None
    memory: Mapping[str, Any]
    lower: tuple[tuple[str, int], ...]
    hours: Mapping[str, float | None]
    sampled: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the device's memory suffices; None where that is not known."""
        need: int | None = self.memory["together"]
        return None if need is None or not self.device_bytes else need <= self.device_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield names and values for people."""
        inferred = f", inferred from the first {self.sampled:,}" if self.sampled else ""
        yield "rows", f"{self.rows:,}{inferred}"
        yield "tokens", f"{self.tokens:,}, {self.learned:.1%} of them learned"
        names = {"median": "median", "p95": "95 %", "max": "longest"}
        yield "lengths", ", ".join(f"{names[k]} {v:,}" for k, v in self.lengths.items())
        for label, (size, share) in self.vocabulary.items():
            said = f"{size:,} tokens cover {share:.2%} of what is learned"
            yield f"draft vocabulary {label}".rstrip(), said
        of = f"{self.batch_tokens:,} tokens" if self.batch_tokens else str(self.batch)
        padding = f"{self.padding:.1%} of a batch of {of} is padding"
        yield "steps", f"{self.steps:,} in {self.epochs} epoch{'s' * (self.epochs > 1)}, {padding}"
        if self.store_bytes:
            free = f", {format_size(self.disk_free)} are free there" if self.disk_free else ""
            yield "store", f"{format_size(self.store_bytes)} in {self.store}{free}"
        yield from self._memory_lines()
        known = {name: hours for name, hours in self.hours.items() if hours is not None}
        times = ", ".join(f"{name} {_duration(hours)}" for name, hours in known.items())
        yield f"time on {self.device}", times or "not known"
        yield from (("note", warning) for warning in self.warnings)

    def _memory_lines(self) -> Iterator[tuple[str, str]]:
        def size(value: int | None) -> str:
            return "not known" if value is None else format_size(value)

        memory, total = self.memory, self.device_bytes
        yield (
            "memory of the target",
            f"weights {size(memory['target'])}, its activations {size(memory['capture'])}, "
            f"features of a batch {size(memory['features'])}",
        )
        for label, draft in memory["drafts"].items():
            held = f", of which {size(draft['held'])} between steps" * (draft["held"] is not None)
            yield f"memory of {label or 'the draft'}", f"{size(draft['peak'])} in a step{held}"
        verdict = {None: "", True: ": fits", False: ": does not fit"}[self.fits]
        of = f" of {format_size(total)}" if total else ""
        yield f"memory of {self.device}", f"{size(memory['together'])}{of}{verdict}"
        for setting, need in self.lower:
            fits = ": fits" if total and need <= total else ""
            yield "  with", f"{setting}: {format_size(need)}{fits}"


def plan_run(
    run: OpenRun, *, device: str | None = None, device_bytes: int | None = None, rows: int = 0
) -> RunPlan:
    """Say what a run takes, as it is configured.

    `device` is one of the table of devices; the run's own is measured without it. `device_bytes` stand
    for the memory that it has. Of the first `rows` all others are inferred. Raises UsageError as
    `train` does before it begins.
    """
    train = run.config.train
    here = run.ranks.device(train.device) if device is None else None
    machine = device_here(here) if here is not None else device_named(str(device))
    samples, scale = read_rows(run, rows)
    summary, lengths, uri = samples.summary, samples.lengths, run.config.store
    accumulate = train.accumulate or run.config.topology.ranks
    plan = Plan(
        samples.feature_ids, lengths.tolist(), batch=train.batch, batch_tokens=train.batch_tokens,
        accumulate=accumulate, seed=train.seed,
    )  # fmt: skip
    steps = math.ceil(train.epochs * plan.steps_per_epoch * scale)
    steps = min(steps, train.max_steps or steps)
    median, p95, longest = np.quantile(lengths, [0.5, 0.95, 1], method="inverted_cdf").tolist()
    counts = sorted(summary.token_counts.values(), reverse=True)
    sizes = {d.label: getattr(d.options, "draft_vocab_size", None) for d in run.drafts}
    memory = Memory(run, machine, plan, samples, steps)
    total = device_bytes or machine.memory
    trained = summary.tokens * steps * accumulate / len(plan.batches)
    stored = round(summary.tokens * scale * memory.token_bytes) if uri != "auto" else 0
    return RunPlan(
        run=str(run.folder),
        device=machine.name,
        device_bytes=total or None,
        rows=round(len(lengths) * scale),
        tokens=round(summary.tokens * scale),
        learned=summary.loss_tokens / summary.tokens,
        lengths={"median": median, "p95": p95, "max": longest},
        padding=1 - summary.tokens / int(plan.tokens.sum()),
        steps=steps,
        epochs=train.epochs,
        batch=train.batch,
        batch_tokens=train.batch_tokens,
        vocabulary={
            label: (size, sum(counts[:size]) / sum(counts)) for label, size in sizes.items() if size
        },
        store=uri,
        store_bytes=stored,
        disk_free=free_bytes(uri),
        memory=memory.figures(),
        lower=tuple(memory.lower(total)) if total else (),
        hours=hours(run, memory, trained, summary.tokens * scale if stored else trained),
        sampled=len(lengths) if scale > 1 else None,
        warnings=tuple(warnings(run, machine, samples, plan, longest)),
    )


def read_rows(run: OpenRun, rows: int) -> tuple[Samples, float]:
    """Return the rows, or the first of them, and how many times as many there are."""
    samples = run.data.samples("train", limit=rows)
    from draftcore_data.rows import Conversations
    from draftcore_data.sources import open_source

    if not rows or not isinstance(run.data, Conversations):
        return samples, 1.0
    there = sum(1 for _ in open_source(run.data.sources("train"), run.data.find).rows())
    return samples, max(1.0, min(there, run.data.options.limit or there) / rows)


def free_bytes(uri: str) -> int | None:
    """Return what is free where a store in a folder lies, or will."""
    scheme, _, path = uri.partition("?")[0].partition(":")
    if scheme != "file":
        return None
    folder = Path(path).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    return shutil.disk_usage(there).free


class Memory:
    """What a run takes of the device that trains, by the figures of its largest batch."""

    def __init__(
        self, run: OpenRun, machine: Device, plan: Plan, samples: Samples, steps: int
    ) -> None:
        train, target = run.config.train, run.config.target.options
        self.run, self.machine = run, machine
        self.batch, self.batch_tokens = train.batch, train.batch_tokens
        self.on_gpu, self.ahead = machine.name != "cpu", run.config.store == "auto"
        auto = self.on_gpu and steps >= COMPILED_STEPS and not train.shard
        self.compiled = auto if train.compile == "auto" else train.compile
        largest = plan.tokens.argmax()
        rows = plan.batches[largest]
        self.masks = [torch.from_numpy(np.array(samples.loss_mask(row))) for row in rows]
        self.tokens = int(plan.tokens[largest])
        self.target = target_cost(run.target, run.width, plan.lengths.mean())
        places = {target.get("device", "auto"), train.device}
        self.apart = run.config.topology.producers > 0 or len(places - {"auto"}) > 1
        requests = [
            draft.algorithm.hook.feature_request(target=run.target, options=draft.options)
            for draft in run.drafts
        ]
        self.token_bytes = functools.reduce(FeatureRequest.union, requests).token_bytes(run.width)
        self.steps = {draft.label: self.step(draft) for draft in run.drafts}

    def step(self, draft: OpenDraft) -> StepCost | None:
        compiled = self.compiled and "compile" in draft.algorithm.capabilities
        return step_cost(draft, self.masks, COMPILED_MEMORY if compiled else 1.0)

    def figures(self) -> dict[str, Any]:
        target = self.target
        return {
            "target": target and target.weights // self.run.target.devices,
            "capture": target and target.activations * self.tokens,
            "features": self.tokens * self.token_bytes,
            "drafts": {
                label: {"held": step and step.held, "peak": step and step.held + step.rows}
                for label, step in self.steps.items()
            },
            "together": self.together(),
        }

    def together(self) -> int | None:
        """Return what the device that trains has to hold.

        With `store: auto` the next batch is captured while one is trained on, else all are before.
        """
        known = [step for step in self.steps.values() if step is not None]
        if len(known) < len(self.steps) or (self.target is None and not self.apart):
            return None
        rows, most = min(self.batch, len(self.masks)), len(self.masks)
        share = (rows - 1) / max(1, most - 1)
        step = max(cost.one + share * (cost.rows - cost.one) for cost in known)
        need = sum(cost.held for cost in known) + step
        if self.target is not None and not self.apart:
            tokens = self.tokens * rows / most
            capture = tokens * self.target.activations
            beside = capture + tokens * self.token_bytes if self.ahead else max(0, capture - step)
            need += self.target.weights // self.run.target.devices + beside
        return int(need)

    def lower(self, total: int) -> Iterator[tuple[str, int]]:
        """Yield what to lower until all fits, each with those before it, and what is needed then."""
        less, need = copy.copy(self), self.together()
        if need is None or need <= total:
            return
        for setting in less.lowered():
            if (need := less.together()) is not None:
                yield setting, need
                if need <= total:
                    return

    def lowered(self) -> Iterator[str]:
        """Lower one thing after the other, and yield its name."""
        drafts = list(self.run.drafts)
        if self.on_gpu and any(draft.config.train.precision == "fp32" for draft in drafts):
            drafts = [with_train(draft, precision="bf16") for draft in drafts]
            self.steps = {draft.label: self.step(draft) for draft in drafts}
            yield "train.precision=bf16"
        longest = max(map(len, self.masks))
        while self.batch_tokens and self.batch_tokens > longest:
            self.batch_tokens //= 2
            self.batch = max(1, self.batch_tokens // longest)
            yield f"train.batch_tokens={self.batch_tokens}"
        while self.batch > 1:
            self.batch //= 2
            yield f"train.batch={self.batch}"
        for draft in drafts:
            section = f"drafts.{draft.label}.algorithm" if draft.label else "algorithm"
            for option, values in FEWER.items():
                now = getattr(draft.options, option, 0)
                for value in (value for value in values if now is None or value < now):
                    step = self.step(with_option(draft, option, value))
                    self.steps = {**self.steps, draft.label: step}
                    yield f"{section}.options.{option}={value}"
        if not self.apart:
            self.apart = True
            yield "topology.producers=1"


# ---------------------------------------------------------------- time


def hours(run: OpenRun, memory: Memory, trained: float, captured: float) -> dict[str, float | None]:
    """Return the hours of capture, training and evaluation, for so many tokens."""
    machine, target, config = memory.machine, memory.target, run.config
    capture: float | None = None
    if target is not None:
        processes = config.topology.producers or config.topology.ranks
        rate = machine.rate(run.target.dtype) * processes / CAPTURE
        capture = captured * target.operations / rate / 3600
    training, over = 0.0, COMPILED if memory.compiled else EAGER
    for draft in run.drafts:
        cost, precision = memory.steps[draft.label], draft.config.train.precision
        if precision == "auto":
            precision = "fp32" if machine.name == "cpu" else "bf16"
        rate = machine.rate(precision) * config.topology.ranks
        training += math.nan if cost is None else trained * cost.operations * over / rate / 3600
    return {
        "capture": capture,
        "training": None if math.isnan(training) else training,
        "evaluation": evaluation_hours(run, memory),
    }


def evaluation_hours(run: OpenRun, memory: Memory) -> float | None:
    """Return the hours in which `draftcore eval` decodes: by the target alone, and with each draft."""
    options: Any = getattr(run.evaluation(), "options", None)
    if run.data.eval is None or memory.target is None or not hasattr(options, "max_new_tokens"):
        return None
    prompts = len(run.data.prompts(options.prompts or 0).token_ids)
    reads = memory.target.weights / memory.machine.bandwidth
    token = max(reads, LAYER_SECONDS * run.target.num_layers) if memory.on_gpu else reads
    passes = math.ceil(prompts / options.batch) * options.max_new_tokens
    return float(passes * token) * (1 + len(run.drafts) * 1.2 / ACCEPTED) / 3600


def _duration(time: float) -> str:
    if time * 3600 < 90:
        return f"{time * 3600:.0f} s"
    return f"{time * 60:.0f} min" if time < 1.5 else f"{time:.1f} h"


# ---------------------------------------------------------------- notes


def warnings(
    run: OpenRun, machine: Device, samples: Samples, plan: Plan, longest: int
) -> Iterator[str]:
    """Yield what a person should know of a run before it starts."""
    notes: Mapping[str, int] = getattr(getattr(samples, "report", None), "notes", {})
    yield from (note.format(count) for note, count in notes.items())
    if lacks := run.capture.offer.lacks():
        yield f"the capture {run.capture.offer.name!r} cannot work here: {lacks}"
    if machine.name != "cpu" and run.config.train.precision == "fp32":
        yield "train.precision is fp32: bf16 takes a fraction of the time on a GPU"
    median, largest = int(np.median(plan.tokens)), int(plan.tokens.max())
    if not plan.batch_tokens and largest > UNEVEN * median:
        yield (
            f"batches have {median:,} tokens in the median and up to {largest:,}: "
            "train.batch_tokens, with a higher train.batch, makes them alike"
        )
    if run.data.eval is None:
        yield "data.eval is not set: nothing held out is measured, and no best step kept"
    positions = getattr(run.target.text_config, "max_position_embeddings", None) or longest
    if longest > positions:
        yield f"the longest row has {longest:,} tokens, and the target {positions:,} positions"
