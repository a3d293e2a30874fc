"""The training loop: load, forward, backward, clip, step, report.

Read `train` first. Every topology trains through it; what differs lies in the loader. Batches are
outside and drafts inside: each batch is held until the last draft's backward. Several drafts train
side by side, each as if it were alone: what a step of one depends on, its own random state included,
lies in its `Trainer`. A loss is one numerator and one denominator: both are summed over the batches
of a step and over the ranks, and the gradients divided once, so accumulation and ranks do not change
the update.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from draftcore.config import RunConfig
from draftcore.contracts.algorithm import (
    DataSummary,
    Draft,
    DraftBatch,
    Sample,
    SampleId,
    StepContext,
    StepOutput,
)
from draftcore.contracts.capture import FeatureRequest
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.samples import summary_data
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError
from draftcore.tensors import all_finite
from draftcore.training import checkpoint
from draftcore.training.distributed import Forward, Group, Ranks
from draftcore.training.metrics import MetricsLog, ratios, totals
from draftcore.training.optimizer import build_optimizer, learning_rate, local, scale_and_clip
from draftcore.training.progress import Progress
from draftcore.training.random_state import RandomState


class Batch(Protocol):
    """A batch that a loader yielded."""

    planned: PlannedBatch
    samples: list[Sample]


class Batches(Protocol):
    """What the loop needs of a loader."""

    def __next__(self) -> Batch: ...
    def let_go(self) -> None:
        """Close the batch that was yielded last."""
        ...


class Evaluator(Protocol):
    """Measures a draft in training, on rank 0."""

    def evaluate(self, built: Draft, step: int, total_steps: int) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class DraftSetup:
    """One draft of a run as training needs it; `label` is empty for a single one.

    `about` is what its checkpoints keep of the run: target, plan, plugins.
    """

    label: str
    folder: Path
    config: RunConfig
    hook: Any
    options: Any
    request: FeatureRequest
    about: Mapping[str, Any]

    def collate(self, samples: Sequence[Sample], device: torch.device) -> DraftBatch:
        """Batch samples on a device, with the features that this draft asked for and no others'.

        They are moved before they are padded: a host took an eighth of a GPU's step for that.
        """
        names = self.request.names
        own = [
            dataclasses.replace(s, features={name: s.features[name] for name in names}).to(device)
            for s in samples
        ]
        batch: DraftBatch = self.hook.collate(samples=own, options=self.options)
        return batch.to(device)


def train(
    plan: Plan,
    trainers: Sequence[Trainer],
    batches: Batches,
    *,
    ranks: Ranks,
    skipped: Skipped,
    stop: Callable[[], bool],
    finished: Callable[[int], None],
    observers: Any,
    beside: Callable[[], str],
) -> tuple[str, dict[str, Exception]]:
    """Train until the plan ends or `stop` says so.

    Returns `complete`, `interrupted` or `failed`, and the errors of drafts that failed, by label: one
    of several that fails leaves the others alone. `finished` is told of each position up to which
    no rank needs a batch any more; `skipped` takes in the rows that other ranks skip.
    """
    active, failed = list(trainers), dict[str, Exception]()
    at, total, stopped = min(trainer.step for trainer in active), plan.total_steps, False
    with Progress(total, at, shown=ranks.rank == 0, beside=beside) as progress:
        while at < total and active and not stopped and not (ranks.size == 1 and stop()):
            step, known = plan.step(at), len(skipped)
            stepping = [trainer for trainer in active if trainer.step == at]
            began, waited, missing = time.perf_counter(), 0.0, False
            own, passes = step[ranks.rank :: ranks.size], -(-len(step) // ranks.size)
            for place, planned in enumerate(own):
                asked = time.perf_counter()
                batch = next(batches, None)
                waited += time.perf_counter() - asked
                if batch is None:  # asked to stop while it waited for features
                    missing = True
                    break
                assert batch.planned == planned
                for trainer in stepping:
                    trainer.accumulate(batch, last=place == passes - 1)
            for trainer in stepping if not missing else ():
                trainer.idle(passes - len(own), at)
            for trainer in stepping:
                try:
                    missing = not trainer.update(at, missing) or missing
                except DraftcoreError as error:
                    if not trainer.label or not ranks.agreed(error):
                        raise
                    active.remove(trainer)
                    failed[trainer.label] = error
            batches.let_go()
            new = dict(list(skipped.items())[known:])
            counts = {t.label: t.counted for t in stepping}
            said = ranks.agree({"stop": stop(), "skipped": list(new.items()), "counts": counts})
            for other in said:
                if other["skipped"]:
                    skipped.add({int(row): why for row, why in other["skipped"]})
            stopped = any(other["stop"] for other in said)
            if missing:
                break
            finished(step[-1].position + 1)
            at += 1
            seconds = time.perf_counter() - began
            for trainer in [t for t in stepping if t in active]:
                trainer.report([other["counts"][trainer.label] for other in said], waited, seconds)
            progress.update(at, {t.label: t.metrics for t in active})
    for trainer in active:
        trainer.save()
    reason = "interrupted" if at < total and active else "failed" if failed else "complete"
    return reason, failed


class Trainer:
    """One draft in training, from wherever it stands."""

    def __init__(
        self,
        setup: DraftSetup,
        built: Draft,
        ranks: Ranks,
        summary: DataSummary,
        last: checkpoint.Checkpoint | None,
        *,
        plan: Plan,
        skipped: Mapping[int, str],
        observers: Any,
        evaluator: Evaluator | None,
    ) -> None:
        self.setup, self.built, self.ranks, self.summary = setup, built, ranks, summary
        self.label, self.config = setup.label, setup.config.train
        self.plan, self.skipped, self.observers = plan, skipped, observers
        self.evaluator = evaluator
        self.checkpoints = setup.folder / "checkpoints"
        self.device = ranks.device(self.config.device)
        built.module.to(self.device)
        if last is not None:
            last.load_draft(built)
        self.forward = Forward(ranks, built, self.loss)
        if self.config.shard and isinstance(ranks, Group):
            from draftcore.training.sharding import ShardedForward  # 1.6 s that others do not pay

            self.forward = ShardedForward(
                ranks, built, self.loss, evaluated=self.config.eval_every is not None
            )
        defaults = built.defaults
        self.lr = self.config.lr or defaults.lr
        self.clip = self.config.clip or defaults.clip
        warmup = self.config.warmup_ratio
        self.warmup_ratio = defaults.warmup_ratio if warmup is None else warmup
        self.optimizer = build_optimizer(
            built.parameter_groups, weight_decay=self.config.weight_decay, betas=self.config.betas
        )
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.step, self.metrics = 0, dict[str, float]()
        if last is not None:
            last.load_optimizer(self.optimizer, built.module, self.forward)
            self.step = last.step
        ranks.reseed(self.config.seed, self.step)
        self.random = RandomState(self.device, last.random_state() if last else None)
        self.saved_step = self.step
        self.outputs: list[tuple[PlannedBatch, StepOutput]] = []  # of the step so far
        self.samples: Sequence[Sample] = ()  # of its last batch, to be named where it does harm
        self.before: Mapping[str, Tensor] | None = None  # the random state as the step began
        self.counted: dict[str, list[float]] = {}
        log = Path(os.devnull) if ranks.rank else setup.folder / "metrics.jsonl"
        self.log = MetricsLog(log, self.step, self.config.log_every)

    def accumulate(self, batch: Batch, *, last: bool) -> None:
        """Add a batch's gradient to the step's. One whose rows were all skipped adds nothing."""
        step, self.samples = batch.planned.step, batch.samples
        self.before = self.before or self.random.tensors
        if not batch.samples:
            return self.idle(1, step, last=last)
        with self.random:
            output = self.backward(batch.samples, self.context(step), last=last)
        self.outputs.append((batch.planned, output))
        return None

    def idle(self, passes: int, step: int, *, last: bool = True) -> None:
        """Keep step with ranks that have a batch, where they need that, on a row without loss."""
        if not passes or not self.forward.every_rank:
            return
        request, width = self.setup.request, self.setup.about["width"]
        dtype = getattr(torch, request.dtype)
        features = {name: torch.zeros(8, width, dtype=dtype) for name in request.names}
        tokens, mask = torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.bool)
        idle = Sample(SampleId("", 0), tokens, mask, features)
        with self.random:
            self.backward([idle], self.context(step), last=last)

    def context(self, step: int) -> StepContext:
        return StepContext(step, self.plan.total_steps, self.config.seed)

    def backward(
        self, samples: Sequence[Sample], context: StepContext, *, last: bool
    ) -> StepOutput:
        batch = self.setup.collate(samples, self.device)
        with self.autocast():
            output = self.forward(batch, context, last=last)
        if output.numerator.requires_grad:
            output.numerator.backward()  # type: ignore[no-untyped-call]
        return dataclasses.replace(output, numerator=output.numerator.detach())

    def update(self, step: int, missing: bool) -> bool:
        """Take the step with all ranks' gradients; False, and nothing done, where one lacks a batch.

        Raises DraftcoreError where the gradient is not finite; the weights are as before.
        """
        batches, self.outputs = self.outputs, []
        before, self.before = self.before, None
        outputs = [output for _, output in batches]
        zero = torch.zeros((), device=self.device)
        own = [
            sum((output.numerator.float() for output in outputs), zero),
            sum((output.denominator.float() for output in outputs), zero),
            zero + float(missing),
        ]
        joined = self.forward.add_up(self.parameters, torch.stack([t.to(self.device) for t in own]))
        _, denominator, lacking = joined.tolist()
        if lacking:
            self.random.tensors = before or self.random.tensors
            self.forward.clear(self.optimizer)
            return False
        lr = learning_rate(
            step,
            self.plan.total_steps,
            peak=self.lr,
            warmup_ratio=self.warmup_ratio,
            schedule=self.config.schedule,
        )
        norm = torch.zeros(())
        if denominator > 0:  # a step whose rows are all masked updates nothing
            norm = scale_and_clip(self.parameters, joined[1], self.clip, self.forward.join_norms)
            if not bool(torch.isfinite(norm)):
                self.refuse(step, batches)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.forward.clear(self.optimizer)
        names, table = totals(output.counts for output in outputs)
        self.counted = dict(zip(names, table.tolist(), strict=True))
        self.metrics = {
            "loss": float(joined[0] / joined[1].clamp(min=1e-30)),
            "lr": lr,
            "grad_norm": float(norm),
        }
        self.step += 1
        return True

    def report(
        self, counts: Sequence[Mapping[str, Sequence[float]]], waited: float, seconds: float
    ) -> None:
        """Write the step's metrics, of all ranks; save and evaluate where it is time to."""
        names = sorted({name for one in counts for name in one})
        table = torch.tensor(
            [
                [sum(one[name][at] for one in counts if name in one) for at in (0, 1)]
                for name in names
            ],
            dtype=torch.double,
        ).reshape(-1, 2)
        self.metrics |= {**ratios(names, table), "fetch_seconds": waited, "seconds": seconds}
        self.log.write(self.step, self.metrics)
        self.observers.step_finished(step=self.step, metrics=self.metrics, draft=self.label)
        if self.step % self.config.checkpoint_every == 0:
            self.save()
        evaluator, step, total = self.evaluator, self.step, self.plan.total_steps
        if evaluator is not None and step % (self.config.eval_every or 1) == 0:
            whole = self.forward.whole()
            report = self.ranks.first(lambda: evaluator.evaluate(whole, step, total))
            self.log.evaluation(step, report)
            self.observers.evaluated(step=step, report=report, draft=self.label)

    def loss(self, batch: DraftBatch, context: StepContext) -> StepOutput:
        output: StepOutput = self.setup.hook.forward_loss(
            draft=self.built, batch=batch, context=context
        )
        return output

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 compute over fp32 masters, or nothing."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def refuse(self, step: int, batches: Sequence[tuple[PlannedBatch, StepOutput]]) -> None:
        """Raise for a gradient that is not finite, naming the rows at fault.

        Of the batch that is still held single rows are found, of earlier ones the batch.
        """
        guilty, self.samples = [], self.samples if not self.forward.every_rank else ()
        for planned, output in batches[:-1] if self.samples else batches:
            if not bool(output.numerator.isfinite()):
                guilty.append(f"one of the rows {list(planned.rows)}")
        for sample in self.samples:
            self.optimizer.zero_grad(set_to_none=True)
            with self.random:
                self.backward([sample], self.context(step), last=True)
            grads = [local(p.grad) for p in self.parameters if p.grad is not None]
            if not all(bool(grad.isfinite().all()) for grad in grads):
                row = self.plan.feature_ids.index(sample.id.feature_id)
                guilty.append(f"row {row} (sample {sample.id.feature_id})")
        named = [one for said in self.ranks.agree({"guilty": guilty}) for one in said["guilty"]]
        with self.ranks.together():
            raise DraftcoreError(
                f"the gradient of step {step} is not finite; the weights were not changed\n"
                f"  from: {', '.join(named) or 'no single row; the step as a whole'}\n"
                "  look at these rows; a lower train.lr or train.precision=fp32 helps where it is not "
                "the data"
            )

    def save(self) -> None:
        """Write a checkpoint of where the draft stands; once per step."""
        if self.saved_step == self.step:
            return
        mine = [local(p.detach()) for p in self.parameters]
        with self.ranks.together():
            if not all_finite([part for part in mine if part.numel()]):
                raise DraftcoreError(
                    f"the weights at step {self.step} are not finite and are not saved\n"
                    "  earlier checkpoints are intact; lower train.lr and start the same command"
                )
        rank = self.ranks.rank
        weights = checkpoint.trained_tensors(self.built, rank)
        kept = checkpoint.optimizer_tensors(self.built.module, self.optimizer, rank)
        kept |= self.ranks.collect(self.random.tensors)
        folder = self.ranks.first(lambda: self.write(weights, kept), pack=str, unpack=Path)
        self.saved_step = self.step
        self.observers.checkpoint_saved(step=self.step, folder=folder, draft=self.label)

    def write(self, weights: dict[str, Tensor], kept: dict[str, Tensor]) -> Path:
        """Write the checkpoint's files, on rank 0."""
        state = {
            **self.setup.about,
            "step": self.step,
            "total_steps": self.plan.total_steps,
            "samples_seen": self.plan.rows_before(self.step),
            "plan": self.plan.key,
            "accumulate": self.plan.accumulate,
            "config": self.setup.config.model_dump(mode="json"),
            "draft": dict(self.built.config),
            "data": summary_data(self.summary),
            "skipped": sorted(self.skipped.items()),
        }
        keep = self.config.keep_checkpoints
        return checkpoint.save(self.checkpoints, weights, kept, state, keep)


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM so that a step ends whole; a second one acts at once."""
    caught: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, _: object) -> None:
        caught.append(number)
        for one, handler in before.items():
            signal.signal(one, handler)

    for one in (signal.SIGINT, signal.SIGTERM):
        before[one] = signal.signal(one, note)
    try:
        yield caught
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
