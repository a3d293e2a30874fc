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
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from draftcore.config import RunConfig
from draftcore.contracts.algorithm import (
    Draft,
    DraftBatch,
    Sample,
    SampleId,
    StepContext,
    StepOutput,
)
from draftcore.contracts.capture import FeatureRequest
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError
from draftcore.tensors import all_finite
from draftcore.training import checkpoint
from draftcore.training.distributed import Ranks, flat_gradients
from draftcore.training.metrics import MetricsLog, Sums, joined, ratios, totals
from draftcore.training.optimizer import build_optimizer, learning_rate, local, scale_and_clip
from draftcore.training.progress import Progress


class Batch(Protocol):
    """A batch that a loader yielded."""

    planned: PlannedBatch
    samples: list[Sample]


@dataclasses.dataclass(frozen=True)
class DraftSetup:
    """One draft of a run as training needs it; `label` is empty for a single one.

    `about` is what its checkpoints keep of the run: target, data, plugins.
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
    batches: Iterator[Batch],
    *,
    ranks: Ranks,
    skipped: Skipped,
    stop: Callable[[], bool],
    let_go: Callable[[], None],
    finished: Callable[[int], None],
    beside: Callable[[], str],
) -> tuple[str, dict[str, Exception]]:
    """Train until the plan ends or `stop` says so.

    Returns `complete`, `interrupted` or `failed`, and the errors of drafts that failed, by label: one
    of several that fails leaves the others alone. `let_go` ends the use of the batch that was yielded
    last; `finished` is told of each position up to which no rank needs a batch any more; `skipped`
    takes in the rows that other ranks skip.
    """
    active, failed = list(trainers), dict[str, Exception]()
    at, total, stopped = min(trainer.step for trainer in active), plan.total_steps, False
    with Progress(total, at, shown=ranks.rank == 0, beside=beside) as progress:
        while at < total and active and not stopped:
            step, known = plan.step(at), len(skipped)
            stepping = [trainer for trainer in active if trainer.step == at]
            began, waited, missing = time.perf_counter(), 0.0, False
            own, passes = step[ranks.rank :: ranks.size], -(-len(step) // ranks.size)
            for place in range(passes):
                batch = None
                if place < len(own) and not missing:
                    asked = time.perf_counter()
                    batch = next(batches, None)
                    waited += time.perf_counter() - asked
                    missing = batch is None  # asked to stop while it waited for features
                for trainer in stepping:
                    trainer.accumulate(at, batch, last=place == passes - 1)
            new = dict(list(skipped.items())[known:])
            said = ranks.agree((missing, stop(), new, {t.label: t.sums() for t in stepping}))
            lacking, stops, reasons, sums = zip(*said, strict=True)
            for theirs in filter(None, reasons):
                skipped.add(theirs)
            if any(lacking):
                break  # and the step is taken by nobody
            stopped = any(stops)
            for trainer in stepping:
                try:
                    trainer.update([theirs[trainer.label] for theirs in sums])
                except DraftcoreError as error:
                    if not trainer.label or error is not ranks.met:
                        raise
                    active.remove(trainer)
                    failed[trainer.label] = error
            let_go()
            finished(step[-1].position + 1)
            at += 1
            seconds = time.perf_counter() - began
            for trainer in [t for t in stepping if t in active]:
                trainer.report(waited, seconds)
            progress.show(at, {t.label: t.metrics for t in active})
    for trainer in active:
        trainer.save()
    reason = "interrupted" if at < total and active else "failed" if failed else "complete"
    return reason, failed


class RandomState:
    """A draft's own random state, on the CPU and its device, which is torch's inside `with`.

    So whoever trains or captures beside the draft does not move it. `tensors` is what a checkpoint
    keeps; a state that lacks the device's takes over its present one.
    """

    def __init__(self, device: torch.device, tensors: Mapping[str, Tensor]) -> None:
        self.cuda = device.type == "cuda"
        self.tensors = {**self._current(), **tensors}

    def __enter__(self) -> None:
        torch.set_rng_state(self.tensors["rng.cpu"])
        if self.cuda:
            torch.cuda.set_rng_state(self.tensors["rng.cuda"])

    def __exit__(self, *exc: object) -> None:
        self.tensors = self._current()

    def _current(self) -> dict[str, Tensor]:
        cuda = {"rng.cuda": torch.cuda.get_rng_state()} if self.cuda else {}
        return {"rng.cpu": torch.get_rng_state(), **cuda}


@dataclasses.dataclass(eq=False)
class Trainer:
    """One draft in training, from its `last` checkpoint on."""

    setup: DraftSetup
    built: Draft
    ranks: Ranks
    plan: Plan
    skipped: Mapping[int, str]
    observers: Any
    evaluate: Callable[[Draft, int, int], dict[str, Any]] | None  # at a step of so many, on rank 0
    last: dataclasses.InitVar[checkpoint.Checkpoint | None]

    def __post_init__(self, last: checkpoint.Checkpoint | None) -> None:
        setup, built, ranks = self.setup, self.built, self.ranks
        self.label, self.config = setup.label, setup.config.train
        self.checkpoints = setup.folder / "checkpoints"
        self.device = ranks.device(self.config.device)
        built.module.to(self.device)
        if last is not None:
            last.load_draft(built)
        self.sharded = None
        if self.config.shard and ranks.size > 1:
            from draftcore.training.sharding import Sharded  # 1.6 s that others do not pay

            self.sharded = Sharded(setup.hook, built, ranks, evaluated=bool(self.evaluate))
        defaults, warmup = built.defaults, self.config.warmup_ratio
        self.lr = self.config.lr or defaults.lr
        self.clip = self.config.clip or defaults.clip
        self.warmup = defaults.warmup_ratio if warmup is None else warmup
        self.optimizer = build_optimizer(
            built.parameter_groups, weight_decay=self.config.weight_decay, betas=self.config.betas
        )
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.flat = None  # the replicas' gradients
        if ranks.size > 1 and not self.sharded:
            self.flat = flat_gradients(self.parameters)
        self.step, self.metrics, states = 0, {"loss": 0.0}, dict[str, Tensor]()
        if last is not None:
            states = last.load_optimizer(self.optimizer, built.module)
            self.step = last.step
        if ranks.rank:  # rank 0 keeps the random state that it has
            mixed = f"{self.config.seed} {ranks.rank} {self.step}".encode()
            torch.manual_seed(int.from_bytes(hashlib.sha256(mixed).digest()[:4], "little"))
        self.random = RandomState(self.device, states)
        self.settled = self.random.tensors  # as the last finished step left it
        self.saved_step = self.step
        self.outputs: list[tuple[PlannedBatch, StepOutput]] = []  # of the step so far
        self.samples: Sequence[Sample] = ()  # of its last batch, to be named where it does harm
        log = Path(os.devnull) if ranks.rank else setup.folder / "metrics.jsonl"
        self.log = MetricsLog(log, self.step)

    def accumulate(self, step: int, batch: Batch | None, *, last: bool) -> None:
        """Add a batch's gradient to the step's; none, or one whose rows were all skipped, adds nothing."""
        self.samples = batch.samples if batch is not None else ()
        if batch is not None and batch.samples:
            self.outputs.append((batch.planned, self.backward(step, batch.samples, last=last)))
        elif self.sharded:  # all ranks call FSDP alike: here on a row without loss
            width, dtype = self.setup.about["width"], getattr(torch, self.setup.request.dtype)
            features = {n: torch.zeros(8, width, dtype=dtype) for n in self.setup.request.names}
            tokens, mask = torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.bool)
            self.backward(step, [Sample(SampleId("", 0), tokens, mask, features)], last=last)

    def backward(self, step: int, samples: Sequence[Sample], *, last: bool) -> StepOutput:
        """Compute a batch's loss and gradient: bf16 compute over fp32 masters, or fp32."""
        context = StepContext(step, self.plan.total_steps, self.config.seed)
        half = torch.autocast(self.device.type, torch.bfloat16, self.config.precision == "bf16")
        with self.random:
            batch = self.setup.collate(samples, self.device)
            with half:
                if self.sharded:
                    output = self.sharded.loss(batch, context, last=last)
                else:
                    hook, draft = self.setup.hook, self.built
                    output = hook.forward_loss(draft=draft, batch=batch, context=context)
            if output.numerator.requires_grad:
                output.numerator.backward()  # type: ignore[no-untyped-call]
        return dataclasses.replace(output, numerator=output.numerator.detach())

    def sums(self) -> Sums:
        """What loss and metrics of the step are made of, on this rank."""
        return totals(output for _, output in self.outputs)

    def update(self, sums: Sequence[Sums]) -> None:
        """Take the step, with the gradients and `sums` of all ranks.

        Raises DraftcoreError where the gradient is not finite; the weights are as before.
        """
        total, norm = joined(sums), torch.zeros(())
        if self.flat is not None:
            dist.all_reduce(self.flat, group=self.ranks.work)
        steps, schedule = self.plan.total_steps, self.config.schedule
        lr = learning_rate(
            self.step, steps, peak=self.lr, warmup_ratio=self.warmup, schedule=schedule
        )
        _, denominator = total.get("loss", (0.0, 0.0))
        if denominator > 0:  # a step whose rows are all masked updates nothing
            divisor = torch.full((), denominator, device=self.device)
            norm = scale_and_clip(self.parameters, divisor, self.clip)
            if not bool(torch.isfinite(norm)):
                self.refuse()
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.flat is None)
        self.outputs, self.settled = [], self.random.tensors
        self.metrics = {"loss": 0.0, **ratios(total), "lr": lr, "grad_norm": float(norm)}
        self.step += 1

    def report(self, waited: float, seconds: float) -> None:
        """Write the step's metrics; save and evaluate where it is time to."""
        self.metrics |= {"fetch_seconds": waited, "seconds": seconds}
        if self.step % self.config.log_every == 0 or self.step == 1:
            self.log.write({"step": self.step, **self.metrics})
        self.observers.step_finished(step=self.step, metrics=self.metrics, draft=self.label)
        if self.step % self.config.checkpoint_every == 0:
            self.save()
        evaluate, step, total = self.evaluate, self.step, self.plan.total_steps
        if evaluate is not None and step % (self.config.eval_every or 1) == 0:
            whole = self.sharded.whole() if self.sharded else self.built
            report = self.ranks.first(lambda: evaluate(whole, step, total))
            self.log.write({"step": step, "evaluation": report})
            self.observers.evaluated(step=step, report=report, draft=self.label)

    def refuse(self) -> None:
        """Raise for a gradient that is not finite, naming the rows at fault.

        Of the batch that is still held single rows are found, of any other the batch.
        """
        guilty, held = [], () if self.sharded else self.samples
        for planned, output in self.outputs[:-1] if held else self.outputs:
            if not bool(output.numerator.isfinite()):
                guilty.append(f"one of the rows {list(planned.rows)}")
        for sample in held:
            self.optimizer.zero_grad(set_to_none=self.flat is None)
            self.backward(self.step, [sample], last=True)
            if not all_finite([p.grad for p in self.parameters if p.grad is not None]):
                row = self.plan.feature_ids.index(sample.id.feature_id)
                guilty.append(f"row {row} (sample {sample.id.feature_id})")
        named = [one for said in self.ranks.agree(guilty) for one in said]
        with self.ranks.together():
            raise DraftcoreError(
                f"the gradient of step {self.step} is not finite; the weights were not changed\n"
                f"  from: {', '.join(named) or 'no single row; the step as a whole'}\n"
                "  look at these rows; a lower train.lr or train.precision=fp32 helps where it is not "
                "the data"
            )

    def save(self) -> None:
        """Write a checkpoint of where the draft stands; once per step."""
        if self.saved_step == self.step:
            return
        with self.ranks.together():
            parts = [local(p.detach()) for p in self.parameters]  # of a shard it may be empty
            if not all_finite([part for part in parts if part.numel()]):
                raise DraftcoreError(
                    f"the weights at step {self.step} are not finite and are not saved\n"
                    "  earlier checkpoints are intact; lower train.lr and start the same command"
                )
        weights = checkpoint.trained_tensors(self.built, self.ranks.rank)
        kept = checkpoint.optimizer_tensors(self.built.module, self.optimizer, self.ranks.rank)
        for rank, states in enumerate(self.ranks.agree(self.settled)):
            kept |= {f"{name}.{rank}" if rank else name: t for name, t in states.items()}
        state = {
            **self.setup.about,
            "step": self.step,
            "total_steps": self.plan.total_steps,
            "samples_seen": self.plan.rows_before(self.step),
            "plan": self.plan.key,
            "accumulate": self.plan.accumulate,
            "config": self.setup.config.model_dump(mode="json"),
            "draft": dict(self.built.config),
            "skipped": sorted(self.skipped.items()),
        }
        root, keep = self.checkpoints, self.config.keep_checkpoints
        folder = self.ranks.first(lambda: checkpoint.save(root, weights, kept, state, keep))
        self.saved_step = self.step
        self.observers.checkpoint_saved(step=self.step, folder=folder, draft=self.label)


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM so that a step ends whole; a second one acts at once."""
    caught: list[int] = []
    with ExitStack() as before:

        def note(number: int, _: object) -> None:
            caught.append(number)
            before.close()

        for one in (signal.SIGINT, signal.SIGTERM):
            before.callback(signal.signal, one, signal.signal(one, note))
        yield caught
