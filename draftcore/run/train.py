"""The program `train`: what is not trained yet of a run's drafts is trained, from plan to checkpoints.

`train` reads from top to bottom: open the parts of a trainer, say what there is to do, open where batches
come from, loop, say what came of it.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from draftcore.contracts.algorithm import DataSummary, Stop
from draftcore.contracts.capture import CaptureBatch
from draftcore.contracts.run import LOCK, BatchSource, Loaded, Needed, PlannedBatch, Samples
from draftcore.data.plan import Plan
from draftcore.data.samples import batch_of
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError, UsageError, plural
from draftcore.features.checks import ref_error
from draftcore.features.loader import Captured, Loader, open_refs, stored
from draftcore.files import hold, write_sealed
from draftcore.listing import from_here
from draftcore.phases import ended
from draftcore.plugins import catalog
from draftcore.progress import in_words
from draftcore.run import DraftRun, Role, Run, changes, differences
from draftcore.run.capture import fill_store
from draftcore.run.features import Features, make_plan, open_features, open_samples
from draftcore.run.held_out import HeldOut
from draftcore.stopping import stop_on_signal
from draftcore.tensors import resolve_device
from draftcore.training import loop
from draftcore.training.checkpoint import RUN, Checkpoint, best, read_run
from draftcore.uris import format_size

LEAST = 0.5  # of what a step takes where all is learned and nothing compiled
TEXT_BYTES = 9  # of a token in a store, beside its features


def train(run: Run, role: Role = "both", say: Callable[[str], None] = print) -> str:
    """Train what is not trained yet, and tell of it; returns `complete`, `stopped` or `interrupted`.

    Raises DraftcoreError with the errors of drafts that failed, once the others are done.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Batches differ in size, and memory freed by one has to serve the next whatever its size.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    ended("imports")
    ranks = run.ranks
    with ExitStack() as stack:
        with ranks.raise_on_all():
            if not ranks.rank:
                remedy = "wait for it to end, or set another run folder: two would undo each other"
                lock = hold(run.folder / LOCK, f"trains in {run.folder}", remedy)
                stack.callback(os.close, lock)
        parts = trainer_parts(run, role)
        plan, trainers, source = parts.plan, parts.trainers, parts.source
        say_beginning(parts, say)
        if parts.first_step >= plan.total_steps:
            return "complete"
        signals = stack.enter_context(stop_on_signal())
        stop = lambda: bool(signals)  # noqa: E731
        with ranks.raise_on_all():
            elsewhere = stack.enter_context(source.open(parts.needed())) if source else None
            batches = elsewhere or open_batches(parts, stack)
        ended("load")
        ahead = parts.prefetch if parts.features.store else 0
        loader = Loader(batches, ahead=ahead, device=trainers[0].device, stop=stop)
        stack.callback(loader.close)
        reason, failed = "failed", dict[str, Exception]()
        config = run.config.model_dump(mode="json")
        run.observers.run_started(run=run.folder, config=config, total_steps=plan.total_steps)
        try:
            reason, failed, stopped = loop.train(
                plan, trainers, loader, skipped=parts.skipped, stop=stop,
                release_batch=loader.release_batch,
                finished=elsewhere.finished if elsewhere else lambda position: None,
                status_line=elsewhere.status if elsewhere else str,
            )  # fmt: skip
            if elsewhere is not None:
                elsewhere.end("finished" if reason in ("complete", "stopped") else "failed")
        finally:
            step = max(trainer.step for trainer in trainers)
            if not ranks.rank:
                write_sealed(run.folder / RUN, {**read_run(run.folder), "ended": (reason, step)})
            run.observers.run_finished(run=run.folder, step=step, reason=reason)
    say_end(parts, reason, stopped, say)
    if failed:
        causes = "\n".join(f"{label}: {error}" for label, error in failed.items())
        with ranks.raise_on_all():
            raise DraftcoreError(f"{len(failed)} of {len(run.drafts)} drafts failed\n{causes}")
    return reason


def say_beginning(parts: TrainerParts, say: Callable[[str], None]) -> None:
    """Say whose plugins take part, where each draft stands, what it is, and how large a step is."""
    plan, total = parts.plan, parts.plan.total_steps
    ours, used = catalog.dists(), [p for t in parts.trainers for p in t.about["plugins"]]
    others = ["{name} ({dist} {version})".format_map(p) for p in used if p["dist"] not in ours]
    if others:
        say(from_here(f"plugins that are not draftcore's own: {', '.join(dict.fromkeys(others))}"))
    for draft, trainer in zip(parts.run.drafts, parts.trainers, strict=True):
        if trainer.step >= total:
            say(f"already trained: {plural(trainer.step, 'step')} in {draft.folder}")
            continue
        if trainer.step:
            say(f"{draft.prefix}resuming from step {trainer.step} of {total}")
        about = f"a draft of {trainer.built.about}, " if trainer.built.about else ""
        say(f"{draft.prefix}{about}trained in {trainer.precision} on {trainer.device}")
    if parts.first_step < total:
        batches, rows = plan.accumulate, plan.accumulate * plan.batch
        limit = f" or {batches * plan.batch_tokens:,} tokens at most" if plan.batch_tokens else ""
        say(f"a step: {plural(batches, 'batch')}, {plural(rows, 'row')}{limit}")


def say_end(
    parts: TrainerParts, reason: str, stopped: Mapping[str, Stop], say: Callable[[str], None]
) -> None:
    """Say how far each draft came, which rows were skipped, and what plugins stopped."""
    plan, skipped = parts.plan, parts.skipped
    for draft, trainer in zip(parts.run.drafts, parts.trainers, strict=True):
        if trainer.step > plan.total_steps:
            continue  # as it began
        stop, samples = stopped.get(draft.label), plan.rows_before(trainer.step)
        outcome = "complete" if reason == "stopped" and stop is None else reason
        made = f"{plural(samples, 'sample')}, checkpoints in {trainer.checkpoints}"
        say(f"{draft.prefix}{outcome}: step {trainer.step} of {plan.total_steps}, {made}")
        if named := best(trainer.checkpoints):
            say(f"{draft.prefix}best: {named['step']}, held-out {in_words(named)}")
        if stop is not None:
            say(f"{draft.prefix}stopped by the plugin {stop.plugin}: {stop.reason}")
    if skipped:
        names = ", ".join(f"row {row}" for row in list(skipped)[:8])
        were, why = "was" if len(skipped) == 1 else "were", next(iter(skipped.values()))
        say(f"{plural(len(skipped), 'row')} {were} skipped: {names}: {why}")


# ---------------------------------------------------------------- the parts of a trainer


@dataclass
class TrainerParts:
    """What trains: the plan, the drafts where they stand, and what is skipped so far.

    `prefetch` batches lie ready per rank beside the one in training. `source` brings batches where other
    processes capture.
    """

    run: Run
    features: Features
    samples: Samples
    plan: Plan
    skipped: Skipped
    prefetch: int
    source: BatchSource | None = None
    trainers: list[loop.Trainer] = field(default_factory=list)

    @property
    def first_step(self) -> int:
        """The first step that a draft has not made."""
        return min(trainer.step for trainer in self.trainers)

    def needed(self) -> Needed:
        """Return what is told to the plugin that brings batches from other processes."""
        run, features, plan, samples = self.run, self.features, self.plan, self.samples
        request, store = features.request, cast(Any, features.store)
        specs, held = request.feature_specs(run.width), (self.prefetch + 1) * run.ranks.size

        def batch_of_all(planned: PlannedBatch) -> tuple[CaptureBatch, tuple[Any, ...]]:
            masks = tuple(samples.loss_mask(row) for row in planned.rows)
            return batch_of(planned.index, planned.rows, samples), masks

        return Needed(
            request, features.provenance, store, features.keeps, plan.feature_ids, self.skipped,
            held_batches=held,
            token_bytes=request.token_bytes(run.width) + TEXT_BYTES,
            uses=lambda rank, ranks: plan.uses(self.first_step, rank, ranks),
            largest=plan.largest,
            batch_of=batch_of_all,
            open_refs=functools.partial(open_refs, store=store, names=request.names),
            ref_error=lambda batch, refs: ref_error(batch, refs, specs, features.provenance),
        )  # fmt: skip


def trainer_parts(run: Run, role: Role) -> TrainerParts:
    """Open what a trainer needs but for batches: data, plan, store, checkpoints, drafts.

    Raises UsageError for a checkpoint of another run, and for more ranks than a step has batches.
    """
    config, ranks = run.config, run.ranks
    ranks.device(config.train.device)  # one that is not here is refused before anything is opened
    run_id = ranks.on_rank0(lambda: read_run_id(run.folder))
    features = open_features(run, role)
    every, eval_set = config.train.eval_every, bool(config.data.options and run.data.eval)
    held_out = HeldOut(run, features) if (eval_set if every is None else every) else None
    samples = open_samples(run, features)
    checkpoints = [draft.checkpoint() for draft in run.drafts]
    resumed = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
    with ranks.raise_on_all():
        accumulate = batches_per_step(run, resumed)
    plan = make_plan(run, samples, accumulate)
    reasons = dict((features.manifest or {}).get("skipped", ()))
    for checkpoint in resumed:
        reasons |= {int(row): why for row, why in checkpoint.state["skipped"]}
    skipped = Skipped(reasons, rows=len(samples.feature_ids), share=config.data.max_skipped)
    prefetch = config.train.prefetch or max(2, -(-2 * config.topology.producers // ranks.size))
    parts = TrainerParts(run, features, samples, plan, skipped, prefetch)
    if role != "both" and not features.complete:
        bound = run.bind("batches", name := config.batches)
        parts.source = source = bound.hook.batches(name=name, run=run)
        if features.store is None:
            features.binding, features.store = source.open_store(parts.needed(), run_id)
    with ranks.raise_on_all():
        for draft, last in zip(run.drafts, checkpoints, strict=True):
            if last is not None:
                require_same_run(last, draft, features, plan)
    if held_out is not None:
        held_out.read(samples.summary.date)  # before what takes hours
    ended("data")
    if role == "both" and features.keeps and not features.complete:
        first = min((checkpoint.state["step"] for checkpoint in resumed), default=0)
        fill_store(run, features, samples, plan, skipped, plan.uses(first))
        ended("capture")
    open_trainers(parts, checkpoints, held_out)
    ended("draft")
    return parts


def batches_per_step(run: Run, resumed: Sequence[Checkpoint]) -> int:
    """Return how many batches make a step: as its first start said, or as many as there are ranks."""
    setting, ranks = run.config.train.accumulate, run.ranks.size
    accumulate: int = resumed[0].state["accumulate"] if resumed else setting or ranks
    if setting not in (None, accumulate):
        raise UsageError(
            f"a step of this run has {plural(accumulate, 'batch')}, and train.accumulate is now "
            f"{setting}\n  undo the change, or set another run folder to start anew"
        )
    if ranks > accumulate:
        problem = f"a step has {plural(accumulate, 'batch')}, and {ranks} ranks share it"
        remedy = "start at most as many ranks, or a new run with a higher train.accumulate"
        raise UsageError(f"{problem}\n  {remedy}")
    return accumulate


def open_trainers(
    parts: TrainerParts, checkpoints: Sequence[Checkpoint | None], held_out: HeldOut | None
) -> None:
    """Build each draft, or read it from its checkpoint, with what evaluates it in training."""
    run, features = parts.run, parts.features
    shared = [run.capture, *([features.binding] if features.binding else [])]
    for draft, checkpoint in zip(run.drafts, checkpoints, strict=True):
        data = checkpoint.state["data"] if checkpoint else parts.samples.summary.to_json()
        about = {
            "target": run.target.fingerprint(),
            "features": features.provenance,
            "data": data,
            "held_out": held_out.rows.summary.fingerprint if held_out else "",
            "plugins": run.manifest([draft], *shared),
        }
        built = draft.build(DataSummary.from_json(data))
        evaluate = functools.partial(held_out.evaluate, draft) if held_out else None
        more = about, built, parts.plan, parts.skipped, evaluate, checkpoint
        parts.trainers.append(loop.Trainer(draft, draft.request(), *more))


def require_same_run(last: Checkpoint, draft: DraftRun, features: Features, plan: Plan) -> None:
    """Refuse to go on from a checkpoint of other plugins, target, data or schedule."""
    then, target = last.state, draft.run.target.fingerprint()
    changed = list(changes(draft.config, then["config"]))
    changed += changes(draft.run.target_options, then["config"]["target"], "target.")
    if then["target"] != target:
        changed.append(f"target: weights {then['target']} then, {target} now")
    if then["plan"] != plan.key:
        changed.append("data: other samples, or another order of them")
    elif not changed and then["features"] != features.provenance:
        differ = differences(features.provenance, then["features"], "then")
        changed.append(f"features: {differ.strip()}")
    if changed:
        head = f"{last.folder} was written by a run that differs from this one"
        remedy = "undo the change to resume, or set another run folder to start anew"
        raise UsageError("\n  ".join([head, *changed, remedy]))


def read_run_id(folder: Path) -> str:
    """Return the run's id, made at the first start and kept in the run's folder."""
    known = {"run_id": uuid.uuid4().hex, **read_run(folder)}
    write_sealed(folder / RUN, known)
    return str(known["run_id"])


# ---------------------------------------------------------------- where batches come from


def open_batches(parts: TrainerParts, closing: ExitStack) -> Iterable[Loaded]:
    """Open the batches that this rank captures for itself, or reads from a store that holds all."""
    run, features, plan, skipped = parts.run, parts.features, parts.plan, parts.skipped
    uses = plan.uses(parts.first_step, run.ranks.rank, run.ranks.size)
    require_memory(parts)
    if features.store is not None:
        return stored(uses, features.store, plan, skipped, features.request.names)
    capture = run.open_capture(features.request, parts.samples)
    closing.callback(capture.close)
    return Captured(uses, capture, parts.samples, skipped)


def require_memory(parts: TrainerParts) -> None:
    """Refuse at start-up what cannot fit on the device, with the figures."""
    run, device, plan = parts.run, parts.trainers[0].device, parts.plan
    if device.type != "cuda":
        return
    places, current = (device, resolve_device(run.target.device)), torch.cuda.current_device()
    indexed = {(d.type, current if d.index is None else d.index) for d in places}
    here = parts.features.store is None and len(indexed) == 1
    target = run.target.weight_bytes() // run.target.devices if here else 0
    rows = plan.batches[plan.tokens.argmax()]
    held, step = run.step_memory(plan.lengths[list(rows)].tolist())
    held = held or 16 * sum(p.numel() for t in parts.trainers for p in t.parameters)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if (need := target + held + int(LEAST * step)) > free:
        raise UsageError(
            f"this run needs {format_size(need)} on {device}, and {format_size(free)} are free\n"
            f"  target {format_size(target)}, drafts with optimizer {format_size(held)}, and a step of "
            f"{plural(len(rows), 'row')} at least the rest\n"
            "  `draftcore plan` says what to lower; topology.producers=1 captures on another device"
        )
