"""The training loop: load, forward, backward, clip, step, report.

Read `train` first. Every topology trains through it; what differs lies in the loader. Batches are
outside and drafts inside: each batch is held until the last draft's backward. Several drafts train
side by side, each as if it were alone: what a step of one depends on, its own random state included,
lies in its `Trainer`. A loss is one numerator and one denominator, or several such terms: both are
summed over the batches of a step and over the ranks, and the gradients divided once, so accumulation
and ranks do not change the update. Of several terms each has a buffer of gradients.

The host runs a step ahead of the device: it reads the numbers of a step, and tells of it, when the
forward and backward of the next one are launched and its update is not. So weights are then those that
are told of, and what was launched is thrown away where training ends there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    Stop,
)
from draftcore.contracts.capture import FeatureRequest
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError
from draftcore.tensors import all_finite, largest_magnitude
from draftcore.training import checkpoint
from draftcore.training.compiled import WORTH, Compiled
from draftcore.training.distributed import Ranks, lay_gradients
from draftcore.training.metrics import MetricsLog, Sums, fetch, ratios, totals, weighted
from draftcore.training.optimizer import (
    build_optimizer,
    full,
    learning_rate,
    local,
    scale_and_clip,
)
from draftcore.training.progress import Progress

ONCE = 0.5  # seconds in which signals that ask to stop are one
MOST = 1e6  # magnitude of a weight: what learns stays orders below, and a step from beyond may fail


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
    compiles: bool = False  # the algorithm has the capability

    def collate(self, samples: Sequence[Sample], device: torch.device) -> DraftBatch:
        """Batch samples on a device, with the features that this draft asked for and no others'.

        They are moved before they are padded: a host took an eighth of a GPU's step for that.
        """
        own = []
        for sample in samples:
            asked = self.request.select(sample.features).items()
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in asked}
            own.append(dataclasses.replace(sample, features=moved))
        batch: DraftBatch = self.hook.collate(samples=own, options=self.options)
        return dataclasses.replace(batch.to(device), host_mask_BT=batch.loss_mask_BT)


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
) -> tuple[str, dict[str, Exception], dict[str, Stop]]:
    """Train until the plan ends, `stop` says so or observers have stopped every draft.

    Returns `complete`, `stopped`, `interrupted` or `failed`, and by label the errors of drafts that
    failed and what stopped a draft: one of several that ends leaves the others alone. `let_go` ends
    the use of the batch that was yielded last; `finished` is told of each position up to which no rank
    needs a batch any more; `skipped` takes in the rows that other ranks skip.
    """
    active, failed, ended = list(trainers), dict[str, Exception](), dict[str, Stop]()
    at, total, stopped = min(trainer.step for trainer in active), plan.total_steps, False

    @contextmanager
    def apart(trainer: Trainer) -> Iterator[None]:
        """Let one of several drafts fail alone."""
        try:
            yield
        except DraftcoreError as error:
            if not trainer.label or error is not ranks.met:
                raise
            active.remove(trainer)
            failed[trainer.label] = error
            trainer.settle()

    spent = dict[str, float]()  # on the step before
    every = active[0].config.log_every
    shown = Progress(total, at, every=every, shown=ranks.rank == 0, beside=beside)
    with ExitStack() as stack, shown as progress:
        for trainer in trainers:
            stack.enter_context(trainer.writer)  # which is waited for, however training ends
        while any(t.taken.metrics for t in active) or (at < total and active and not stopped):
            ahead = at < total and not stopped and not any(t.taken.due for t in active)
            step = plan.step(at) if ahead else ()
            stepping = [trainer for trainer in active if step and trainer.step == at]
            known, began, waited, missing = len(skipped), time.perf_counter(), 0.0, False
            own, passes = step[ranks.rank :: ranks.size], -(-len(step) // ranks.size)
            for place in range(passes):
                batch = None
                if place < len(own) and not missing:
                    asked = time.perf_counter()
                    batch = next(batches, None)
                    waited += time.perf_counter() - asked
                    missing = batch is None  # asked to stop while it waited for features
                for trainer in stepping:
                    trainer.accumulate(batch, last=place == passes - 1)
            new = dict(list(skipped.items())[known:])
            sums = {t.label: (len(t.flats), t.taken.read()) for t in active}  # of the step before
            written = [t.label for t in active if t.writing is not None and t.writing.done()]
            said = ranks.agree((missing, stop(), new, sums, written))
            lacking, stops, reasons, told, (written, *_) = zip(*said, strict=True)
            for theirs in filter(None, reasons):
                skipped.add(theirs)
            if not step:  # that was a wait alone
                spent["seconds"] += time.perf_counter() - began
            for trainer in [t for t in active if t.label in written]:
                with apart(trainer):
                    trainer.settle()
            reporting = [t for t in active if t.taken.metrics]
            for trainer in reporting:
                with apart(trainer):
                    answer = trainer.report([theirs[trainer.label][1] for theirs in told], spent)
                    if answer is not None and at < total:
                        trainer.save(answer)
                        trainer.settle()
                        active.remove(trainer)
                        ended[trainer.label] = answer
                    if trainer.evaluation:
                        progress.tell(f"{trainer.label} step {at}: {trainer.evaluation}".lstrip())
            if reporting:
                progress.show(at, {t.label: t.metrics for t in active if t.metrics})
            stopped = stopped or any(stops)
            if any(lacking) or not active:
                break  # and the step is taken by nobody
            for trainer in [t for t in stepping if t in active]:
                with apart(trainer):
                    trainer.update(max(theirs[trainer.label][0] for theirs in told))
            if step:
                let_go()
                finished(step[-1].position + 1)
                at += 1
                tokens = sum(int(plan.lengths[list(batch.rows)].sum()) for batch in step)
                spent = {"fetch_seconds": waited, "seconds": time.perf_counter() - began}
                spent["tokens"] = tokens
        for trainer in list(active):
            with apart(trainer):
                trainer.save()
                trainer.settle()
    if at < total and active:
        return "interrupted", failed, ended
    return "failed" if failed else "stopped" if ended else "complete", failed, ended


@dataclasses.dataclass
class Step:
    """What this rank had of a step, until observers are told of it; a step that was taken has metrics."""

    done: list[tuple[PlannedBatch, StepOutput]] = dataclasses.field(default_factory=list)
    samples: Sequence[Sample] = ()  # of the last batch, to be named where they do harm
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # known without a wait
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
    """One draft in training, from its `last` checkpoint on."""

    setup: DraftSetup
    built: Draft
    ranks: Ranks
    plan: Plan
    skipped: Mapping[int, str]
    observers: Any
    evaluate: Callable[[Draft, StepContext], dict[str, Any]] | None  # on rank 0
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

            self.sharded = Sharded(setup.hook, built, setup.options, ranks, bool(self.evaluate))
        defaults, warmup = built.defaults, self.config.warmup_ratio
        self.lr = self.config.lr or defaults.lr
        self.clip = self.config.clip or defaults.clip
        self.warmup = defaults.warmup_ratio if warmup is None else warmup
        given: Any = {"weight_decay": self.config.weight_decay, "betas": self.config.betas}
        own = setup.hook.optimizer(draft=built, lr=self.lr, options=setup.options, **given)
        groups = [{"lr": self.lr, **group} for group in built.parameter_groups]
        self.optimizer = own or build_optimizer(groups, **given)
        self.fresh = [dict(group) for group in self.optimizer.param_groups]
        self.parameters = [p for group in self.fresh for p in group["params"]]
        if odd := {p for group in groups for p in group["params"]} ^ set(self.parameters):
            names = (name for name, p in built.module.named_parameters() if p in odd)
            raise DraftcoreError(f"optimizer and parameter groups differ in {', '.join(names)}")
        self.flats = list[Tensor]()  # the gradients of each term, of replicas or of several terms
        if ranks.size > 1 and not self.sharded:
            lay_gradients(self.parameters, self.flats)
        answering = ("gradients_ready", "step_finished", "evaluated")
        self.heard = ranks.first(
            lambda: [name for name in answering if getattr(self.observers, name).get_hookimpls()]
        )
        self.step, self.metrics, states = 0, dict[str, float](), dict[str, Tensor]()
        self.evaluation = ""  # what is said of the one that the last report made
        if last is not None:
            states = last.load_optimizer(self.optimizer, built.module)
            self.step = last.step
        if ranks.rank:  # rank 0 keeps the random state that it has
            mixed = f"{self.config.seed} {ranks.rank} {self.step}".encode()
            torch.manual_seed(int.from_bytes(hashlib.sha256(mixed).digest()[:4], "little"))
        self.compiled, asked = None, self.config.compile
        repays = self.device.type == "cuda" and self.plan.total_steps - self.step >= WORTH
        if self.setup.compiles and (repays if asked == "auto" else asked):
            self.compiled = Compiled(built.module)
        self.random = RandomState(self.device, states)
        self.settled = self.random.tensors  # as the last finished step left it
        self.saved_step = self.step
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future[Path] | None = None  # of a checkpoint; by rank 0
        self.now, self.taken = Step(), Step()  # the step so far; the one before
        for left in self.checkpoints.glob("*step-*") if not ranks.rank else ():
            if not (left / checkpoint.MARK).exists():  # of a process that was killed as it wrote
                shutil.rmtree(left)
        log = Path(os.devnull) if ranks.rank else setup.folder / "metrics.jsonl"
        self.log = MetricsLog(log, self.step)

    def context(self, step: int, *, training: bool) -> StepContext:
        """Say where a step stands, counted from 1."""
        epoch = (step - 1) // self.plan.steps_per_epoch + 1
        return StepContext(step, self.plan.total_steps, self.config.seed, training, epoch)

    def accumulate(self, batch: Batch | None, *, last: bool) -> None:
        """Add a batch's gradient to the step's; none, or one whose rows were all skipped, adds nothing."""
        self.now.samples = batch.samples if batch is not None else ()
        if batch is not None and batch.samples:
            self.now.done.append((batch.planned, self.backward(batch.samples, last=last)))
        elif self.sharded:  # all ranks call FSDP alike: here on a row without loss
            forms = self.setup.request.feature_specs(self.setup.about["width"]).items()
            features = {n: torch.zeros(8, s, dtype=getattr(torch, d)) for n, (s, d) in forms}
            tokens, mask = torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.bool)
            self.backward([Sample(SampleId("", 1), tokens, mask, features)], last=last)

    def backward(self, samples: Sequence[Sample], *, last: bool) -> StepOutput:
        """Compute a batch's loss and gradient, uncompiled where the compiler fails."""
        try:
            return self.compute(samples, last=last)
        except Exception as error:  # no gradient was added: the whole forward is one graph
            if self.compiled is None or not self.compiled.give_up(error):
                raise
        return self.compute(samples, last=last)

    def compute(self, samples: Sequence[Sample], *, last: bool) -> StepOutput:
        """Compute a batch's loss and gradient: bf16 compute over fp32 masters, or fp32."""
        context = self.context(self.step + 1, training=True)
        half = torch.autocast(self.device.type, torch.bfloat16, self.config.precision == "bf16")
        with self.random:
            batch = self.setup.collate(samples, self.device)
            with half:
                if self.sharded:
                    output = self.sharded.loss(batch, context, last=last)
                else:
                    hook, draft = self.setup.hook, self.built
                    output = hook.forward_loss(
                        draft=draft, batch=batch, context=context, options=self.setup.options
                    )
            terms = weighted(output)
            for at, (numerator, _) in enumerate(terms):
                if at:
                    lay_gradients(self.parameters, self.flats, at)
                if numerator.requires_grad:
                    more = at + 1 < len(terms)
                    numerator.backward(retain_graph=more)  # type: ignore[no-untyped-call]
            if len(terms) > 1:
                lay_gradients(self.parameters, self.flats)
        return dataclasses.replace(
            output, terms=[(top.detach(), bottom, 1) for top, bottom in terms]
        )

    def update(self, terms: int) -> None:
        """Take the step on the device; on some rank the loss has so many terms, if it has several.

        One that has nothing to learn from, or a gradient that is not finite, changes nothing there. An
        optimizer that cannot leave out a step by itself is waited for, and raises what `report` would.
        """
        sums = totals(output for _, output in self.now.done)
        divisor = self.join_gradients(sums, terms)
        lr, *rates = self.rates()
        seen = self.show_gradients(divisor) if "gradients_ready" in self.heard else {}
        norm = scale_and_clip(self.parameters, divisor, self.clip)
        sums["grad_norm"] = torch.stack([norm.double(), (divisor > 0).double()])
        self.taken, self.now, self.settled = self.now, Step(), self.random.tensors
        self.taken.read = fetch(sums)
        self.taken.metrics = {**seen, "loss": 0.0, "grad_norm": 0.0, "lr": lr}
        if self.compiled is not None:
            self.taken.metrics["compilations"] = self.compiled.compilations
        self.step += 1
        every = self.config.checkpoint_every, self.config.eval_every
        self.taken.due = any(n and self.step % n == 0 for n in every)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        good = norm.isfinite() & (divisor > 0)
        skips = getattr(self.optimizer, "_step_supports_amp_scaling", False)  # as GradScaler asks
        if skips:
            vars(self.optimizer).update(grad_scale=None, found_inf=(~good).float())
        if skips or good:
            self.optimizer.step()
        elif divisor > 0:
            self.refuse()
        self.clear_gradients()

    def join_gradients(self, sums: Mapping[str | int, Tensor], terms: int) -> Tensor:
        """Add up the gradients of all ranks and of all terms; returns what still divides them.

        That is 0 where no term has a denominator; one that has none adds nothing.
        """
        nothing = torch.zeros(2, dtype=torch.double, device=self.device)
        belows = torch.stack([sums.get(at, nothing)[1] for at in range(max(1, terms))])
        if terms > max(1, len(self.flats)):  # terms of other ranks alone
            lay_gradients(self.parameters, self.flats, terms - 1)
            lay_gradients(self.parameters, self.flats)
        for summed in (belows, *self.flats) if self.ranks.size > 1 else ():
            dist.all_reduce(summed, group=self.ranks.work)
        if len(self.flats) < 2:
            return belows.sum().float()
        for at, (flat, below) in enumerate(zip(self.flats, belows, strict=False)):
            flat.div_(below).masked_fill_(below <= 0, 0.0)
            if at:
                self.flats[0].add_(flat)
        return (belows > 0).any().float()

    def show_gradients(self, divisor: Tensor) -> dict[str, float]:
        """Let observers see copies of the gradients, divided; returns the metrics they make of them."""
        if not (below := float(divisor)) > 0:
            return {}
        named = self.built.module.named_parameters()
        copies = {name: full(p.grad / below) for name, p in named if p.grad is not None}
        told = {"step": self.step + 1, "draft": self.label}
        found = self.observers.gradients_ready(gradients=copies, **told)
        return {name: float(value) for made in found for name, value in made.items()}

    def rates(self) -> list[float]:
        """Return the step's learning rate: the run's, and that of each group of the optimizer."""
        steps, schedule, ratio = self.plan.total_steps, self.config.schedule, self.warmup
        factor = self.setup.hook.schedule(
            step=self.step + 1, total_steps=steps, warmup_ratio=ratio, options=self.setup.options
        )
        return [
            learning_rate(self.step, steps, peak=peak, warmup_ratio=ratio, schedule=schedule)
            if factor is None
            else factor * peak
            for peak in (self.lr, *(float(group["lr"]) for group in self.fresh))
        ]

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.flats)
        for flat in self.flats[1:]:
            flat.zero_()

    def report(self, sums: Sequence[Sums], spent: Mapping[str, float]) -> Stop | None:
        """Write the metrics of the step that was taken; save and evaluate where it is time to.

        Returns what an observer answered to stop the draft, on all ranks. Raises DraftcoreError where
        the gradient was not finite; the weights are as before.
        """
        self.metrics, self.evaluation = {**self.taken.metrics, **ratios(sums), **spent}, ""
        self.metrics["epoch"] = self.context(self.step, training=True).epoch
        self.metrics["tokens_per_second"] = spent["tokens"] / spent["seconds"]
        if self.device.type == "cuda":
            self.metrics["memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        if not math.isfinite(self.metrics["grad_norm"]):
            self.refuse()
        self.taken = Step()
        if self.step % self.config.log_every == 0 or self.step == 1:
            self.log.write({"step": self.step, "time": time.time(), **self.metrics})
        told = {"step": self.step, "draft": self.label}
        answers = self.observers.step_finished(metrics=self.metrics, **told)
        if self.step % self.config.checkpoint_every == 0:
            self.save()
        evaluate = self.evaluate
        if evaluate is not None and self.step % (self.config.eval_every or 1) == 0:
            whole = self.sharded.whole() if self.sharded else self.built
            context = self.context(self.step, training=False)
            report = self.ranks.first(lambda: evaluate(whole, context))
            self.log.write({"step": self.step, "time": time.time(), "evaluation": report})
            self.evaluation = "  ".join(f"{name} {value:.4g}" for name, value in report.items())
            answers = answers + self.observers.evaluated(report=report, **told)
        if self.heard:  # by rank 0, where observers are
            (answers, *_) = self.ranks.agree(answers)
        return next(iter(answers), None)

    def refuse(self) -> None:
        """Raise for a gradient that is not finite, naming the rows at fault.

        Of the batch that is still held single rows are found, of any other the batch.
        """
        self.step -= 1
        guilty, held, done = [], () if self.sharded else self.taken.samples, self.taken.done
        for planned, output in done[:-1] if held else done:
            if not all(bool(numerator.isfinite()) for numerator, *_ in output.terms):
                guilty.append(f"one of the rows {list(planned.rows)}")
        for sample in held:
            self.clear_gradients()
            self.backward([sample], last=True)
            grads = self.flats or [p.grad for p in self.parameters if p.grad is not None]
            if not all_finite(grads):
                row = self.plan.feature_ids.index(sample.id.feature_id)
                guilty.append(f"row {row} (sample {sample.id.feature_id})")
        named = [one for said in self.ranks.agree(guilty) for one in said]
        with self.ranks.together():
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
        self.settle()
        with self.ranks.together():
            parts = [local(p.detach()) for p in self.parameters]  # of a shard it may be empty
            most = float(largest_magnitude([part for part in parts if part.numel()]))
            if not most <= MOST:
                raise DraftcoreError(
                    f"a weight at step {self.step} is {most:g}: the draft is lost and is not saved\n"
                    "  earlier checkpoints are intact; lower train.lr and start the same command"
                )
        weights = checkpoint.trained_tensors(self.built, self.ranks.rank)
        kept, numbers = checkpoint.optimizer_state(
            self.built.module, self.optimizer, self.fresh, self.ranks.rank
        )
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
            "optimizer": numbers,
            "stopped": stopped and stopped.reason,
        }
        self.saved_step, self.writing = self.step, Future()
        if not self.ranks.rank:
            given = weights, kept, state, self.config.keep_checkpoints
            self.writing = self.writer.submit(checkpoint.save, self.checkpoints, *given)

    def settle(self) -> None:
        """Wait until the checkpoint is whole that is being written, if one is, and tell of it.

        Raises DraftcoreError where it cannot be written.
        """
        writing, self.writing = self.writing, None
        if writing is not None:
            folder = self.ranks.first(writing.result)
            told = {"step": self.saved_step, "draft": self.label}
            self.observers.checkpoint_saved(folder=folder, **told)


asked_to_stop: list[float] = []  # when, by these signals, for whoever waits for something else


@contextmanager
def stop_on_signal() -> Iterator[list[float]]:
    """Collect when signals ask to stop, so that a step ends whole; a later one acts at once.

    A terminal that hangs up asks as well, and what is printed then goes nowhere. The kernel tells of
    the death of a parent once for each of its threads.
    """
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    heard = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
        heard.remove(signal.SIGHUP)
    with ExitStack() as before:

        def note(number: int, _: object) -> None:
            asked_to_stop.append(time.monotonic())
            if asked_to_stop[-1] - asked_to_stop[0] > ONCE:
                before.close()
                signal.raise_signal(number)
            for fd in terminals if number == signal.SIGHUP else ():
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)

        for one in heard:
            before.callback(signal.signal, one, signal.signal(one, note))
        try:
            yield asked_to_stop
        finally:
            asked_to_stop.clear()
