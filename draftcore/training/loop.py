"""The training loop: load, forward, backward, clip, step, report.

Read `train` first. Every topology trains through it; what differs lies in the loader. Batches are
outside and drafts inside: each batch is held until the last draft's backward. Several drafts train
side by side, each as if it were alone: what a step of one depends on, its own random state included,
lies in its `Trainer`. A loss is one numerator and one denominator, or several such terms: both are
summed over the batches of a step and over the ranks, and the gradients divided once, so accumulation
and ranks do not change the update.

The host runs a step ahead of the device: the metrics of step n are read after forward and backward of
step n+1 were launched, before its update. So observers see the weights of step n, and what was
launched is thrown away where training ends there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftcore.contracts import algorithm
from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, StepContext, StepOutput, Stop
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.run import Loaded, OpenDraft, PlannedBatch, Ranks
from draftcore.data.plan import Plan
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import STEPS
from draftcore.phases import first_step
from draftcore.progress import Progress, in_words
from draftcore.tensors import all_finite, largest_magnitude
from draftcore.training import checkpoint
from draftcore.training.compiled import MIN_STEPS_TO_COMPILE, Compiled
from draftcore.training.gradients import Gradients
from draftcore.training.metrics import MetricsLog, Sums, fetch, ratios, totals, weighted
from draftcore.training.optimizer import build_optimizer, full, learning_rate, local, scale_and_clip

MAX_WEIGHT = 1e6  # magnitude: what learns stays orders below, and a step from beyond may fail


def collate(
    draft: OpenDraft, request: FeatureRequest, samples: Sequence[Sample], device: torch.device
) -> DraftBatch:
    """Batch samples on a device, with the features that a draft asked for and no others'.

    They are moved before they are padded: a host took an eighth of a GPU's step for that.
    """
    moved = []
    for sample in samples:
        requested = request.select(sample.features).items()
        features = {name: t.to(device, non_blocking=True) for name, t in requested}
        moved.append(dataclasses.replace(sample, features=features))
    batch: DraftBatch = draft.algorithm.hook.collate(samples=moved, options=draft.options)
    return dataclasses.replace(batch.to(device), host_mask_BT=batch.loss_mask_BT)


@dataclasses.dataclass
class StepStatus:
    """What a rank tells the others before a step is taken: of its share of it, and of the step before."""

    missing: bool  # a batch of its share did not come, as the run is to stop
    stop: bool  # it was asked to stop
    skipped: dict[int, str]  # rows that it left out, with reasons
    sums: dict[str, Sums]  # of the step before, by draft
    terms: dict[str, int]  # buffers of gradients, by draft
    saved: list[str]  # drafts whose checkpoint was written meanwhile, on rank 0


def train(
    plan: Plan, trainers: Sequence[Trainer], batches: Iterator[Loaded], *, skipped: Skipped,
    stop: Callable[[], bool], release_batch: Callable[[], None],
    finished: Callable[[int], None], status_line: Callable[[], str],
) -> tuple[str, dict[str, Exception], dict[str, Stop]]:  # fmt: skip
    """Train until the plan ends, `stop` says so or observers have stopped every draft.

    Returns `complete`, `stopped`, `interrupted` or `failed`, and by label drafts' errors and stops.
    `release_batch` ends the use of the batch that was yielded last; `finished` is told of each
    position up to which no rank needs a batch any more.
    """
    done, total = min(t.step for t in trainers), plan.total_steps
    every, ranks = trainers[0].config.log_every, trainers[0].ranks
    progress = Progress(total, done, every=every, shown=not ranks.rank, status_line=status_line)
    drafts = Drafts(list(trainers), ranks, total, progress)
    timing, stopping = dict[str, float](), False  # timing: of the step before
    with ExitStack() as stack, progress:
        for trainer in trainers:
            stack.enter_context(trainer.writer)  # which is waited for, however training ends
        while drafts.active:
            wait = done == total or stopping or any(t.previous_step.due for t in drafts.active)
            if wait and not any(t.previous_step.metrics for t in drafts.active):
                break
            step = () if wait else plan.step(done)
            stepping = [t for t in drafts.active if step and t.step == done]
            began, skipped_before = time.perf_counter(), len(skipped)
            missing, waited = drafts.forward_backward(stepping, step, batches)

            skips = dict(list(skipped.items())[skipped_before:])
            sums = {t.label: t.previous_step.read() for t in drafts.active}
            terms = {t.label: len(t.gradients.buffers) for t in drafts.active}
            saved = [t.label for t in drafts.active if t.writing and t.writing.done()]
            statuses = ranks.all_gather(StepStatus(missing, stop(), skips, sums, terms, saved))
            for rows in [status.skipped for status in statuses if status.skipped]:
                skipped.add(rows)
            stopping = stopping or any(status.stop for status in statuses)
            if wait:
                timing["seconds"] += time.perf_counter() - began
            drafts.report(done, statuses, timing)

            if any(status.missing for status in statuses) or not drafts.active:
                break  # and the step is taken by nobody
            for trainer in [t for t in stepping if t in drafts.active]:
                with drafts.isolate_failure(trainer):
                    trainer.update(max(status.terms[trainer.label] for status in statuses))
            if step:
                release_batch()
                finished(step[-1].position + 1)
                done += 1
                timing = {"fetch_seconds": waited, "seconds": time.perf_counter() - began}
                timing["tokens"] = sum(int(plan.lengths[list(b.rows)].sum()) for b in step)
                timing |= first_step(progress.tell)
        drafts.save()  # the last step
    return drafts.reason(done), drafts.failed, drafts.stopped


@dataclasses.dataclass
class Drafts:
    """The drafts in training: one of several that fails, or is stopped, leaves the others alone."""

    active: list[Trainer]
    ranks: Ranks
    total_steps: int
    progress: Progress
    failed: dict[str, Exception] = dataclasses.field(default_factory=dict)
    stopped: dict[str, Stop] = dataclasses.field(default_factory=dict)

    def reason(self, done: int) -> str:
        """Say how training ended after so many steps."""
        if self.active and done < self.total_steps:
            return "interrupted"
        return "failed" if self.failed else "stopped" if self.stopped else "complete"

    @contextmanager
    def isolate_failure(self, trainer: Trainer) -> Iterator[None]:
        """Let one of several drafts fail alone, where all ranks raise its error."""
        try:
            yield
        except DraftcoreError as error:
            if not trainer.label or error is not self.ranks.last_common_error:
                raise
            self.active.remove(trainer)
            self.failed[trainer.label] = error
            trainer.finish_pending_save()

    def forward_backward(
        self, trainers: Sequence[Trainer], step: Sequence[PlannedBatch], batches: Iterator[Loaded]
    ) -> tuple[bool, float]:
        """Add up the gradients of this rank's batches of a step; all ranks take as many passes.

        Returns whether a batch did not come, as the run was asked to stop while it waited for
        features, and the seconds waited.
        """
        share, passes = step[self.ranks.rank :: self.ranks.size], -(-len(step) // self.ranks.size)
        missing, waited = False, 0.0
        for place in range(passes):
            batch = None
            if place < len(share) and not missing:
                asked = time.perf_counter()
                batch = next(batches, None)
                waited += time.perf_counter() - asked
                missing = batch is None
            for trainer in trainers:
                trainer.accumulate(batch, last=place == passes - 1)
        return missing, waited

    def report(
        self, done: int, statuses: Sequence[StepStatus], timing: Mapping[str, float]
    ) -> None:
        """Report the step before, and checkpoints that were written; an observer may stop a draft."""
        for trainer in [t for t in self.active if t.label in statuses[0].saved]:
            with self.isolate_failure(trainer):
                trainer.finish_pending_save()
        reporting = [trainer for trainer in self.active if trainer.previous_step.metrics]
        for trainer in reporting:
            with self.isolate_failure(trainer):
                answer = trainer.report([status.sums[trainer.label] for status in statuses], timing)
                if answer is not None and done < self.total_steps:
                    trainer.save(answer)
                    trainer.finish_pending_save()
                    self.active.remove(trainer)
                    self.stopped[trainer.label] = answer
                if trainer.evaluation:
                    self.progress.tell(trainer.evaluation)
        if reporting:
            self.progress.show(done, {t.label: t.metrics for t in self.active if t.metrics})

    def save(self) -> None:
        """Write the checkpoints of the last step, and wait for them."""
        for trainer in list(self.active):
            with self.isolate_failure(trainer):
                trainer.save()
                trainer.finish_pending_save()


@dataclasses.dataclass
class Step:
    """This rank's share of one step, kept until its metrics are reported."""

    outputs: list[tuple[PlannedBatch, StepOutput]] = dataclasses.field(default_factory=list)
    samples: Sequence[Sample] = ()  # of the last batch, to be named where they do harm
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # none before its update
    read: Callable[[], Sums] = dict  # waits for the sums
    due: bool = False  # it is saved or evaluated, before the next one is launched


class RandomState:
    """A draft's own random state, on the CPU and its device, which is torch's inside `with`.

    So whoever trains or captures beside the draft does not move it. `tensors` is what a checkpoint
    keeps; a state that lacks the device's takes over its present one.
    """

    def __init__(self, device: torch.device, tensors: Mapping[str, Tensor]) -> None:
        self.cuda = device.type == "cuda"
        self.__exit__()
        self.tensors |= tensors

    def __enter__(self) -> None:
        torch.set_rng_state(self.tensors["rng.cpu"])
        if self.cuda:
            torch.cuda.set_rng_state(self.tensors["rng.cuda"])

    def __exit__(self, *exc: object) -> None:
        cuda = {"rng.cuda": torch.cuda.get_rng_state()} if self.cuda else {}
        self.tensors = {"rng.cpu": torch.get_rng_state(), **cuda}


@dataclasses.dataclass(eq=False)
class Trainer:
    """One draft in training, from its `last` checkpoint on; all ranks call its methods alike.

    `about` is what its checkpoints keep of the run: target, data, held-out rows, plugins.
    """

    draft: OpenDraft
    request: FeatureRequest
    about: Mapping[str, Any]
    built: Draft
    plan: Plan
    skipped: Mapping[int, str]
    evaluate: Callable[[Draft, StepContext], dict[str, Any]] | None  # on rank 0
    last: dataclasses.InitVar[checkpoint.Checkpoint | None]

    def __post_init__(self, last: checkpoint.Checkpoint | None) -> None:
        draft, run, plan = self.draft, self.draft.run, self.plan
        self.label, self.config, self.options = draft.label, draft.config.train, draft.options
        self.hook, self.ranks, self.observers = draft.algorithm.hook, run.ranks, run.observers
        self.checkpoints = draft.folder / "checkpoints"
        self.step = self.saved_step = last.step if last is not None else 0
        self.current_step, self.previous_step = Step(), Step()
        self.metrics, self.evaluation = dict[str, float](), ""  # as last reported
        self.held_out = 0, "loss", math.nan  # the step that was evaluated last, and how good it is
        self.eval_every = self.config.eval_every or min(plan.steps_per_epoch, plan.total_steps)
        self.device = self.ranks.device(self.config.device)
        # bf16 that is emulated is no quicker.
        half = self.device.type == "cuda" and torch.cuda.is_bf16_supported(False)
        begun = last.state["precision"] if last is not None else "bf16" if half else "fp32"
        self.precision = begun if self.config.precision == "auto" else self.config.precision
        self.built.module.to(self.device)
        if last is not None:
            last.load_draft(self.built, self.ranks)
        self.sharded: Any = None  # also where a single rank is to shard it
        if self.config.shard:
            evaluated, whole = self.evaluate is not None, checkpoint.trained_tensors
            self.sharded = self.ranks.shard(self.hook, self.built, self.options, evaluated, whole)
        self.make_optimizer()
        saved = last.load_optimizer(self.optimizer, self.built.module, self.ranks) if last else {}
        self.seed(saved)
        self.compiled = Compiled(self.built.module) if self.wants_compiling() else None
        self.open_log()
        hooks = ("gradients_ready", "step_finished", "evaluated")
        self.hooks_to_ask = self.ranks.on_rank0(  # where observers are
            lambda: [name for name in hooks if getattr(self.observers, name).get_hookimpls()]
        )

    def make_optimizer(self) -> None:
        """Make the algorithm's optimizer, or AdamW, and the gradients that it reads."""
        config, built, options = self.config, self.built, self.options
        self.lr = config.lr or built.defaults.lr
        self.clip = config.clip or built.defaults.clip
        warmup = config.warmup_ratio
        self.warmup_ratio = built.defaults.warmup_ratio if warmup is None else warmup
        settings: Any = {"weight_decay": config.weight_decay, "betas": config.betas}
        groups = [{"lr": self.lr, **group} for group in built.parameter_groups]
        made = self.hook.optimizer(draft=built, lr=self.lr, options=options, **settings)
        self.optimizer = made or build_optimizer(groups, **settings)
        self.fresh_groups = [dict(group) for group in self.optimizer.param_groups]
        self.parameters = [p for group in self.fresh_groups for p in group["params"]]
        if odd := {p for group in groups for p in group["params"]} ^ set(self.parameters):
            names = (name for name, p in built.module.named_parameters() if p in odd)
            raise DraftcoreError(f"optimizer and parameter groups differ in {', '.join(names)}")
        self.gradients = Gradients(self.parameters)
        if self.ranks.size > 1 and not self.sharded:
            self.gradients.view_in_buffer(0)

    def seed(self, saved: Mapping[str, Tensor]) -> None:
        """Take over the random state that was saved; else each rank has one of its own."""
        if self.ranks.rank:  # rank 0 keeps the random state that it has
            mixed = f"{self.config.seed} {self.ranks.rank} {self.step}".encode()
            torch.manual_seed(int.from_bytes(hashlib.sha256(mixed).digest()[:4], "little"))
        self.random = RandomState(self.device, saved)
        self.rng_after_step = self.random.tensors

    def wants_compiling(self) -> bool:
        """Say whether the draft is to be compiled, as that is asked for, or repays."""
        steps, asked = self.plan.total_steps - self.step, self.config.compile
        able = "compile" in self.draft.algorithm.capabilities and not self.config.shard
        if asked is True and not able:
            name = self.draft.algorithm.offer.name
            raise UsageError(
                f"train.compile is on, and the algorithm {name!r} has no capability compile, "
                "or train.shard is on\n  leave it out: auto compiles what can be"
            )
        repays = self.device.type == "cuda" and steps >= MIN_STEPS_TO_COMPILE
        return able and bool(repays if asked == "auto" else asked)

    def open_log(self) -> None:
        """Open metrics.jsonl, on rank 0, and what writes checkpoints."""
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future[Path] | None = None  # of a checkpoint; by rank 0
        if self.ranks.rank == 0:
            for folder in [*self.checkpoints.glob(STEPS), *self.checkpoints.glob(f".{STEPS}.tmp")]:
                if not (folder / checkpoint.MARK).exists():  # its process was killed meanwhile
                    shutil.rmtree(folder)
        log = Path(os.devnull) if self.ranks.rank else self.draft.folder / "metrics.jsonl"
        self.log = MetricsLog(log, self.step)

    def accumulate(self, batch: Loaded | None, *, last: bool) -> None:
        """Add a batch's gradient to the step's; none, or one whose rows were all skipped, adds nothing."""
        self.current_step.samples = batch.samples if batch is not None else ()
        if batch is not None and batch.samples:
            output = self.forward_backward(batch.samples, last=last)
            self.current_step.outputs.append((batch.planned, output))
        elif self.sharded:  # all ranks call FSDP alike: here on a row without loss
            forms = self.request.feature_specs(self.draft.run.width).items()
            features = {n: torch.zeros(8, s, dtype=getattr(torch, d)) for n, (s, d) in forms}
            tokens, mask = torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.bool)
            nothing = Sample(algorithm.SampleId("", 1), tokens, mask, features)
            self.forward_backward([nothing], last=last)

    def forward_backward(self, samples: Sequence[Sample], *, last: bool) -> StepOutput:
        """Compute a batch's loss and gradient: bf16 compute over fp32 masters, or fp32.

        Uncompiled where the compiler fails.
        """
        plan, epoch = self.plan, self.step // self.plan.steps_per_epoch + 1
        context = StepContext(self.step + 1, plan.total_steps, self.config.seed, epoch=epoch)
        asked = {"context": context, "options": self.options}
        half = torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16")
        try:
            with self.random:
                batch = collate(self.draft, self.request, samples, self.device)
                with half:
                    if self.sharded:
                        output: StepOutput = self.sharded.loss(batch, context, last=last)
                    else:
                        output = self.hook.forward_loss(draft=self.built, batch=batch, **asked)
                terms = weighted(output)
                for term, (numerator, _) in enumerate(terms):
                    if term:
                        self.gradients.view_in_buffer(term)
                    if numerator.requires_grad:
                        more = term + 1 < len(terms)
                        numerator.backward(retain_graph=more)  # type: ignore[no-untyped-call]
                if len(terms) > 1:
                    self.gradients.view_in_buffer(0)
        except Exception as error:  # no gradient was added: the whole forward is one graph
            if self.compiled is None or not self.compiled.give_up(error):
                raise
            return self.forward_backward(samples, last=last)
        return dataclasses.replace(output, terms=[(top.detach(), below, 1) for top, below in terms])

    def update(self, terms: int) -> None:
        """Take the step on the device; on some rank the loss has so many terms, if it has several.

        One that has nothing to learn from, or a gradient that is not finite, changes nothing there. An
        optimizer that cannot leave out a step by itself is waited for, and raises what `report` would.
        """
        step, self.current_step = self.current_step, Step()
        self.previous_step, self.rng_after_step = step, self.random.tensors
        sums = totals(output for _, output in step.outputs)
        nothing = torch.zeros(2, dtype=torch.double, device=self.device)
        below = torch.stack([sums.get(term, nothing)[1] for term in range(max(1, terms))])
        divisor = self.gradients.all_reduce(below, self.ranks)
        lr, *group_rates = self.rates()
        shown = self.show_gradients(divisor) if "gradients_ready" in self.hooks_to_ask else {}
        norm = scale_and_clip(self.parameters, divisor, self.clip)
        sums["grad_norm"] = torch.stack([norm.double(), (divisor > 0).double()])
        step.read = fetch(sums)
        step.metrics = {**shown, "loss": 0.0, "grad_norm": 0.0, "lr": lr}
        if self.compiled is not None:
            step.metrics["compilations"] = self.compiled.compilations
        self.step += 1
        step.due = 0 in (self.step % self.config.checkpoint_every, self.step % self.eval_every)
        for group, rate in zip(self.optimizer.param_groups, group_rates, strict=True):
            group["lr"] = rate
        good = norm.isfinite() & (divisor > 0)
        # As torch's GradScaler asks: it leaves out a step by itself, where it is told to.
        leaves_out = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        if leaves_out:
            vars(self.optimizer).update(grad_scale=None, found_inf=(~good).float())
        if leaves_out or good:
            self.optimizer.step()
        elif divisor > 0:
            self.refuse()
        self.gradients.clear(self.optimizer)

    def show_gradients(self, divisor: Tensor) -> dict[str, float]:
        """Let observers see copies of the gradients, divided; returns the metrics they make of them."""
        if not (below := float(divisor)) > 0:
            return {}
        named = self.built.module.named_parameters()
        copies = {name: full(p.grad / below) for name, p in named if p.grad is not None}
        where = {"step": self.step + 1, "draft": self.label}
        answers = self.observers.gradients_ready(gradients=copies, **where)
        return {name: float(value) for metrics in answers for name, value in metrics.items()}

    def rates(self) -> list[float]:
        """Return the step's learning rate: the run's, and that of each group of the optimizer."""
        shape: Any = {"total_steps": self.plan.total_steps, "warmup_ratio": self.warmup_ratio}
        factor = self.hook.schedule(step=self.step + 1, options=self.options, **shape)
        peaks = self.lr, *(float(group["lr"]) for group in self.fresh_groups)
        if factor is not None:
            return [factor * peak for peak in peaks]
        shape["schedule"] = self.config.schedule
        return [learning_rate(self.step, peak=peak, **shape) for peak in peaks]

    def report(self, sums: Sequence[Sums], timing: Mapping[str, float]) -> Stop | None:
        """Write the metrics of the step before; save and evaluate where it is time to.

        Returns what an observer answered to stop the draft, on all ranks. Raises DraftcoreError where
        the gradient was not finite; the weights are as before.
        """
        self.metrics, self.evaluation = {**self.previous_step.metrics, **ratios(sums), **timing}, ""
        if self.step == 1 and self.metrics["loss"] == self.metrics["grad_norm"] == 0:
            with self.ranks.raise_on_all():
                # The draft's own vocabulary may lack their best tokens: the masks are asked.
                samples = self.previous_step.samples
                asked = self.draft, self.request, samples, self.device
                if samples and not collate(*asked).loss_mask_BT.any():
                    raise DraftcoreError(
                        "the rows of the first step teach nothing: none of their tokens counts\n"
                        "  `draftcore data show` marks what is learned; last tokens teach nothing"
                    )
        epoch = self.metrics["epoch"] = (self.step - 1) // self.plan.steps_per_epoch + 1
        self.metrics["tokens_per_second"] = timing["tokens"] / timing["seconds"]
        if self.device.type == "cuda":
            self.metrics["memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        if not math.isfinite(self.metrics["grad_norm"]):
            self.refuse()
        self.previous_step = Step()
        if self.step % self.config.log_every == 0 or self.step == 1:
            self.log.write({"step": self.step, "time": time.time(), **self.metrics})
        where = {"step": self.step, "draft": self.label}
        answers = self.observers.step_finished(metrics=self.metrics, **where)
        evaluate = self.evaluate if self.step % self.eval_every == 0 else None
        by_default = evaluate and not self.config.eval_every  # an epoch's end may be the best
        if by_default or self.step % self.config.checkpoint_every == 0:
            self.save()
        if evaluate is not None:
            whole = self.sharded.whole() if self.sharded else self.built
            context = StepContext(self.step, self.plan.total_steps, self.config.seed, False, epoch)
            report = self.ranks.on_rank0(lambda: evaluate(whole, context))
            decoded = self.config.eval_prompts and "acceptance_length" in report
            measure = "acceptance_length" if decoded else "loss"
            self.held_out = self.step, measure, report.get(measure, math.nan)
            self.log.write({"step": self.step, "time": time.time(), "evaluation": report})
            self.evaluation = f"{self.label} step {self.step}: held-out {in_words(report)}".lstrip()
            answers = answers + self.observers.evaluated(report=report, **where)
        if self.hooks_to_ask:  # by rank 0, where observers are
            (answers, *_) = self.ranks.all_gather(answers)
        return next(iter(answers), None)

    def refuse(self) -> None:
        """Raise for a gradient that is not finite, naming the rows at fault.

        Of the batch that is still in memory single rows are found, of any other the batch.
        """
        self.step -= 1
        step, guilty = self.previous_step, list[str]()
        samples = () if self.sharded else step.samples
        for planned, output in step.outputs[:-1] if samples else step.outputs:
            if not all(bool(numerator.isfinite()) for numerator, *_ in output.terms):
                guilty.append(f"one of the rows {list(planned.rows)}")
        for sample in samples:
            self.gradients.clear(self.optimizer)
            self.forward_backward([sample], last=True)
            grads = [p.grad for p in self.parameters if p.grad is not None]
            if not all_finite(self.gradients.buffers or grads):
                row = self.plan.feature_ids.index(sample.id.feature_id)
                guilty.append(f"row {row} (sample {sample.id.feature_id})")
        named = [name for names in self.ranks.all_gather(guilty) for name in names]
        with self.ranks.raise_on_all():
            raise DraftcoreError(
                f"the gradient of step {self.step + 1} is not finite; the weights were not changed\n"
                f"  from: {', '.join(named) or 'no single row; the step as a whole'}\n"
                "  look at these rows; a lower train.lr or train.precision=fp32 helps where it is not "
                "the data"
            )

    def save(self, stopped: Stop | None = None) -> None:
        """Copy where the draft stands, and why if it was `stopped`, for a checkpoint; once per step.

        Training goes on while rank 0 writes it, up to the next one.
        """
        if self.saved_step == self.step and stopped is None:
            return
        self.finish_pending_save()
        self.require_sane_weights()
        module, groups, rank = self.built.module, self.fresh_groups, self.ranks.rank
        weights = checkpoint.trained_tensors(self.built, rank)
        tensors, numbers = checkpoint.optimizer_state(module, self.optimizer, groups, rank)
        for other, states in enumerate(self.ranks.all_gather(self.rng_after_step)):
            tensors |= {f"{name}.{other}" if other else name: t for name, t in states.items()}
        state = {
            **self.about,
            "step": self.step,
            "total_steps": self.plan.total_steps,
            "samples_seen": self.plan.rows_before(self.step),
            "plan": self.plan.key,
            "accumulate": self.plan.accumulate,
            "precision": self.precision,
            "config": self.draft.config.model_dump(mode="json"),
            "draft": dict(self.built.config),
            "skipped": sorted(self.skipped.items()),
            "optimizer": numbers,
            "stopped": stopped and stopped.reason,
        }
        self.saved_step, self.writing = self.step, Future()
        if rank == 0:
            contents = weights, tensors, state, self.config.keep_checkpoints
            self.writing = self.writer.submit(checkpoint.save, self.checkpoints, *contents)

    def require_sane_weights(self) -> None:
        """Raise DraftcoreError, on all ranks, for weights that are not finite or absurdly large."""
        with self.ranks.raise_on_all():
            parts = [local(p.detach()) for p in self.parameters]  # of a shard it may be empty
            largest = float(largest_magnitude([part for part in parts if part.numel()]))
            if not largest <= MAX_WEIGHT:
                raise DraftcoreError(
                    f"a weight at step {self.step} is {largest:g}: the weights have diverged, and this "
                    "step is not saved\n"
                    "  earlier checkpoints are intact; lower train.lr and start the same command"
                )

    def finish_pending_save(self) -> None:
        """Wait until the checkpoint is whole that is being written, if one is, and tell observers.

        It may be the best so far. Raises DraftcoreError where it cannot be written.
        """
        writing, self.writing = self.writing, None
        if writing is not None:
            folder, (evaluated, measure, value) = self.ranks.on_rank0(writing.result), self.held_out
            if evaluated == self.saved_step and not self.ranks.rank:
                checkpoint.name_best(folder, measure, value, self.about["held_out"])
            self.observers.checkpoint_saved(folder=folder, step=self.saved_step, draft=self.label)
