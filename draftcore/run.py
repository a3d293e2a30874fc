"""A configured run: its parts, opened and checked against each other, and the verbs' work.

This is the composition root. Nothing else reads the configuration to decide what to build. A `Run` is
what every verb needs: target, drafts, runners. What more a process needs, a function opens from top
to bottom: `train` for a trainer, `produce` for a producer, `capture_all` for a capture offline.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import BaseModel

from draftcore.config import FREE, Choice, RunConfig
from draftcore.contracts.algorithm import DataSummary, Draft, Drafter
from draftcore.contracts.capture import BadRows, Capture, FeatureRequest, StoringCapture
from draftcore.contracts.channel import PATIENCE, Channel, RunEnded
from draftcore.contracts.hooks import Specs
from draftcore.contracts.runner import DecodeRunner, PhaseName, Runner, RunnerContext
from draftcore.contracts.store import DurableStore, FeatureStore, StoreAway
from draftcore.data.dataset import DataOptions, Dataset, build_dataset, read_prompts
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.samples import Samples, StoredSamples, read_summary, samples_data
from draftcore.data.skipped import Skipped
from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore.evaluation.decode import evaluate_prompts
from draftcore.evaluation.during import HeldOut, Probe
from draftcore.evaluation.report import Report
from draftcore.features.loader import (
    Captured,
    Loader,
    Queued,
    Source,
    Stored,
    batch_of,
    misfit,
    tasks_of,
)
from draftcore.features.producer import forget, produce, put_batch
from draftcore.features.provenance import choices, differences, provenance
from draftcore.features.queue import Queue, QueueService, RemoteQueue
from draftcore.files import hold, write_atomic
from draftcore.plugins.binding import Binding, bind, observers
from draftcore.plugins.catalog import lacking
from draftcore.plugins.registry import Registry
from draftcore.target import TransformersTarget
from draftcore.tensors import resolve_device
from draftcore.training.checkpoint import Checkpoint, latest
from draftcore.training.distributed import ALONE, Ranks
from draftcore.training.loop import DraftSetup, Trainer, stop_on_signal
from draftcore.training.loop import train as train_loop
from draftcore.training.progress import Progress
from draftcore.uris import format_size

Role = Literal["both", "trainer", "producer"]
LEAST_STORE = 64 << 20  # bytes
TEXT_BYTES, HEAD_BYTES = 9, 4096  # beside the features: of a token, of a row
BINDING = ("algorithm", "capture", "runner", "target", "train")  # the rest may change on resume
FAREWELL = 5.0  # seconds for producers to hear that the run is over


class Run:
    """What every verb needs of a run. On several ranks each has one."""

    def __init__(self, config: RunConfig, registry: Registry, ranks: Ranks = ALONE) -> None:
        self.config, self.registry, self.folder, self.ranks = config, registry, config.run, ranks
        target = config.target
        self.target = TransformersTarget(target.path, target.revision, target.dtype, target.device)
        self.target.prefill_with = lambda model: self.runner("prefill").prefill(model)
        self.samples: Samples | None = None  # given by a verb in the place of data.train
        self.runners: dict[PhaseName, Runner] = {}
        self._find_selected()
        labels = {label: _alone(config, label) for label in config.drafts} or {"": config}
        self.drafts = tuple(DraftRun(self, label, own) for label, own in labels.items())
        everyone = not ranks.rank
        self.observers: Specs = observers(
            registry if everyone else Registry(()), config.plugins if everyone else ()
        )

    def _find_selected(self) -> None:
        """Raise UsageError for a plugin that this run names and that is not here, before any work."""
        config, find = self.config, self.registry.find
        find("capture", config.capture.name)
        find("channel", config.channel.partition(":")[0])
        if config.store != "auto":
            find("store", config.store.partition(":")[0])
        for phase in ("prefill", "decode"):
            try:
                find("runner", getattr(config.runner, phase).name)
            except UsageError as error:
                raise UsageError(f"runner.{phase}: {error}") from None
        self.registry.extras(config.plugins)

    def chosen(self, label: str | None) -> tuple[DraftRun, ...]:
        """The draft of this label, or all. Raises UsageError for a label that is not there."""
        found = tuple(draft for draft in self.drafts if label in (None, draft.label))
        if not found:
            labels = [draft.label for draft in self.drafts if draft.label]
            raise UsageError(
                f"there is no draft {label!r}{nearest(str(label), labels)}\n"
                f"  drafts of this run: {', '.join(labels) or 'a single one, without a label'}\n"
                "  name one of them with --draft, or leave that out"
            )
        return found

    def bind(self, kind: Any, name: str) -> Binding:
        return bind(self.registry, kind, name, self.config.plugins)

    def runner(self, phase: PhaseName) -> Runner:
        """Return who runs the target in capture (prefill), or target and draft in decoding (decode)."""
        if phase not in self.runners:
            config, chosen = self.config, getattr(self.config.runner, phase)
            binding = self.bind("runner", chosen.name)
            try:
                options = binding.options(chosen.options)
            except UsageError as error:
                raise UsageError(f"runner.{phase}: {error}") from None
            decoding, longest = phase == "decode", config.data.max_length
            context = RunnerContext(
                phase=phase,
                rows=config.eval.batch if decoding else config.train.batch,
                longest=longest + config.eval.max_new_tokens * decoding,
                temperature=config.eval.temperature,
                capture=config.capture.name,
                bind=self.bind,
                offered=self.registry.offered,
            )
            self.runners[phase] = binding.hook.runner(
                name=chosen.name, context=context, options=options
            )
        return self.runners[phase]

    def manifest(self, drafts: Iterable[DraftRun], *shared: Binding) -> list[dict[str, str]]:
        """Name, dist, version and origin of every plugin that these drafts depend on."""
        chosen = [draft.algorithm.plugin for draft in drafts] + [one.plugin for one in shared]
        chosen += self.registry.extras(self.config.plugins)
        return self.registry.manifest({plugin.name: plugin for plugin in chosen}.values())

    def dataset(self, source: str, name: str, limit: int | None = None) -> Dataset:
        """Render a data source with the target's chat template, kept in the run's folder."""
        data = self.config.data
        options = DataOptions(
            max_length=data.max_length,
            last_turn_only=data.last_turn_only,
            bad_rows=data.bad_rows,
            overlong=data.overlong,
            limit=limit,
        )
        dataset = build_dataset(source, self.target.tokenizer, options, self.folder / "data" / name)
        if dataset.report.skipped and not self.ranks.rank:
            print(dataset.report.text(), file=sys.stderr)
        return dataset


class DraftRun:
    """One draft of a run: its algorithm, bound alone, its settings and its folder.

    `config` is the run's as if this draft were the only one, so that a checkpoint made beside
    others is the one that the draft alone would have made. `label` is empty for a single draft.
    """

    def __init__(self, run: Run, label: str, config: RunConfig) -> None:
        assert config.algorithm is not None
        self.run, self.label, self.config, self.folder = run, label, config, config.run
        self.choice = config.algorithm
        try:
            self.algorithm = run.bind("algorithm", self.choice.name)
        except UsageError:
            if found := latest(self.folder / "checkpoints"):  # which knows who is missing
                require_plugins(found, run.registry)
            raise
        self.options = self.algorithm.options(self.choice.options)

    def request(self) -> FeatureRequest:
        """The features that this draft trains on, in the run's dtype if it sets one."""
        hook, dtype = self.algorithm.hook, self.config.capture.dtype
        request = hook.feature_request(target=self.run.target, options=self.options)
        return request if dtype == "auto" else dataclasses.replace(request, dtype=dtype)

    def build(self, summary: DataSummary) -> Draft:
        """A fresh draft in fp32; the same seed and summary give the same bits."""
        torch.manual_seed(self.config.train.seed)
        return self.algorithm.hook.build_draft(
            target=self.run.target, data=summary, options=self.options
        )

    def setup(self, about: Mapping[str, Any]) -> DraftSetup:
        """The draft as training needs it; `about` is what its checkpoints keep of the run."""
        hook, options = self.algorithm.hook, self.options
        return DraftSetup(
            self.label, self.folder, self.config, hook, options, self.request(), about
        )

    def drafter(self, draft: Draft) -> Drafter:
        return self.algorithm.hook.drafter(
            draft=draft, target=self.run.target.model, options=self.options
        )

    def decoder(self, draft: Draft) -> DecodeRunner:
        """What decodes with the draft, whose weights may be updated in place meanwhile."""
        target, drafter = self.run.target.model, self.drafter(draft)
        return self.run.runner("decode").decode(target, drafter, draft.module)


def _alone(config: RunConfig, label: str) -> RunConfig:
    """The configuration of one of several drafts, as if it were the only one."""
    draft = config.drafts[label]
    tuning = draft.train.model_dump(exclude_unset=True)
    return config.model_copy(
        update={
            "run": config.run / label,
            "algorithm": draft.algorithm,
            "drafts": {},
            "train": config.train.model_copy(update=tuning),
        }
    )


# ---------------------------------------------------------------- features and data


@dataclass
class Features:
    """What a run captures, and where it is kept; `store` is None where features stay on the device."""

    request: FeatureRequest
    provenance: str
    capture: Binding
    options: Any
    store_binding: Binding | None = None
    store: FeatureStore | None = None
    manifest: dict[str, Any] | None = None

    @property
    def keeps(self) -> bool:
        return self.store_binding is not None and "durable" in self.store_binding.capabilities

    @property
    def complete(self) -> bool:
        return self.manifest is not None and bool(self.manifest["complete"])


def open_features(run: Run, uri: str | None) -> Features:
    """Open the store at `uri`, if any, and say what is captured.

    That is all that any draft asks for, or a durable store's wider request. Raises UsageError for
    a store that holds features which this run cannot use.
    """
    config = run.config
    requests = [draft.request() for draft in run.drafts]
    if len(dtypes := {request.dtype for request in requests}) > 1:
        raise UsageError(
            f"the drafts of this run ask for features of {' and '.join(sorted(dtypes))}\n"
            "  set capture.dtype to one type for all"
        )
    request = functools.reduce(FeatureRequest.union, requests)
    capture = run.bind("capture", config.capture.name)
    options = capture.options(config.capture.options)
    features = Features(request, "", capture, options)
    if uri is not None:
        features.store_binding, features.store = open_store(run, uri)
        if features.keeps:
            features.manifest = cast(DurableStore, features.store).read_manifest()
    if features.manifest is not None:
        data = features.manifest["request"]
        held = FeatureRequest(**{**data, "layers": tuple(data["layers"])})
        features.request = held if held.serves(request) else request
    features.provenance = provenance(run.target, features.request, config, options)
    if features.manifest is not None:
        _require_fit(features, uri)
    return features


def open_store(run: Run, uri: str) -> tuple[Binding, FeatureStore]:
    """Open a store: a durable one on each rank, any other on rank 0, whose URI the others join."""
    name = uri.partition(":")[0]
    binding = run.bind("store", name)

    def open_at(uri: str) -> FeatureStore:
        return binding.hook.feature_store(name=name, uri=uri, options=binding.options({}))

    if "durable" in binding.capabilities:
        return binding, open_at(uri)
    return binding, run.ranks.first(lambda: open_at(uri), pack=lambda one: one.uri, unpack=open_at)


def _require_fit(features: Features, uri: str | None) -> None:
    """Refuse features of another origin. A complete store may be of another cut: `train.batch`."""
    assert features.manifest is not None
    ours, theirs = features.provenance, features.manifest["provenance"]
    if ours == theirs:
        return
    if features.complete:
        one, other = json.loads(ours), json.loads(theirs)
        if {**one, "train.batch": other.get("train.batch")} == other:
            features.provenance = theirs
            return
    raise UsageError(
        f"the store {uri!r} holds features that this run cannot use\n"
        f"{differences(ours, theirs, 'in the store')}\n"
        "  use another store folder, or delete this one to capture again"
    )


def open_capture(run: Run, features: Features) -> Capture:
    """Open the run's capture, which checks itself. Raises UsageError where it cannot work."""
    run.runner("prefill").check(run.target)  # also where the backend does not ask
    return features.capture.hook.capture(
        name=run.config.capture.name,
        target=run.target,
        request=features.request,
        options=features.options,
    )


def open_samples(run: Run, features: Features) -> Samples:
    """The training samples, from the data file or, without one, from the store's manifest.

    Every rank has them; rank 0 renders first, and others find what it wrote where they see it.
    """
    config, manifest = run.config, features.manifest
    if run.samples is not None:
        return run.samples
    if config.data.train is None:
        if manifest is None or not manifest["complete"]:
            raise UsageError(
                f"data.train is not set and the store {config.store!r} holds no complete capture\n"
                "  set data.train, or point store at a folder that `draftcore capture` finished"
            )
        return StoredSamples(manifest)
    source, limit = config.data.train, config.data.limit
    found = run.ranks.first(lambda: run.dataset(source, "train", limit=limit).fingerprint)
    dataset = run.dataset(source, "train", limit=limit)
    with run.ranks.together():
        if dataset.fingerprint != found:
            raise UsageError(
                f"rank {run.ranks.rank} has other data in {source} than rank 0\n"
                "  give every rank the same file"
            )
    if manifest is not None and manifest["fingerprint"] != dataset.fingerprint:
        raise UsageError(
            f"the store {config.store!r} holds features of other data\n"
            f"  store: {manifest['fingerprint']}, {source}: {dataset.fingerprint}\n"
            "  use another store folder, or delete this one to capture again"
        )
    return dataset


def make_plan(run: Run, samples: Samples, accumulate: int = 1) -> Plan:
    train = run.config.train
    return Plan(
        samples.feature_ids,
        samples.lengths.tolist(),
        batch=train.batch,
        accumulate=accumulate,
        seed=train.seed,
        epochs=train.epochs,
        max_steps=train.max_steps,
    )


def token_bytes(run: Run, request: FeatureRequest) -> int:
    """Stored bytes of one token's features."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    return len(request.names) * int(run.target.text_config.hidden_size) * dtype.itemsize


# ---------------------------------------------------------------- offline capture


def capture_all(run: Run) -> str:
    """Capture what a durable store lacks and complete its manifest; returns a line about the result.

    Raises UsageError for a store that does not outlive the process, DraftcoreError where the disk
    cannot hold the features.
    """
    config = run.config
    if config.store == "auto":
        raise UsageError(
            "capture keeps features for a later training run, and no store is set for them\n"
            "  set store=file:FOLDER"
        )
    features = open_features(run, config.store)
    if not features.keeps:
        raise UsageError(
            f"store {config.store!r} does not outlive the processes that use it\n"
            "  set store=file:FOLDER to capture for a later training run"
        )
    with ExitStack() as stack:
        store = cast(DurableStore, features.store)
        stack.callback(store.close)
        return _fill(run, features, store, open_samples(run, features))


def _fill(run: Run, features: Features, store: DurableStore, samples: Samples) -> str:
    plan, origin = make_plan(run, samples), features.provenance
    held = store.lookup(samples.feature_ids)
    missing = [
        (index, rows)
        for index, rows in enumerate(plan.batches)
        if not all(samples.feature_ids[row] in held for row in rows)
    ]
    tokens = sum(int(plan.lengths[row]) for _, rows in missing for row in rows)
    need, free = tokens * token_bytes(run, features.request), store.stats().free_bytes
    if free is not None and need > free:
        raise DraftcoreError(
            f"the features need {format_size(need)}, {store.uri} has {format_size(free)} free\n"
            "  choose another store folder, lower data.limit, or train with store=auto, "
            "which captures on the way"
        )
    skipped = Skipped({}, rows=len(samples.feature_ids), share=run.config.data.max_skipped)
    _write_manifest(run, features, store, samples, complete=False)
    done = len(plan.batches) - len(missing)
    with Progress(len(plan.batches), done, verb="capturing") as progress, ExitStack() as stack:
        source = None
        for index, rows in missing:
            if source is None:
                source = open_capture(run, features)
                stack.callback(source.close)
            planned = PlannedBatch(index, 0, 0, 0, index, rows)
            while (batch := batch_of(planned, samples, samples.feature_ids, skipped)).rows:
                masks = [samples.loss_mask(row).tolist() for row in batch.rows]
                try:
                    put_batch(batch, masks, source, store, origin)
                    break
                except BadRows as error:
                    skipped.add({batch.rows[at]: why for at, why in error.reasons.items()})
            done += 1
            progress.update(done)
    _write_manifest(run, features, store, samples, complete=True, skipped=skipped)
    stats = store.stats()
    new = sum(len(rows) for _, rows in missing) - len(skipped)
    return (
        f"captured {new} samples, {stats.samples - new} were there: "
        f"{stats.nbytes / 2**20:.0f} MiB in {store.uri}"
    )


def _write_manifest(
    run: Run,
    features: Features,
    store: DurableStore,
    samples: Samples,
    *,
    complete: bool,
    skipped: Mapping[int, str] | None = None,
) -> None:
    """Describe a durable store's content, so that another host can train from it alone."""
    store.write_manifest(
        {
            "complete": complete,
            "fingerprint": samples.summary.fingerprint,
            "request": dataclasses.asdict(features.request),
            "provenance": features.provenance,
            **samples_data(samples),
            "skipped": sorted((skipped or {}).items()),
            "target": {"path": run.target.path, "revision": run.target.revision},
            "plugins": run.manifest(run.drafts, features.capture),
        }
    )


# ---------------------------------------------------------------- training


@dataclass
class TrainerParts:
    """What trains: the plan, the drafts where they stand, and what is skipped so far."""

    features: Features
    samples: Samples
    plan: Plan
    skipped: Skipped
    trainers: list[Trainer]


def trainer_parts(run: Run, role: Role) -> TrainerParts:
    """Open what a trainer needs but for features: data, plan, checkpoints, drafts.

    Raises UsageError for a checkpoint of another run, and for more ranks than a step has batches.
    """
    config, ranks = run.config, run.ranks
    run_id = ranks.first(lambda: _run_id(run.folder))
    features = open_features(run, None if config.store == "auto" else config.store)
    samples = open_samples(run, features)
    last = [_latest(draft, ranks) for draft in run.drafts]
    found = [one for one in last if one is not None]
    accumulate = found[0].state["accumulate"] if found else config.train.accumulate or ranks.size
    if config.train.accumulate not in (None, accumulate):
        raise UsageError(
            f"a step of this run has {accumulate} batches, and train.accumulate is now "
            f"{config.train.accumulate}\n  undo the change, or set another run folder to start anew"
        )
    if ranks.size > accumulate:
        raise UsageError(
            f"a step has {accumulate} batches, and {ranks.size} ranks share them\n"
            "  start at most as many ranks, or a new run with a higher train.accumulate"
        )
    plan = make_plan(run, samples, accumulate)
    if role != "both" and features.store is None:
        uri = _auto_uri(run, run_id, plan, features.request)
        features.store_binding, features.store = open_store(run, uri)
    _require_topology(run, role, features)
    if role == "both" and ranks.size > 1 and features.keeps:
        store = cast(DurableStore, features.store)  # one process is its writer: it is filled first
        ranks.first(lambda: features.complete or _fill(run, features, store, samples))
        features.manifest = store.read_manifest()
    for draft, one in zip(run.drafts, last, strict=True):
        if one is not None:
            with ranks.together():
                require_same_run(one, draft, features, plan)
    known = dict(features.manifest.get("skipped", ())) if features.manifest else {}
    for one in found:
        known |= {int(row): why for row, why in one.state["skipped"]}
    skipped = Skipped(known, rows=len(samples.feature_ids), share=config.data.max_skipped)
    held_out = None
    if config.train.eval_every:
        held_out = _held_out(run, features)
    about = {
        "run_id": run_id,
        "target": run.target.fingerprint,
        "features": features.provenance,
        "width": int(run.target.text_config.hidden_size),
    }
    shared = [features.capture, *([features.store_binding] if features.store_binding else [])]
    trainers = []
    for draft, one in zip(run.drafts, last, strict=True):
        summary = read_summary(one.state["data"]) if one else samples.summary
        setup = draft.setup({**about, "plugins": run.manifest([draft], *shared)})
        device = ranks.device(config.train.device)
        probe = None
        if held_out is not None:
            probe = Probe(held_out, draft.config, setup.hook, setup.collate, draft.decoder, device)
        trainers.append(
            Trainer(
                setup, draft.build(summary), ranks, summary, one,
                plan=plan, skipped=skipped, observers=run.observers, evaluator=probe,
            )
        )  # fmt: skip
    return TrainerParts(features, samples, plan, skipped, trainers)


def train(run: Run, role: Role = "both", say: Callable[[str], None] = print) -> str:
    """Train what is not trained yet, and tell of it; returns `complete` or `interrupted`.

    Raises DraftcoreError with the errors of drafts that failed, once the others are done.
    """
    with ExitStack() as stack:
        ranks = run.ranks
        lock = ranks.first(lambda: _hold(run.folder), pack=lambda _: None)
        if lock is not None:
            stack.callback(os.close, lock)
        parts = trainer_parts(run, role)
        plan, trainers, total = parts.plan, parts.trainers, parts.plan.total_steps
        for trainer in trainers:
            of = f"{trainer.label}: " if trainer.label else ""
            if trainer.step == total:
                say(f"already trained: {total} steps in {trainer.setup.folder}")
            elif trainer.step:
                say(f"{of}resuming from step {trainer.step} of {total}")
        at = min(trainer.step for trainer in trainers)
        if at == total:
            return "complete"
        say(f"a step: {plan.accumulate} batches, {plan.accumulate * plan.batch} rows")
        stop = stack.enter_context(stop_on_signal())
        with ranks.together():
            queue, source = stack.enter_context(
                _open_source(run, role, parts, at, lambda: bool(stop))
            )
        loader = Loader(
            plan.uses(at, ranks.rank, ranks.size), source,
            ahead=_prefetch(run), device=ranks.device(run.config.train.device),
            stop=lambda: bool(stop),
        )  # fmt: skip
        stack.callback(loader.close)
        reason, failed, reached = "failed", dict[str, Exception](), at
        config = run.config.model_dump(mode="json")
        run.observers.run_started(run=run.folder, config=config, total_steps=total)
        try:
            reason, failed = train_loop(
                plan, trainers, loader,
                ranks=ranks, skipped=parts.skipped, stop=lambda: bool(stop),
                finished=queue.advance if queue else lambda position: None,
                observers=run.observers, beside=_standing(queue),
            )  # fmt: skip
            if queue is not None:
                queue.end("finished" if reason == "complete" else "failed")
        finally:
            reached = max(trainer.step for trainer in trainers)
            run.observers.run_finished(run=run.folder, step=reached, reason=reason)
    _tell(run, parts, reason, say)
    if failed:
        causes = "\n".join(f"{label}: {error}" for label, error in failed.items())
        with run.ranks.together():
            raise DraftcoreError(f"{len(failed)} of {len(run.drafts)} drafts failed\n{causes}")
    return reason


def _tell(run: Run, parts: TrainerParts, reason: str, say: Callable[[str], None]) -> None:
    for trainer in parts.trainers:
        of = f"{trainer.label}: " if trainer.label else ""
        seen = parts.plan.rows_before(trainer.step)
        say(
            f"{of}{reason}: step {trainer.step} of {parts.plan.total_steps}, {seen} samples, "
            f"checkpoints in {trainer.checkpoints}"
        )
    if parts.skipped:
        named = ", ".join(f"row {row}" for row in list(parts.skipped)[:8])
        say(
            f"{len(parts.skipped)} rows were skipped: {named}: {next(iter(parts.skipped.values()))}"
        )


def _reaches(capture: Capture, store: FeatureStore) -> bool:
    """Whether a capture in another process puts into this store by itself."""
    return isinstance(capture, StoringCapture) and capture.reaches(store)


def _standing(queue: Queue | None) -> Callable[[], str]:
    """Return what says how capture elsewhere stands; nothing where a rank captures for itself."""
    if queue is None:
        return str

    def say() -> str:
        now = queue.status()
        return f"producers {now.producers}, captured {now.captured}, held {format_size(now.nbytes)}"

    return say


@contextmanager
def _open_source(
    run: Run, role: Role, parts: TrainerParts, at: int, stop: Callable[[], bool]
) -> Iterator[tuple[Queue | None, Source]]:
    """Open where this rank's features come from, and on rank 0 the queue where they are captured."""
    features, samples, plan = parts.features, parts.samples, parts.plan
    capture = functools.partial(open_capture, run, features)
    if role == "both" or features.complete:
        if features.store is None:
            source: Source = Captured(capture(), samples, plan, parts.skipped)
        elif not features.keeps and not _reaches(opened := capture(), features.store):
            opened.close()
            raise UsageError(
                f"this run captures for itself, and the store {run.config.store!r} keeps nothing\n"
                "  leave store out, set store=file:FOLDER to keep features, or capture elsewhere "
                "with topology.producers"
            )
        else:
            source = Stored(
                features.store, samples, plan, parts.skipped,
                names=features.request.names, provenance=features.provenance,
                complete=features.complete, keeps=features.keeps, open_capture=capture,
            )  # fmt: skip
        _require_memory(run, parts)
        yield None, source
        return
    assert features.store is not None
    ranks, store, names = run.ranks, features.store, features.request.names
    secret = ranks.first(lambda: run_secret(run.folder).hex())
    channel = open_channel(run, bytes.fromhex(secret))
    queue: Queue | None = None

    def serve() -> str:
        nonlocal queue
        queue = _open_queue(run, parts, at)
        address = channel.serve(QueueService(queue))
        write_atomic(run.folder / "queue.json", json.dumps({"address": address}))
        return address

    try:
        address = ranks.first(serve)
        local = queue or RemoteQueue(channel.connect(lambda: address))
        yield queue, Queued(local, store, plan, names, 0.0 if queue else PATIENCE)
    finally:
        if queue is not None:
            queue.end("failed")  # unless it has ended before
            (run.folder / "queue.json").unlink(missing_ok=True)
            queue.farewell(FAREWELL)
            with suppress(StoreAway):  # or it went with all that it held
                if queue.ended == "finished" and not features.keeps:
                    forget(store, plan.feature_ids)  # what was put too late
        channel.close()
        store.close()


def _open_queue(run: Run, parts: TrainerParts, at: int) -> Queue:
    features, plan = parts.features, parts.plan
    store, keeps, names = features.store, features.keeps, features.request.names
    assert store is not None
    form = int(run.target.text_config.hidden_size), features.request.dtype
    about = {
        "store": store.uri,
        "provenance": features.provenance,
        "request": dataclasses.asdict(features.request),
    }
    each = token_bytes(run, features.request) + TEXT_BYTES
    limit = None if keeps else store.stats().limit_bytes
    pass_bytes = plan.largest(run.ranks.size) * each
    if limit is not None and pass_bytes > limit:
        raise UsageError(
            f"a batch for each of {run.ranks.size} ranks needs {format_size(pass_bytes)}, and the "
            f"store {store.uri} has {format_size(limit)}\n"
            "  raise max_bytes in its URI, or lower train.batch or data.max_length"
        )
    queue = Queue(
        about,
        ahead=_held(run),
        # What is free in a ring may lie scattered.
        limit=None if limit is None else max(limit // 2, pass_bytes),
        skipped=parts.skipped,
        free=(lambda refs: None) if keeps else store.free,
        misfit=lambda task, refs: misfit(task, refs, names, form, features.provenance),
    )
    if not keeps:
        forget(store, plan.feature_ids)  # what a trainer that was killed left behind
    queue.offer(tasks_of(plan.uses(at), parts.samples, plan, each), plan.step(at)[0].position)
    return queue


def _prefetch(run: Run) -> int:
    """Batches that lie ready per rank beside the one in training."""
    train, producers = run.config.train, run.config.topology.producers
    return train.prefetch or max(2, -(-2 * producers // run.ranks.size))


def _held(run: Run) -> int:
    """Batches that are held at once, over all ranks."""
    return (_prefetch(run) + 1) * run.ranks.size


def _auto_uri(run: Run, run_id: str, plan: Plan, request: FeatureRequest) -> str:
    """The store of `auto` between processes: the installed one in shared memory, with room enough.

    It is the same at every start of a run, as producers that outlive a trainer hold on to it.
    """
    fast = run.registry.offering("store", "memory-speed")
    if len(fast) != 1:
        several = f"several stores are in shared memory: {', '.join(fast)}"
        raise UsageError(
            "the features of several processes need a store in shared memory, for store=auto\n"
            f"  {several if fast else lacking('store', 'memory-speed')}\n"
            "  or set store to the one that you mean, such as file:FOLDER"
        )
    held = _held(run)
    each = token_bytes(run, request) + TEXT_BYTES
    need = plan.largest(held) * each + held * plan.batch * HEAD_BYTES
    room = max(LEAST_STORE, 2 * need)  # as what is free in a ring may lie scattered
    return f"{fast[0]}:{run_id}?run={run_id}&max_bytes={room}"


def _require_topology(run: Run, role: Role, features: Features) -> None:
    """Refuse a store or a capture that the processes of this run cannot share."""
    config, binding = run.config, features.store_binding
    if role != "both" and binding is not None:
        if "shared" not in binding.capabilities:
            raise UsageError(
                f"this run has several processes that reach for its features, and the store "
                f"{config.store!r} is reached by one only\n"
                "  set store=file:FOLDER, or another store that `draftcore list-plugins` shows as shared"
            )
        producers = config.topology.producers
        if producers > 1 and "one-writer" in binding.capabilities:
            raise UsageError(
                f"{producers} producers put features into the store, and {config.store!r} lets one "
                "process write\n  set topology.producers=1, or store=auto"
            )
    alone = run.ranks.size == 1 or features.complete
    if role == "both" and not alone and "per-rank" not in features.capture.capabilities:
        raise UsageError(
            f"each of {run.ranks.size} ranks captures its own batches, and the capture "
            f"{config.capture.name!r} works in one process only\n"
            "  set topology.producers=1, or capture=hf"
        )


def _require_memory(run: Run, parts: TrainerParts) -> None:
    """Refuse at start-up what cannot fit on the device, with the figures."""
    device = run.ranks.device(run.config.train.device)
    if device.type != "cuda":
        return
    trained = sum(p.numel() for t in parts.trainers for p in t.parameters)
    features = parts.plan.largest(1) * token_bytes(run, parts.features.request)
    here = parts.features.store is None and resolve_device(run.config.target.device) == device
    target = run.target.weight_bytes if here else 0
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    if (need := target + 16 * trained + features) > free:
        raise UsageError(
            f"this run needs {format_size(need)} on {device}, and {format_size(free)} are free\n"
            f"  target {format_size(target)}, {trained} trained parameters of 16 bytes "
            f"{format_size(16 * trained)}, features of a batch {format_size(features)}\n"
            "  set topology.producers=1 to capture on another device, or capture at servers"
        )


def _held_out(run: Run, features: Features) -> HeldOut:
    if run.config.data.eval is None:
        raise UsageError(
            "train.eval_every is set, but data.eval is not\n"
            "  set data.eval to held-out conversations"
        )
    run.runner("decode").check(run.target)  # what it refuses is refused before training
    return HeldOut(
        run.config,
        run.target.tokenizer,
        run.dataset(str(run.config.data.eval), "eval", limit=run.config.train.eval_samples),
        functools.partial(open_capture, run, features),
    )


# ---------------------------------------------------------------- the folder and its checkpoints


def _hold(folder: Path) -> int:
    """Be the one trainer of a folder while the lock is open. Raises DraftcoreError beside another."""
    return hold(
        folder / ".lock",
        f"trains in {folder}",
        "wait for it to end, or set another run folder: two would overwrite each other's work",
    )


def _run_id(folder: Path) -> str:
    """Return the run's id, made at the first start and kept in the run's folder."""
    file = folder / "run.json"
    try:
        run_id = str(json.loads(file.read_text())["run_id"]) if file.exists() else uuid.uuid4().hex
    except (ValueError, TypeError, KeyError):
        raise UsageError(
            f"{file} does not hold a run's id, as draftcore writes it\n"
            "  delete it to give the run another id, or set another run folder"
        ) from None
    write_atomic(file, json.dumps({"run_id": run_id}))
    return run_id


def run_secret(folder: Path) -> bytes:
    """Return what the processes of a run know, and nobody else: from DRAFTCORE_SECRET, or the folder.

    Whoever comes first makes it: 32 random bytes that only this user may read.
    """
    if text := os.environ.get("DRAFTCORE_SECRET"):
        return text.encode()
    file = folder / "secret"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".secret.{os.getpid()}"
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(partial, file)
        partial.unlink()
    return file.read_text().encode()


def open_channel(run: Run, secret: bytes) -> Channel:
    uri = run.config.channel
    binding = run.bind("channel", uri.partition(":")[0])
    return binding.hook.channel(
        name=binding.offer.name, uri=uri, secret=secret, options=binding.options({})
    )


def _latest(draft: DraftRun, ranks: Ranks) -> Checkpoint | None:
    """The draft's newest checkpoint, whose plugins must be here."""
    return latest(
        draft.folder / "checkpoints",
        ranks,
        lambda found: require_plugins(found, draft.run.registry),
    )


def require_plugins(found: Checkpoint, registry: Registry) -> None:
    """Raise UsageError where a plugin that took part in a checkpoint's run is not here."""
    if missing := registry.missing(found.state["plugins"]):
        raise UsageError(f"{found.folder}: {missing}")


def changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the dotted keys that a resumed run must not change and did, with both values."""
    found: list[tuple[str, Any, Any]] = []

    def compare(path: str, model: type[BaseModel], old: Any, new: Any) -> None:
        for name, info in model.model_fields.items():
            if FREE in info.metadata:
                continue
            inner = info.annotation
            was, is_ = (old or {}).get(name), (new or {}).get(name)
            if isinstance(inner, type) and issubclass(inner, BaseModel) and was is not None:
                compare(f"{path}.{name}", inner, was, is_)
            elif was != is_:
                found.append((f"{path}.{name}", was, is_))

    for section in BINDING:
        annotation: Any = RunConfig.model_fields[section].annotation
        model = Choice if section == "algorithm" else annotation
        compare(section, model, then.get(section), now.get(section))
    return found


def require_same_run(last: Checkpoint, draft: DraftRun, features: Features, plan: Plan) -> None:
    """Refuse to go on from a checkpoint of other plugins, target, data or schedule."""
    run = draft.run
    then, now = last.state["config"], draft.config.model_dump(mode="json")
    if then["capture"]["name"] == now["capture"]["name"]:  # of its options, what changes features
        for config in (then, now):
            given = config["capture"]["options"]
            config["capture"]["options"] = choices(features.capture.options(given))
    changed = [f"{key}: {was!r} then, {now!r} now" for key, was, now in changed_keys(then, now)]
    if last.state["target"] != run.target.fingerprint:
        changed.append(f"target: weights {last.state['target']} then, {run.target.fingerprint} now")
    if last.state["plan"] != plan.key:
        changed.append("data: other samples, or another order of them")
    elif not changed and last.state["features"] != features.provenance:
        differ = differences(features.provenance, last.state["features"], "then").strip()
        changed.append(f"features: {differ}")
    if changed:
        raise UsageError(
            f"{last.folder} was written by a run that differs from this one\n  "
            + "\n  ".join(changed)
            + "\n  undo the change to resume, or set another run folder to start anew"
        )


# ---------------------------------------------------------------- producing


def produce_features(run: Run) -> str:
    """Capture for a trainer elsewhere until the run ends; returns a line about it.

    Raises UsageError where features made here would not be what the trainer asks for, and where
    the capture cannot work; the trainer is told.
    """
    address = run.folder / "queue.json"
    with stop_on_signal() as stop, ExitStack() as stack:

        def find() -> str:
            if stop:
                raise RunEnded("asked to stop", "interrupted")
            with suppress(FileNotFoundError, ValueError, KeyError):
                return str(json.loads(address.read_text())["address"])
            return ""

        channel = open_channel(run, run_secret(run.folder))
        client = channel.connect(find)
        stack.callback(client.close)
        queue = RemoteQueue(client)
        try:
            about = queue.about()
            data = about["request"]
            features = open_features(run, None)
            features.request = FeatureRequest(**{**data, "layers": tuple(data["layers"])})
            ours = provenance(run.target, features.request, run.config, features.options)
            if ours != about["provenance"]:
                raise UsageError(
                    "features captured here are not what the trainer trains on\n"
                    f"{differences(ours, about['provenance'], 'for the trainer')}\n"
                    "  give the producer the trainer's target, algorithm and capture settings"
                )
            capture = open_capture(run, features)
        except RunEnded as ended:
            return str(ended)
        except Exception as error:
            with suppress(DraftcoreError):
                queue.leave(str(error) or repr(error))
            raise
        stack.callback(capture.close)

        def open_at(uri: str) -> FeatureStore:
            return open_store(run, uri)[1]

        return produce(queue, capture, ours, open_at, lambda: bool(stop), PATIENCE)


# ---------------------------------------------------------------- evaluation


def evaluate_draft(draft: DraftRun, built: Draft, step: int) -> Report:
    """Decode the eval prompts with a draft, for real. Raises UsageError without such prompts."""
    run, config = draft.run, draft.config
    if config.data.eval is None:
        raise UsageError("data.eval is not set\n  set it to held-out conversations in JSONL")
    run.runner("decode").check(run.target)
    prompts, _ = read_prompts(
        config.data.eval, run.target.tokenizer, config.eval.prompts, config.data.max_length
    )
    built.module.to(run.target.model.device).eval()
    token_ids = [list(prompt.token_ids) for prompt in prompts]
    report = evaluate_prompts(draft.decoder(built), token_ids, config.eval)
    run.observers.evaluated(step=step, report=report.to_json(), draft=draft.label)
    return report
