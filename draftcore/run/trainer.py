"""The training loop: fetch, forward, backward, clip, step, report.

Read `train` first. Every topology trains through it; what differs lies behind the feed. Several
drafts train side by side on the samples of one feed, each as if it were alone: what a step of one
depends on, its own random state included, lies in its `Trainer`. A loss is one numerator and one
denominator: both are summed over the accumulation window and over the ranks, and the gradients
divided once, so the split into micro-batches and ranks does not change the update. What ranks do
together is in `ranks`; here every one of them runs the same lines.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftcore.contracts.algorithm import DataSummary, DraftBatch, Sample, StepContext, StepOutput
from draftcore.contracts.channel import PlannedStep
from draftcore.data.samples import read_summary, summary_data
from draftcore.errors import DraftcoreError, UsageError
from draftcore.run.during import HeldOut, Probe
from draftcore.run.parts import DraftRun, Run, require_plugins
from draftcore.run.provenance import choices
from draftcore.training import checkpoint
from draftcore.training.metrics import MetricsLog, ratios, totals
from draftcore.training.optimizer import build_optimizer, learning_rate, scale_and_clip
from draftcore.training.progress import Progress
from draftcore.training.random_state import RandomState
from draftcore.training.ranks import Forward, Group

# What a resumed run must share with the run that wrote its checkpoint. Where things lie may
# change between hosts (what they are is checked by fingerprint); a run may be made longer.
BINDING_KEYS = ("algorithm", "capture", "runner", "target", "train")
PLACES = {("target", "path"), ("target", "device"), ("target", "revision"), ("runner", "decode")}
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
    "overlap",
    "rank_timeout",
}


def prepare(run: Run) -> list[Trainer]:
    """Build the trainers of the run's drafts, each from its own last checkpoint."""
    run.ranks.first(run.hold_folder)
    with run.ranks.together():
        run.require_shared_store()
        if run.role == "both":
            run.runners["prefill"].check(run.target)
            run.manifest(run.drafts)  # raises where a plugin that is selected is not here
        held_out = HeldOut(run) if run.config.train.eval_every else None
    summary = run.samples.summary  # all ranks ask here, before rank 0 does so by itself
    return [Trainer(draft, summary, held_out) for draft in run.drafts]


def train(run: Run, trainers: Sequence[Trainer]) -> str:
    """Train until the plan ends or a signal asks to stop; returns `complete` or `interrupted`.

    One of several drafts that fails leaves the others alone; its error is raised at the end.
    """
    active, failed, feed = list(trainers), dict[str, Exception](), run.feed
    total, at, reason = run.plan.total_steps, min(t.step for t in active), "failed"
    ranks = run.ranks
    config = run.config.model_dump(mode="json")
    run.observers.run_started(run=run.folder, config=config, total_steps=total)
    try:
        bar = Progress(total, at, shown=ranks.rank == 0, beside=feed.capturing)
        with stop_on_signal() as stop, bar as progress:
            given_up = {name: why for t in active for name, why in t.given_up.items()}
            feed.start(at, lambda: bool(stop), given_up)
            began = time.perf_counter()
            while at < total and active and not ranks.any(bool(stop)):
                planned = run.plan.step(at)
                with feed.samples(planned) as fetched:
                    if fetched is None:  # asked to stop while it waited for features
                        break
                    waited = time.perf_counter() - began
                    if at + 1 < total:
                        feed.prefetch(run.plan.step(at + 1))
                    for trainer in [t for t in active if t.step == at]:
                        try:
                            trainer.advance(fetched.step, fetched.samples, waited)
                        except DraftcoreError as error:
                            if not trainer.draft.label or not ranks.agreed(error):
                                raise
                            active.remove(trainer)
                            failed[trainer.draft.label] = error
                began = time.perf_counter()  # what is captured for the next step is waited for here
                feed.release(planned)
                at += 1
                progress.update(at, {t.draft.label: t.metrics for t in active})
        for trainer in active:
            trainer.save()
        reason = "interrupted" if at < total and active else "failed" if failed else "complete"
        feed.finished = reason == "complete"
    finally:
        run.observers.run_finished(run=run.folder, step=at, reason=reason)
    if failed:
        causes = "\n".join(f"{label}: {error}" for label, error in failed.items())
        with ranks.together():
            raise DraftcoreError(f"{len(failed)} of {len(run.drafts)} drafts failed\n{causes}")
    return reason


class Trainer:
    """One draft in training, from wherever it stands."""

    def __init__(self, draft: DraftRun, summary: DataSummary, held_out: HeldOut | None) -> None:
        self.draft, self.run, self.config = draft, draft.run, draft.config.train
        self.ranks = ranks = draft.run.ranks
        self.checkpoints = draft.folder / "checkpoints"
        last = checkpoint.latest(  # before the plugin is bound: its manifest knows who is missing
            self.checkpoints, ranks, lambda found: require_same_run(found, draft)
        )
        self.hook, self.device = draft.algorithm.hook, ranks.device(self.config.device)
        self.summary = read_summary(last.state["data"]) if last else summary
        self.built = draft.build(self.summary)
        self.built.module.to(self.device)
        if last is not None:
            last.load_draft(self.built)
        self.forward = Forward(self.built, self.loss)
        if isinstance(ranks, Group):
            from draftcore.training.sharding import (
                ShardedForward,  # 1.6 s that one rank does not pay
            )

            evaluated = held_out is not None
            self.forward = ShardedForward(ranks, self.built, self.loss, evaluated=evaluated)
        defaults = self.built.defaults
        self.lr = self.config.lr or defaults.lr
        self.clip = self.config.clip or defaults.clip
        warmup = self.config.warmup_ratio
        self.warmup_ratio = defaults.warmup_ratio if warmup is None else warmup
        self.optimizer = build_optimizer(
            self.built.parameter_groups,
            weight_decay=self.config.weight_decay,
            betas=self.config.betas,
        )
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.step, self.metrics = 0, dict[str, float]()
        self.given_up: Mapping[str, str] = last.state["given_up"] if last else {}
        if last is not None:
            last.load_optimizer(self.optimizer, self.built.module)
            self.step = last.step
        ranks.reseed(self.config.seed, self.step)
        self.random = RandomState(self.device, last.random_state() if last else None)
        self.saved_step = self.step if last is not None else -1
        self.probe = Probe(draft, held_out, self.device) if held_out else None
        log = Path(os.devnull) if ranks.rank else draft.folder / "metrics.jsonl"
        self.log = MetricsLog(log, self.step, self.config.log_every)

    def advance(
        self, planned: PlannedStep, samples: Mapping[int, Sample], fetch_seconds: float
    ) -> None:
        """Take the planned step and report it; save and evaluate where it is time to.

        `samples` are this rank's by their position in the step.
        """
        observers, label, total = self.run.observers, self.draft.label, self.run.plan.total_steps
        began = time.perf_counter()
        with self.random:
            metrics = self.train_step(planned, samples, total)
        seconds = fetch_seconds + time.perf_counter() - began
        self.metrics = {**metrics, "fetch_seconds": fetch_seconds, "seconds": seconds}
        self.step += 1
        self.log.write(self.step, self.metrics)
        observers.step_finished(step=self.step, metrics=self.metrics, draft=label)
        if self.step % self.config.checkpoint_every == 0:
            self.save()
        if (probe := self.probe) and self.step % (self.config.eval_every or 1) == 0:
            self.run.feed.settle()  # both run the target
            whole, step = self.forward.whole(), self.step
            report = self.ranks.first(lambda: probe.evaluate(whole, step, total))
            self.log.evaluation(self.step, report)
            observers.evaluated(step=self.step, report=report, draft=label)

    def train_step(
        self, planned: PlannedStep, samples: Mapping[int, Sample], total_steps: int
    ) -> dict[str, float]:
        """One optimizer step over the planned samples; returns its metrics."""
        context = StepContext(planned.index, total_steps, self.config.seed)
        parts = self.ranks.passes(len(planned.rows), self.config.batch)
        if not parts:  # all its samples were given up
            return {"loss": 0.0, "grad_norm": 0.0}
        outputs = [
            self.forward_backward(part, samples, context, last=part is parts[-1]) for part in parts
        ]
        numerator = torch.stack([output.numerator.detach() for output in outputs]).sum()
        denominator = torch.stack([output.denominator for output in outputs]).sum()
        names, counts = totals(output.counts for output in outputs)
        numerator, denominator, counts = self.ranks.sum(numerator, denominator, counts)
        lr = learning_rate(
            planned.index,
            total_steps,
            peak=self.lr,
            warmup_ratio=self.warmup_ratio,
            schedule=self.config.schedule,
        )
        norm = torch.zeros(())
        if denominator > 0:  # a step whose samples are all masked updates nothing
            norm = scale_and_clip(self.parameters, denominator, self.clip, self.ranks)
            self.require_finite(norm, planned, samples, context)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = float(numerator / denominator.clamp(min=1e-30))
        return {"loss": loss, "lr": lr, "grad_norm": float(norm), **ratios(names, counts)}

    def forward_backward(
        self,
        part: Sequence[int],
        samples: Mapping[int, Sample],
        context: StepContext,
        *,
        last: bool,
    ) -> StepOutput:
        """Accumulate the gradient of one micro-batch's numerator, the samples at these positions.

        A rank that has none keeps step with the others on a sample without loss, which counts
        nothing. `last` ends the gradient of the step.
        """
        batch = self.draft.collate([samples[at] for at in part] or [idle(samples)], self.device)
        with self.autocast():
            output = self.forward(batch, context, last=last)
        if output.numerator.requires_grad:
            output.numerator.backward()  # type: ignore[no-untyped-call]
        return output if part else nothing(output)

    def loss(self, batch: DraftBatch, context: StepContext) -> StepOutput:
        return self.hook.forward_loss(draft=self.built, batch=batch, context=context)

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 compute over fp32 masters, or nothing."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def require_finite(
        self,
        norm: Tensor,
        planned: PlannedStep,
        samples: Mapping[int, Sample],
        context: StepContext,
    ) -> None:
        """Raise before the update where the gradient is not finite, naming the samples at fault."""
        if bool(torch.isfinite(norm)):
            return
        guilty, own = [], self.ranks.own(len(planned.rows))
        for at, (row, sample) in enumerate(zip(planned.rows, planned.samples, strict=True)):
            self.optimizer.zero_grad(set_to_none=True)
            self.forward_backward([at] if at in own else [], samples, context, last=True)
            grads = [self.ranks.local(p.grad) for p in self.parameters if p.grad is not None]
            if self.ranks.any(not all(bool(grad.isfinite().all()) for grad in grads)):
                guilty.append(f"row {row} (sample {sample.feature_id})")
        with self.ranks.together():
            raise DraftcoreError(
                f"the gradient of step {planned.index} is not finite; the weights were not changed\n"
                f"  from: {', '.join(guilty) or 'no single sample; the batch as a whole'}\n"
                "  look at these rows; a lower train.lr or train.precision=fp32 helps where it is not "
                "the data"
            )

    def save(self) -> None:
        """Write a checkpoint of where the draft stands; once per step."""
        if self.saved_step == self.step:
            return
        weights = checkpoint.trained_tensors(self.built, self.ranks)
        kept = checkpoint.optimizer_tensors(self.built.module, self.optimizer, self.ranks)
        kept |= self.ranks.collect(self.random.tensors)
        folder = self.ranks.first(lambda: self.write(weights, kept), pack=str, unpack=Path)
        self.saved_step = self.step
        self.run.observers.checkpoint_saved(step=self.step, folder=folder, draft=self.draft.label)

    def write(self, weights: dict[str, Tensor], kept: dict[str, Tensor]) -> Path:
        """Write the checkpoint's files, on rank 0."""
        run = self.run
        state = {
            "step": self.step,
            "total_steps": run.plan.total_steps,
            "samples_seen": run.plan.samples_before(self.step),
            "run_id": run.run_id,
            "plan": run.plan.key,
            "config": self.draft.config.model_dump(mode="json"),
            "target": run.target.fingerprint,
            "draft": dict(self.built.config),
            "data": summary_data(self.summary),
            "plugins": run.manifest([self.draft]),
            "given_up": dict(run.feed.given_up),
        }
        keep = self.config.keep_checkpoints
        return checkpoint.save(self.checkpoints, weights, kept, state, keep)


def idle(samples: Mapping[int, Sample]) -> Sample:
    """A sample without loss, for a rank that has none left."""
    spare = next(iter(samples.values()))
    return dataclasses.replace(spare, loss_mask_T=torch.zeros_like(spare.loss_mask_T))


def nothing(output: StepOutput) -> StepOutput:
    """What a pass without samples adds: none of what its stand-in counted."""
    zero = torch.zeros_like
    counts = {name: (zero(top), zero(bottom)) for name, (top, bottom) in output.counts.items()}
    return StepOutput(zero(output.numerator), zero(output.denominator), counts)


def require_same_run(last: checkpoint.Checkpoint, draft: DraftRun) -> None:
    """Refuse to go on from a checkpoint of other plugins, target, data or schedule."""
    run = draft.run
    require_plugins(last, run.registry)
    then, now = last.state["config"], draft.config.model_dump(mode="json")
    if then["capture"]["name"] == now["capture"]["name"]:
        then, now = (_with_choices(side, run) for side in (then, now))
    changed = []
    for section in BINDING_KEYS:
        was, is_ = then.get(section, {}), now[section]  # one may be newer than the checkpoint
        keys = sorted({*was, *is_} - (FREE_TRAIN_KEYS if section == "train" else set()))
        changed += [
            f"{section}.{key}: {was.get(key)!r} then, {is_.get(key)!r} now"
            for key in keys
            if was.get(key) != is_.get(key) and (section, key) not in PLACES
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


def _with_choices(config: dict[str, Any], run: Run) -> dict[str, Any]:
    """A configuration with those options of its capture alone that change features."""
    capture = config["capture"]
    chosen = choices(run.capture_binding.options(capture["options"]))
    return {**config, "capture": {**capture, "options": chosen}}


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
