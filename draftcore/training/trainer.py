"""The training loop: fetch, forward, backward, clip, step, report.

Read `Trainer.train` first. Every topology trains through it; what differs lies behind the feed.
A loss is one numerator and one denominator: both are summed over the accumulation window, and the
gradients divided once, so the split into micro-batches does not change the update.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from draftcore.errors import DraftcoreError, UsageError
from draftcore.records import PlannedStep, Sample, StepContext, StepOutput
from draftcore.run import Run, read_summary
from draftcore.target import resolve_device
from draftcore.training import checkpoint
from draftcore.training.metrics import MetricsLog, ratios
from draftcore.training.optimizer import build_optimizer, learning_rate, scale_and_clip
from draftcore.training.probe import Probe
from draftcore.training.progress import Progress

# What a resumed run must share with the run that wrote its checkpoint. Where things lie may
# change between hosts (what they are is checked by fingerprint); a run may be made longer.
BINDING_KEYS = ("algorithm", "capture", "target", "train")
PLACES = {("target", "path"), ("target", "device"), ("target", "revision")}
FREE_TRAIN_KEYS = {
    "epochs",
    "max_steps",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "eval_every",
    "eval_samples",
    "eval_prompts",
    "device",
}


class Trainer:
    """One draft in training, from wherever its run stands."""

    def __init__(self, run: Run) -> None:
        self.run, self.config, self.hook = run, run.config.train, run.algorithm.hook
        self.device = resolve_device(self.config.device)
        self.checkpoints = run.folder / "checkpoints"
        last = checkpoint.latest(self.checkpoints)
        if last is not None:
            require_same_run(last, run)
        summary = run.samples.summary if last is None else read_summary(last.state["data"])
        self.summary = summary
        self.draft = run.build_draft(summary)
        self.draft.module.to(self.device)
        defaults = self.draft.defaults
        self.lr = self.config.lr or defaults.lr
        self.clip = self.config.clip or defaults.clip
        warmup = self.config.warmup_ratio
        self.warmup_ratio = defaults.warmup_ratio if warmup is None else warmup
        self.optimizer = build_optimizer(
            self.draft.parameter_groups,
            weight_decay=self.config.weight_decay,
            betas=self.config.betas,
        )
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.step = 0
        if last is not None:
            last.load_draft(self.draft)
            last.load_optimizer(self.optimizer, self.draft.module)
            self.step = last.step
        self.saved_step = self.step if last is not None else -1

    def train(self) -> str:
        """Train until the plan ends or a signal asks to stop; returns `complete` or `interrupted`."""
        plan, feed, observers = self.run.plan, self.run.feed, self.run.observers
        probe = Probe(self.run, self.draft, self.device) if self.config.eval_every else None
        total, reason = plan.total_steps, "failed"
        observers.run_started(
            run=self.run.folder, config=self.run.config.model_dump(mode="json"), total_steps=total
        )
        log = MetricsLog(self.run.folder / "metrics.jsonl", self.step, self.config.log_every)
        try:
            with stop_on_signal() as stop, Progress(total, self.step) as progress:
                feed.start(self.step)
                while self.step < total and not stop:
                    planned = plan.step(self.step)
                    metrics = self.train_step(planned, total)
                    feed.release(planned)
                    self.step += 1
                    log.write(self.step, metrics)
                    observers.step_finished(step=self.step, metrics=metrics)
                    progress.update(self.step, metrics)
                    if self.step % self.config.checkpoint_every == 0:
                        self.save()
                    if probe and self.step % (self.config.eval_every or 1) == 0:
                        report = probe.evaluate(self.step, total)
                        log.evaluation(self.step, report)
                        observers.evaluated(step=self.step, report=report)
            self.save()
            reason = "interrupted" if self.step < total else "complete"
        finally:
            observers.run_finished(run=self.run.folder, step=self.step, reason=reason)
        return reason

    def train_step(self, planned: PlannedStep, total_steps: int) -> dict[str, float]:
        """One optimizer step over the planned samples; returns its metrics."""
        began = time.perf_counter()
        context = StepContext(planned.index, total_steps, self.config.seed)
        outputs = []
        with self.run.feed.samples(planned) as samples:
            fetched = time.perf_counter()
            for start in range(0, len(samples), self.config.batch):
                outputs.append(
                    self.forward_backward(samples[start : start + self.config.batch], context)
                )
        numerator = torch.stack([output.numerator.detach() for output in outputs]).sum()
        denominator = torch.stack([output.denominator for output in outputs]).sum()
        lr = learning_rate(
            planned.index,
            total_steps,
            peak=self.lr,
            warmup_ratio=self.warmup_ratio,
            schedule=self.config.schedule,
        )
        norm = torch.zeros(())
        if denominator > 0:  # a step whose samples are all masked updates nothing
            norm = scale_and_clip(self.parameters, denominator, self.clip)
            self.require_finite(norm, planned, context)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics = {"loss": float(numerator / denominator.clamp(min=1e-30)), "lr": lr}
        metrics |= {"grad_norm": float(norm), **ratios([output.counts for output in outputs])}
        ended = time.perf_counter()
        return {**metrics, "fetch_seconds": fetched - began, "seconds": ended - began}

    def forward_backward(self, samples: Sequence[Sample], context: StepContext) -> StepOutput:
        """Accumulate the gradient of one micro-batch's numerator."""
        batch = self.hook.collate(samples=samples, options=self.run.options).to(self.device)
        with self.autocast():
            output = self.hook.forward_loss(draft=self.draft, batch=batch, context=context)
        if output.numerator.requires_grad:
            output.numerator.backward()  # type: ignore[no-untyped-call]
        return output

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 compute over fp32 masters, or nothing."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def require_finite(self, norm: Tensor, planned: PlannedStep, context: StepContext) -> None:
        """Raise before the update where the gradient is not finite, naming the samples at fault."""
        if bool(torch.isfinite(norm)):
            return
        guilty = []
        with self.run.feed.samples(planned) as samples:
            for row, sample in zip(planned.rows, samples, strict=True):
                self.optimizer.zero_grad(set_to_none=True)
                self.forward_backward([sample], context)
                grads = [p.grad for p in self.parameters if p.grad is not None]
                if not all(bool(grad.isfinite().all()) for grad in grads):
                    guilty.append(f"row {row} (sample {sample.id.feature_id})")
        raise DraftcoreError(
            f"the gradient of step {planned.index} is not finite; the weights were not changed\n"
            f"  from: {', '.join(guilty) or 'no single sample; the batch as a whole'}\n"
            "  look at these rows; a lower train.lr or train.precision=fp32 helps where it is not the data"
        )

    def save(self) -> None:
        """Write a checkpoint of where the run stands; once per step."""
        if self.saved_step == self.step:
            return
        run = self.run
        state = {
            "step": self.step,
            "total_steps": run.plan.total_steps,
            "samples_seen": run.plan.samples_before(self.step),
            "run_id": run.run_id,
            "plan": run.plan.key,
            "config": run.config.model_dump(mode="json"),
            "target": run.target.fingerprint,
            "draft": dict(self.draft.config),
            "data": {**vars(self.summary), "token_counts": list(self.summary.token_counts.items())},
            "plugins": run.plugins,
        }
        folder = checkpoint.save(
            self.checkpoints, self.draft, self.optimizer, state, self.config.keep_checkpoints
        )
        self.saved_step = self.step
        run.observers.checkpoint_saved(step=self.step, folder=folder)


def require_same_run(last: checkpoint.Checkpoint, run: Run) -> None:
    """Refuse to go on from a checkpoint of other plugins, target, data or schedule."""
    checkpoint.require_plugins(last, run.registry)
    then, now = last.state["config"], run.config.model_dump(mode="json")
    changed = []
    for section in BINDING_KEYS:
        keys = sorted(
            {*then[section], *now[section]} - (FREE_TRAIN_KEYS if section == "train" else set())
        )
        changed += [
            f"{section}.{key}: {then[section].get(key)!r} then, {now[section].get(key)!r} now"
            for key in keys
            if then[section].get(key) != now[section].get(key) and (section, key) not in PLACES
        ]
    if last.state["target"] != run.target.fingerprint:
        changed.append(f"target: weights {last.state['target']} then, {run.target.fingerprint} now")
    if last.state["plan"] != run.plan.key:
        changed.append("data: other samples, or another order of them")
    if changed:
        raise UsageError(
            f"{last.folder} was written by a run that differs from this one\n  "
            + "\n  ".join(changed)
            + "\n  undo the change to resume, or set another run folder to start anew"
        )


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
