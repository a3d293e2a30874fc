"""A configured run: its parts, opened and checked against each other, and the verbs' work.

This is the composition root. Nothing else reads the configuration to decide what to build. A `Run` is
what every verb needs: target, drafts, runners. What more a process needs, a function opens from top
to bottom: `train` for a trainer, `produce_features` for a producer, `capture_all` for a capture offline.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

import torch
from importlib_metadata import version
from pydantic import BaseModel

from draftcore.config import FREE, RunConfig, Sources
from draftcore.contracts.algorithm import DataSummary, Draft, Drafter
from draftcore.contracts.capture import BadRows, Capture, CaptureBatch, FeatureRequest
from draftcore.contracts.channel import PATIENCE, Channel, Json, RunEnded
from draftcore.contracts.hooks import Specs
from draftcore.contracts.launcher import LOCK
from draftcore.contracts.runner import DecodeRunner, PhaseName, Runner, RunnerContext
from draftcore.contracts.store import DurableStore, FeatureStore, StoreAway
from draftcore.contracts.target import ImageProcessor
from draftcore.data.dataset import DataReport, Dataset, build_dataset, date_of, read_prompts
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.rendering import Blind
from draftcore.data.samples import (
    Samples,
    StoredSamples,
    batch_of,
    read_summary,
    samples_data,
    summary_data,
)
from draftcore.data.skipped import Skipped
from draftcore.data.sources import named, open_source
from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore.evaluation.decode import evaluate_prompts
from draftcore.evaluation.during import HeldOut, Probe
from draftcore.evaluation.report import Report, more_metrics
from draftcore.features.loader import Captured, Loader, Queued, Source, Stored, misfit, tasks_of
from draftcore.features.producer import CheckedCapture, fill, forget, produce
from draftcore.features.provenance import differences, provenance
from draftcore.features.queue import Queue, QueueService, RemoteQueue
from draftcore.files import hold, require_exported, secret, write_atomic
from draftcore.plugins.binding import Binding, bind, find_source, observers
from draftcore.plugins.registry import Registry
from draftcore.target import TransformersTarget
from draftcore.tensors import resolve_device
from draftcore.training.checkpoint import Checkpoint, latest, open_checkpoint
from draftcore.training.loop import DraftSetup, Trainer, stop_on_signal
from draftcore.training.loop import train as train_loop
from draftcore.training.progress import Progress
from draftcore.training.ranks import SINGLE_RANK, Ranks
from draftcore.uris import format_size

Role = Literal["both", "trainer", "producer"]
MEMORY = Path("/dev/shm")
LEAST_STORE = 32 << 20  # bytes; half of the shared memory that Docker gives a container
TEXT_BYTES, HEAD_BYTES = 9, 4096  # beside the features: of a token, of a row
FAREWELL = 5.0  # seconds for producers to hear that the run is over


class Run:
    """What every verb needs of a run. On several ranks each has one.

    Raises UsageError for a plugin that the run names and that is not here, before any work.
    """

    def __init__(self, config: RunConfig, registry: Registry, ranks: Ranks = SINGLE_RANK) -> None:
        self.config, self.registry, self.folder, self.ranks = config, registry, config.run, ranks
        self.target = TransformersTarget(**config.target.model_dump())
        self.target.prefill_with = lambda model: self.runners["prefill"].prefill(model)
        self.width = int(self.target.text_config.hidden_size)
        self.find = functools.partial(find_source, registry)  # opens a plugin's training data
        self.left_out = dict[str, int]()  # of the eval prompts, by reason
        self.samples: Samples | None = None  # given by a verb in the place of data.train
        self.seen: CaptureBatch | None = None  # a row with images
        self.closing = ExitStack()  # of the stores that were opened, however the verb ends
        chosen = config.capture
        self.capture = self.bind("capture", chosen.name, chosen.options, chosen.plugin)
        if config.target.tensor_parallel > 1 and "tensor-parallel" not in self.capture.capabilities:
            raise UsageError(
                f"the capture {chosen.name!r} does not read target.tensor_parallel: its own options, or its "
                "servers, share a target\n  set capture.options.tp, see its README, or capture.name=hf"
            )
        self.channel = self.bind("channel", config.channel.partition(":")[0])
        if config.store != "auto":
            registry.find("store", config.store.partition(":")[0])
        phases: tuple[PhaseName, ...] = ("prefill", "decode")
        if self.target.sees:
            self.target.images = self._images()
        self.runners = {phase: self._open_runner(phase) for phase in phases}
        self.drafts = tuple(DraftRun(self, label) for label in config.drafts or [""])
        self.observers: Specs = observers(
            Registry(()) if ranks.rank else registry, () if ranks.rank else config.plugins
        )

    def _images(self) -> ImageProcessor:
        """Open what reads images, or what refuses rows with images and says why."""
        try:
            reader = self.bind("images", "processor").hook
        except UsageError as error:
            return Blind(str(error))
        if "images" not in self.capture.capabilities:
            others = ", ".join(self.registry.offering("capture", "images"))
            given = self.config.capture.name
            return Blind(f"the capture {given!r} reads text alone\n  set capture.name={others}")
        return reader.image_processor(name="processor", target=self.target)

    def _open_runner(self, phase: PhaseName) -> Runner:
        """Open who runs the target in capture (prefill), or target and draft in decoding (decode)."""
        config, chosen = self.config, getattr(self.config.runner, phase)
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
        try:
            binding = self.bind("runner", chosen.name, chosen.options, chosen.plugin)
        except UsageError as error:
            raise UsageError(f"runner.{phase}: {error}") from None
        return binding.hook.runner(name=chosen.name, context=context, options=binding.options)

    def chosen(self, label: str | None) -> tuple[DraftRun, ...]:
        """The draft of this label, or all. Raises UsageError for a label that is not there."""
        found = tuple(draft for draft in self.drafts if label in (None, draft.label))
        if not found:
            labels = list(self.config.drafts)
            raise UsageError(
                f"there is no draft {label!r}{nearest(str(label), labels)}\n"
                f"  drafts of this run: {', '.join(labels) or 'a single one, without a label'}\n"
                "  name one of them with --draft, or leave that out"
            )
        return found

    def bind(
        self, kind: Any, name: str, options: Mapping[str, Any] | None = None, plugin: str = ""
    ) -> Binding:
        return bind(self.registry, kind, name, options or {}, self.config.plugins, plugin)

    def provenance(self, request: FeatureRequest) -> str:
        """Say how features of this request are made here."""
        return provenance(self.target, request, self.config, self.capture.options)

    def manifest(self, drafts: Iterable[DraftRun], *shared: Binding) -> list[dict[str, str]]:
        """Name, dist, version and origin of every plugin that these drafts depend on."""
        chosen = [draft.algorithm.plugin for draft in drafts] + [one.plugin for one in shared]
        chosen += self.registry.extras(self.config.plugins)
        return self.registry.manifest({plugin.name: plugin for plugin in chosen}.values())

    def dataset(
        self, given: Sources, name: str, limit: int | None = None, date: str = ""
    ) -> Dataset:
        """Render data with the chat template, which is told `date`; kept in the run's folder."""
        options = self.config.data.model_copy(update={"limit": limit})
        folder, tokenizer = self.folder / "data" / name, self.target.tokenizer
        dataset = build_dataset(
            given, tokenizer, options, folder,
            find=self.find, date=date, processor=self.target.images,
        )  # fmt: skip
        if (dataset.report.skipped or dataset.report.notes) and not self.ranks.rank:
            print(dataset.report.text(), file=sys.stderr)
        if dataset.all_images:
            planned = PlannedBatch(0, 0, 0, 0, 0, (min(dataset.all_images),))
            self.seen = batch_of(planned, dataset, dataset.feature_ids, {})
        return dataset

    def prompts(self, limit: int | None) -> list[list[int]]:
        """Read the eval prompts, which are told the date of the training data."""
        data, folder = self.config.data, self.folder / "data"
        if data.eval is None:
            raise UsageError("data.eval is not set\n  set it to held-out conversations in JSONL")
        date = date_of(folder / "train") or date_of(folder / "eval")
        told, tokenizer = DataReport(named(data.eval)), self.target.tokenizer
        prompts = read_prompts(
            data.eval, tokenizer, limit, data, find=self.find, date=date, report=told
        )
        self.left_out = dict(Counter(bad.reason for bad in told.skipped))
        return prompts


class DraftRun:
    """One draft of a run: its algorithm, bound alone, its settings and its folder.

    `config` is the run's as if this draft were the only one, so that a checkpoint made beside
    others is the one that the draft alone would have made. `label` is empty for a single draft;
    `of` begins a line about one of several.
    """

    def __init__(self, run: Run, label: str) -> None:
        config = run.config
        if label:
            draft = config.drafts[label]
            tuning = draft.train.model_dump(exclude_unset=True)
            train, folder = config.train.model_copy(update=tuning), config.run / label
            alone = {"run": folder, "algorithm": draft.algorithm, "drafts": {}, "train": train}
            config = config.model_copy(update=alone)
        assert config.algorithm is not None
        self.run, self.label, self.config, self.folder = run, label, config, config.run
        self.of, self.choice = f"{label}: " if label else "", config.algorithm
        try:
            choice = self.choice
            self.algorithm = run.bind("algorithm", choice.name, choice.options, choice.plugin)
        except UsageError:
            self.checkpoint()  # which knows who is missing
            raise
        self.options = self.algorithm.options
        for value in filter(lambda value: isinstance(value, str), self.choice.options.values()):
            require_exported(Path(value))  # that the draft starts from

    def checkpoint(self, folder: Path | None = None) -> Checkpoint | None:
        """Open the checkpoint in a folder, or the draft's newest, if any.

        Raises UsageError where a plugin that took part in its run is not here.
        """
        ranks = self.run.ranks
        root = self.folder / "checkpoints"
        found = open_checkpoint(folder) if folder else ranks.on_rank0(lambda: latest(root))
        with ranks.raise_on_all():
            if found and (missing := self.run.registry.missing(found.state["plugins"])):
                raise UsageError(f"{found.folder}: {missing}")
        return found

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
        hook, request = self.algorithm.hook, self.request()
        compiles = "compile" in self.algorithm.capabilities and not self.config.train.shard
        if self.config.train.compile is True and not compiles:
            raise UsageError(
                f"train.compile is on, and the algorithm {self.choice.name!r} has no capability compile, "
                "or train.shard is on\n  leave it out: auto compiles what can be"
            )
        given = (self.label, self.folder, self.config, hook, self.options, request, about)
        return DraftSetup(*given, compiles)

    def drafter(self, draft: Draft) -> Drafter:
        return self.algorithm.hook.drafter(
            draft=draft, target=self.run.target.model, options=self.options
        )

    def decoder(self, draft: Draft) -> DecodeRunner:
        """What decodes with the draft, whose weights may be updated in place meanwhile."""
        target, drafter = self.run.target.model, self.drafter(draft)
        return self.run.runners["decode"].decode(target, drafter, draft.module)


# ---------------------------------------------------------------- features and data


@dataclass
class Features:
    """What a run captures, and where it is kept; `store` is None where features stay on the device.

    A durable store that the user names `keeps` them; what is read from any other is freed.
    """

    request: FeatureRequest
    provenance: str
    binding: Binding | None = None
    store: FeatureStore | None = None
    keeps: bool = False
    manifest: dict[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return self.manifest is not None and bool(self.manifest["complete"])


def open_features(run: Run) -> Features:
    """Open the store that the run names, if any, and say what is captured.

    That is all that any draft asks for, or a durable store's wider request. Raises UsageError for
    a store that holds features which this run cannot use.
    """
    requests, uri = [draft.request() for draft in run.drafts], run.config.store
    if len(dtypes := {request.dtype for request in requests}) > 1:
        raise UsageError(
            f"the drafts of this run ask for features of {' and '.join(sorted(dtypes))}\n"
            "  set capture.dtype to one type for all"
        )
    for draft, one in zip(run.drafts, requests, strict=True):
        asked = (name for name in ("topk", "embeddings") if getattr(one, name))
        if lacking := [name for name in asked if name not in run.capture.capabilities]:
            others = ", ".join(run.registry.offering("capture", lacking[0]))
            raise UsageError(
                f"the algorithm {draft.choice.name!r} asks for the target's {lacking[0]}, and the "
                f"capture {run.config.capture.name!r} does not give them\n  set capture.name={others}"
            )
    request = functools.reduce(FeatureRequest.union, requests)
    features = Features(request, run.provenance(request))
    if uri != "auto":
        features.binding, features.store = open_store(run, uri)
        durable = "durable" in features.binding.capabilities
        features.keeps = durable and not getattr(features.store, "volatile", False)
    if features.keeps:
        features.manifest = cast(DurableStore, features.store).read_manifest()
    if features.manifest is None:
        return features
    held = read_request(features.manifest["request"])
    if held.serves(request):
        features.request, features.provenance = held, run.provenance(held)
    ours, theirs = features.provenance, features.manifest["provenance"]
    one, other = json.loads(ours), json.loads(theirs)
    if features.complete:  # whose batches may be of another size
        one["train.batch"] = other.get("train.batch")
    if one != other:
        raise UsageError(
            f"the store {uri!r} holds features that this run cannot use\n"
            f"{differences(ours, theirs, 'in the store')}\n"
            "  use another store folder, or delete this one to capture again"
        )
    features.provenance = theirs
    return features


def read_request(data: Mapping[str, Any]) -> FeatureRequest:
    return FeatureRequest(**{**data, "layers": tuple(data["layers"])})


def open_store(run: Run, uri: str) -> tuple[Binding, FeatureStore]:
    """Open a store: a durable one on each rank, any other on rank 0, whose URI the others join."""
    name = uri.partition(":")[0]
    binding = run.bind("store", name)

    def open_at(uri: str) -> FeatureStore:
        return binding.hook.feature_store(name=name, uri=uri)

    if "durable" in binding.capabilities:
        store = open_at(uri)
    else:
        with run.ranks.raise_on_all():
            first = None if run.ranks.rank else open_at(uri)
        (there, *_) = run.ranks.all_gather(first.uri if first else "")
        store = first or open_at(there)
    run.closing.callback(store.close)
    return binding, store


def open_capture(run: Run, request: FeatureRequest) -> Capture:
    """Open the run's capture, which checks itself. Raises UsageError where it cannot work."""
    run.runners["prefill"].check(run.target)  # also where the backend does not ask
    capture = run.capture.hook.capture(
        name=run.capture.offer.name, target=run.target, request=request, options=run.capture.options
    )
    checked = CheckedCapture(capture, str(run.capture.plugin), request.forms(run.width))
    with ExitStack() as failed:
        failed.callback(checked.close)
        with suppress(BadRows):  # a target whose images it cannot capture is refused now
            list(checked.features([run.seen] if run.seen else []))
        failed.pop_all()
    return checked


def open_samples(run: Run, features: Features) -> Samples:
    """The training samples, from the data file or, without one, from the store's manifest.

    Every rank has them; rank 0 renders first, and others find what it wrote where they see it.
    """
    config, manifest = run.config, features.manifest
    if run.samples is not None:
        return run.samples
    if config.data.train is None:
        if manifest is None or not features.complete:
            raise UsageError(
                f"data.train is not set and the store {config.store!r} holds no complete capture\n"
                "  set data.train, or point store at a folder that `draftcore capture` finished"
            )
        return StoredSamples(manifest)
    source, limit = config.data.train, config.data.limit
    date = str(manifest["summary"].get("date", "")) if manifest is not None else ""

    def rendered() -> tuple[str, str]:
        summary = run.dataset(source, "train", limit, date).summary
        return summary.fingerprint, summary.date

    fingerprint, told = run.ranks.on_rank0(rendered)
    dataset = run.dataset(source, "train", limit, told)
    with run.ranks.raise_on_all():
        if dataset.fingerprint != fingerprint:
            raise UsageError(
                f"rank {run.ranks.rank} has other data in {named(source)} than rank 0\n"
                "  give every rank the same file"
            )
    if manifest is not None and manifest["fingerprint"] != dataset.fingerprint:
        raise UsageError(
            f"the store {config.store!r} holds features of other data than {named(source)}\n"
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


# ---------------------------------------------------------------- offline capture


def capture_all(run: Run) -> str:
    """Capture what a durable store lacks and complete its manifest; returns a line about the result.

    Raises UsageError for a store that does not outlive the process, DraftcoreError where the disk
    cannot hold the features.
    """
    config, features = run.config, open_features(run)
    if features.store is None or not features.keeps:
        raise UsageError(
            f"capture keeps features for a later training run, and store={config.store} does not\n"
            "  set store=file:FOLDER"
        )
    with closing(features.store) as store:
        samples = open_samples(run, features)
        skipped = Skipped({}, rows=len(samples.feature_ids), share=config.data.max_skipped)
        new = fill_store(run, features, samples, make_plan(run, samples), skipped)
        stats = store.stats()
    return (
        f"captured {new} samples, {stats.samples - new} were there: "
        f"{stats.nbytes / 2**20:.0f} MiB in {store.uri}"
    )


def fill_store(
    run: Run,
    features: Features,
    samples: Samples,
    plan: Plan,
    skipped: Skipped,
    uses: Iterable[PlannedBatch] | None = None,
) -> int:
    """Capture what a durable store lacks of the batches that are used, all if not given.

    Ranks share the batches. Returns the number of samples that this rank captured. Raises
    DraftcoreError where the disk cannot hold the features.
    """
    ranks, store, ids = run.ranks, cast(DurableStore, features.store), samples.feature_ids
    wanted = range(len(plan.batches)) if uses is None else sorted({one.index for one in uses})

    def describe(complete: bool) -> None:
        """Write the manifest, so that another host can train from the store alone."""
        store.write_manifest(
            {
                "complete": complete,
                "fingerprint": samples.summary.fingerprint,
                "request": dataclasses.asdict(features.request),
                "provenance": features.provenance,
                **samples_data(samples),
                "skipped": sorted(skipped.items()),
                "target": {"path": run.target.path, "revision": run.target.revision},
                "plugins": run.manifest(run.drafts, run.capture),
            }
        )

    def look() -> list[int]:
        known = {*store.lookup(ids), *(ids[row] for row in skipped)}
        missing = [at for at in wanted if not known.issuperset(ids[r] for r in plan.batches[at])]
        tokens = sum(int(plan.lengths[row]) for at in missing for row in plan.batches[at])
        need, free = tokens * features.request.token_bytes(run.width), store.stats().free_bytes
        if free is not None and need > free:
            raise DraftcoreError(
                f"the features need {format_size(need)}, {store.uri} has {format_size(free)} free\n"
                "  choose another store folder, lower data.limit, or train with store=auto, "
                "which captures on the way"
            )
        describe(complete=False)
        return missing

    missing, before = ranks.on_rank0(look), set(skipped)
    share = [
        PlannedBatch(at, 0, 0, 0, at, plan.batches[at]) for at in missing[ranks.rank :: ranks.size]
    ]
    with ranks.raise_on_all(), ExitStack() as stack:
        total, there = len(wanted), len(wanted) - len(share)
        progress = stack.enter_context(Progress(total, there, "capturing", shown=not ranks.rank))
        if share:
            capture = stack.enter_context(closing(open_capture(run, features.request)))
            work = fill(share, capture, store, features.provenance, samples, skipped)
            for done, _ in enumerate(work, there + 1):
                progress.show(done)
    own = {row: why for row, why in skipped.items() if row not in before}
    for theirs in filter(None, ranks.all_gather(own)):
        skipped.add(theirs)
    if len(wanted) == len(plan.batches):
        ranks.on_rank0(lambda: describe(complete=True))
    return sum(len(one.rows) for one in share) - len(own)


# ---------------------------------------------------------------- training


@dataclass
class TrainerParts:
    """What trains: the plan, the drafts where they stand, and what is skipped so far.

    `prefetch` batches lie ready per rank beside the one in training; `held` are held over all ranks.
    """

    features: Features
    samples: Samples
    plan: Plan
    skipped: Skipped
    trainers: list[Trainer]
    prefetch: int
    held: int


def trainer_parts(run: Run, role: Role) -> TrainerParts:
    """Open what a trainer needs but for features: data, plan, checkpoints, drafts.

    Raises UsageError for a checkpoint of another run, and for more ranks than a step has batches.
    """
    config, ranks, device = run.config, run.ranks, run.ranks.device(run.config.train.device)
    run_id, features = ranks.on_rank0(lambda: _run_id(run.folder)), open_features(run)
    samples = open_samples(run, features)
    last = [draft.checkpoint() for draft in run.drafts]
    found = [one for one in last if one is not None]
    accumulate = found[0].state["accumulate"] if found else config.train.accumulate or ranks.size
    with ranks.raise_on_all():
        if config.train.accumulate not in (None, accumulate):
            raise UsageError(
                f"a step of this run has {accumulate} batches, and train.accumulate is now "
                f"{config.train.accumulate}\n"
                "  undo the change, or set another run folder to start anew"
            )
        if ranks.size > accumulate:
            raise UsageError(
                f"a step has {accumulate} batches, and {ranks.size} ranks share them\n"
                "  start at most as many ranks, or a new run with a higher train.accumulate"
            )
    plan = make_plan(run, samples, accumulate)
    prefetch = config.train.prefetch or max(2, -(-2 * config.topology.producers // ranks.size))
    held = (prefetch + 1) * ranks.size
    if role != "both" and features.store is None:
        uri = _auto_uri(run, run_id, plan, features, held)
        features.binding, features.store = open_store(run, uri)
    with ranks.raise_on_all():
        _require_topology(run, role, features)
        for draft, one in zip(run.drafts, last, strict=True):
            if one is not None:
                require_same_run(one, draft, features, plan)
    known = dict((features.manifest or {}).get("skipped", ()))
    for one in found:
        known |= {int(row): why for row, why in one.state["skipped"]}
    skipped = Skipped(known, rows=len(samples.feature_ids), share=config.data.max_skipped)
    if role == "both" and features.keeps and not features.complete:
        at = min((one.state["step"] for one in found), default=0)
        fill_store(run, features, samples, plan, skipped, plan.uses(at))
    held_out = None
    if config.train.eval_every:
        run.runners["decode"].check(run.target)  # what it refuses is refused before training
        capture = functools.partial(open_capture, run, features.request)
        assert config.data.eval is not None  # as the configuration asks for
        date = samples.summary.date
        data = run.dataset(config.data.eval, "eval", config.train.eval_samples, date)
        prompts = functools.partial(run.prompts, config.train.eval_prompts)
        held_out = HeldOut(config, data, capture, prompts)
    about = {
        "run_id": run_id,
        "target": run.target.fingerprint,
        "features": features.provenance,
        "width": run.width,
    }
    shared, trainers = [run.capture, *([features.binding] if features.binding else [])], []
    for draft, one in zip(run.drafts, last, strict=True):
        summary = read_summary(one.state["data"]) if one else samples.summary
        made = {"plugins": run.manifest([draft], *shared), "data": summary_data(summary)}
        setup = draft.setup({**about, **made})
        probe = Probe(held_out, setup, draft.decoder, device).evaluate if held_out else None
        trainers.append(
            Trainer(setup, draft.build(summary), ranks, plan, skipped, run.observers, probe, one)
        )
    return TrainerParts(features, samples, plan, skipped, trainers, prefetch, held)


def train(run: Run, role: Role = "both", say: Callable[[str], None] = print) -> str:
    """Train what is not trained yet, and tell of it; returns `complete`, `stopped` or `interrupted`.

    Raises DraftcoreError with the errors of drafts that failed, once the others are done.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Batches differ in size, and memory freed by one has to serve the next whatever its size.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    ranks = run.ranks
    with ExitStack() as stack:
        with ranks.raise_on_all():
            if not ranks.rank:
                remedy = "wait for it to end, or set another run folder: two would undo each other"
                lock = hold(run.folder / LOCK, f"trains in {run.folder}", remedy)
                stack.callback(os.close, lock)
        parts = trainer_parts(run, role)
        plan, trainers, total = parts.plan, parts.trainers, parts.plan.total_steps
        for draft, trainer in zip(run.drafts, trainers, strict=True):
            if trainer.step == total:
                say(f"already trained: {total} steps in {draft.folder}")
            elif trainer.step:
                say(f"{draft.of}resuming from step {trainer.step} of {total}")
        at = min(trainer.step for trainer in trainers)
        if at == total:
            return "complete"
        for draft, trainer in zip(run.drafts, trainers, strict=True):
            if about := trainer.built.about:
                say(f"{draft.of}a draft of {about}")
        say(f"a step: {plan.accumulate} batches, {plan.accumulate * plan.batch} rows")
        caught = stack.enter_context(stop_on_signal())
        stop = lambda: bool(caught)  # noqa: E731
        with ranks.raise_on_all():
            queue, source = stack.enter_context(_open_source(run, role, parts, at))
        uses, device = plan.uses(at, ranks.rank, ranks.size), ranks.device(run.config.train.device)
        loader = Loader(uses, source, ahead=parts.prefetch, device=device, stop=stop)
        stack.callback(loader.close)
        reason, failed = "failed", dict[str, Exception]()
        config = run.config.model_dump(mode="json")
        run.observers.run_started(run=run.folder, config=config, total_steps=total)
        try:
            reason, failed, ended = train_loop(
                plan, trainers, loader, ranks=ranks, skipped=parts.skipped, stop=stop,
                release_batch=loader.let_go, status_line=(lambda: str(queue.status())) if queue else str,
                finished=queue.advance if queue else lambda position: None,
            )  # fmt: skip
            if queue is not None:
                queue.end("finished" if reason in ("complete", "stopped") else "failed")
        finally:
            reached = max(trainer.step for trainer in trainers)
            run.observers.run_finished(run=run.folder, step=reached, reason=reason)
    for draft, trainer in zip(run.drafts, trainers, strict=True):
        how = "complete" if reason == "stopped" and draft.label not in ended else reason
        say(
            f"{draft.of}{how}: step {trainer.step} of {total}, {plan.rows_before(trainer.step)} "
            f"samples, checkpoints in {trainer.checkpoints}"
        )
    if skipped := parts.skipped:
        named = ", ".join(f"row {row}" for row in list(skipped)[:8])
        say(f"{len(skipped)} rows were skipped: {named}: {next(iter(skipped.values()))}")
    for draft in (draft for draft in run.drafts if draft.label in ended):
        stop_of = ended[draft.label]
        say(f"{draft.of}stopped by the plugin {stop_of.plugin}: {stop_of.reason}")
    if failed:
        causes = "\n".join(f"{label}: {error}" for label, error in failed.items())
        with ranks.raise_on_all():
            raise DraftcoreError(f"{len(failed)} of {len(run.drafts)} drafts failed\n{causes}")
    return reason


@contextmanager
def _open_source(
    run: Run, role: Role, parts: TrainerParts, at: int
) -> Iterator[tuple[Queue | None, Source]]:
    """Open where this rank's features come from, and on rank 0 the queue where they are captured."""
    features, plan, skipped = parts.features, parts.plan, parts.skipped
    store, names = features.store, features.request.names
    if store is None or role == "both" or features.complete:
        _require_memory(run, parts)
        if store is None:
            capture = open_capture(run, features.request)
            yield None, Captured(capture, parts.samples, plan, skipped)
        else:
            yield None, Stored(store, plan, skipped, names)
        return
    channel, file = open_channel(run), run.folder / "queue.json"
    queue: Queue | None = None

    def serve() -> str:
        nonlocal queue
        queue = _open_queue(run, parts, store, at)
        address = channel.serve(QueueService(queue))
        write_atomic(file, json.dumps({"address": address}))
        return address

    try:
        address = run.ranks.on_rank0(serve)
        local = queue or RemoteQueue(channel.connect(lambda: address))
        yield queue, Queued(local, store, plan, names, 0.0 if queue else PATIENCE)
    finally:
        if queue is not None:
            queue.end("failed")  # unless it has ended before
            file.unlink(missing_ok=True)
            queue.farewell(FAREWELL)
            with suppress(StoreAway):  # or it went with all that it held
                if queue.ended == "finished" and not features.keeps:
                    forget(store, plan.feature_ids)  # what was put too late
        channel.close()
        store.close()


def _open_queue(run: Run, parts: TrainerParts, store: FeatureStore, at: int) -> Queue:
    features, plan = parts.features, parts.plan
    keeps, origin, request = features.keeps, features.provenance, features.request
    forms, each = request.forms(run.width), request.token_bytes(run.width) + TEXT_BYTES
    limit, least = None, plan.largest(run.ranks.size) * each
    if not keeps and (room := store.stats().limit_bytes) is not None:
        if least > room:
            raise UsageError(
                f"a batch for each of {run.ranks.size} ranks needs {format_size(least)}, and the "
                f"store {store.uri} has {format_size(room)}\n"
                "  raise max_bytes in its URI, or lower train.batch or data.max_length"
            )
        limit = max(room // 2, least)  # as what is free in a ring may lie scattered
    queue = Queue(
        {"store": store.uri, "provenance": origin, "request": dataclasses.asdict(request)},
        ahead=parts.held,
        limit=limit,
        skipped=parts.skipped,
        free=(lambda refs: None) if keeps else store.free,
        misfit=lambda task, refs: misfit(task, refs, forms, origin),
    )
    if not keeps:
        forget(store, plan.feature_ids)  # what a trainer that was killed left behind
    queue.offer(tasks_of(plan.uses(at), parts.samples, plan, each), plan.step(at)[0].position)
    return queue


def _auto_uri(run: Run, run_id: str, plan: Plan, features: Features, held: int) -> str:
    """The store of `auto` between processes: in shared memory, with room for what is held.

    It is the same at every start of a run, as producers that outlive a trainer hold on to it. Raises
    UsageError where there is too little memory.
    """
    fast = run.registry.offering("store", "memory-speed")
    if len(fast) > 1:
        raise UsageError(
            f"several stores are in shared memory: {', '.join(fast)}\n  set store to one of them"
        )
    each = features.request.token_bytes(run.width) + TEXT_BYTES
    need = plan.largest(held) * each + held * plan.batch * HEAD_BYTES
    room = max(LEAST_STORE, 2 * need)  # as what is free in a ring may lie scattered
    if fast:
        return f"{fast[0]}:{run_id}?run={run_id}&max_bytes={room}"
    folder = MEMORY / f"draftcore-{run_id}"
    if not folder.exists() and (free := shutil.disk_usage(MEMORY).free) < room:
        raise UsageError(
            f"features on their way need {format_size(room)} of shared memory, and {MEMORY} has "
            f"{format_size(free)} free\n"
            "  make it larger, lower train.batch or train.prefetch, or set store=file:FOLDER"
        )
    return f"file:{folder}?volatile=yes&max_bytes={room}"


def _require_topology(run: Run, role: Role, features: Features) -> None:
    """Refuse a store or a capture that the processes of this run cannot share."""
    store, capture, ranks = run.config.store, run.config.capture.name, run.ranks.size
    if role == "both" and features.store is not None and not features.keeps:
        raise UsageError(
            f"this run captures for itself, and the store {store!r} keeps nothing\n"
            "  leave store out, set store=file:FOLDER, or capture elsewhere: topology.producers"
        )
    if role != "both" and features.binding and "shared" not in features.binding.capabilities:
        raise UsageError(
            f"this run has several processes, and the store {store!r} is reached by one only\n"
            "  set store=file:FOLDER, or another store that `draftcore list-plugins` shows as shared"
        )
    several = role == "both" and ranks > 1 and not features.complete
    shared = run.config.target.tensor_parallel > 1
    if several and (shared or "per-rank" not in run.capture.capabilities):
        what = "processes of its own" if shared else "one process only"
        raise UsageError(
            f"each of {ranks} ranks captures its own batches, and the capture {capture!r} works in "
            f"{what}\n  set topology.producers=1, or a capture that each rank may open"
        )


def _require_memory(run: Run, parts: TrainerParts) -> None:
    """Refuse at start-up what cannot fit on the device, with the figures."""
    device = run.ranks.device(run.config.train.device)
    if device.type != "cuda":
        return
    trained = sum(p.numel() for t in parts.trainers for p in t.parameters)
    features = parts.plan.largest(1) * parts.features.request.token_bytes(run.width)
    here = parts.features.store is None and resolve_device(run.config.target.device) == device
    target = run.target.weight_bytes // run.target.tensor_parallel if here else 0
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if (need := target + 16 * trained + features) > free:
        raise UsageError(
            f"this run needs {format_size(need)} on {device}, and {format_size(free)} are free\n"
            f"  target {format_size(target)}, {trained} trained parameters of 16 bytes "
            f"{format_size(16 * trained)}, features of a batch {format_size(features)}\n"
            "  set topology.producers=1 to capture on another device, or capture at servers"
        )


# ---------------------------------------------------------------- the folder and its checkpoints


def _run_id(folder: Path) -> str:
    """Return the run's id, made at the first start and kept in the run's folder."""
    file = folder / "run.json"
    try:
        made = uuid.UUID(json.loads(file.read_text())["run_id"]) if file.exists() else uuid.uuid4()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UsageError(
            f"{file} does not hold a run's id, as draftcore writes it\n"
            "  delete it to give the run another id, or set another run folder"
        ) from None
    write_atomic(file, json.dumps({"run_id": made.hex}))
    return made.hex


def open_channel(run: Run) -> Channel:
    """Open the run's channel, with what its processes know and nobody else: the secret."""
    known = run.ranks.on_rank0(lambda: secret(run.folder)).encode()
    name, uri = run.channel.offer.name, run.config.channel
    return run.channel.hook.channel(name=name, uri=uri, secret=known)


def changes(now: BaseModel, then: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the settings that a resumed run must not change and did, with both values."""
    here = now.model_dump(mode="json")
    for name, info in type(now).model_fields.items():
        section, was = getattr(now, name), then.get(name)
        if FREE in info.metadata:
            continue
        if isinstance(section, BaseModel) and isinstance(was, Mapping):
            yield from changes(section, was, f"{path}{name}.")
        elif here[name] != was:
            yield f"{path}{name}: {was!r} then, {here[name]!r} now"


def require_same_run(last: Checkpoint, draft: DraftRun, features: Features, plan: Plan) -> None:
    """Refuse to go on from a checkpoint of other plugins, target, data or schedule."""
    then, target = last.state, draft.run.target.fingerprint
    changed = list(changes(draft.config, then["config"]))
    if then["target"] != target:
        changed.append(f"target: weights {then['target']} then, {target} now")
    if then["plan"] != plan.key:
        changed.append("data: other samples, or another order of them")
    elif not changed and then["features"] != features.provenance:
        differ = differences(features.provenance, then["features"], "then").strip()
        changed.append(f"features: {differ}")
    if changed:
        raise UsageError(
            f"{last.folder} was written by a run that differs from this one\n  "
            + "\n  ".join(changed)
            + "\n  undo the change to resume, or set another run folder to start anew"
        )


# ---------------------------------------------------------------- producing


def produce_features(run: Run) -> tuple[str, str]:
    """Capture for a trainer elsewhere until the run ends; see `producer.produce` for what returns.

    Raises UsageError where features made here would not be what the trainer asks for, and where
    the capture cannot work.
    """
    with stop_on_signal() as stop:

        def find() -> str:
            if stop:
                raise RunEnded("asked to stop", "interrupted")
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
                return str(json.loads((run.folder / "queue.json").read_text())["address"])
            return ""

        def prepare(about: Json) -> tuple[Capture, str]:
            request, theirs = read_request(about["request"]), str(about["provenance"])
            if (ours := run.provenance(request)) != theirs:
                raise UsageError(
                    "features captured here are not what the trainer trains on\n"
                    f"{differences(ours, theirs, 'for the trainer')}\n"
                    "  give the producer the trainer's target, algorithm and capture settings"
                )
            return open_capture(run, request), ours

        open_at = lambda uri: open_store(run, uri)[1]  # noqa: E731
        with closing(open_channel(run).connect(find)) as client:
            return produce(RemoteQueue(client), prepare, open_at, lambda: bool(stop), PATIENCE)


# ---------------------------------------------------------------- evaluation


def evaluate_draft(draft: DraftRun, built: Draft, step: int) -> Report:
    """Decode the eval prompts with a draft, for real. Raises UsageError without such prompts."""
    run, config = draft.run, draft.config
    run.runners["decode"].check(run.target)
    prompts, given = run.prompts(config.eval.prompts), config.data.eval or ()
    built.module.to(run.target.model.device).eval()
    with Progress(len(prompts), verb="decoding", every=config.eval.batch) as progress:
        report = evaluate_prompts(draft.decoder(built), prompts, config.eval, progress.show)
    about = {
        "draft": draft.label,
        "algorithm": draft.choice.name,
        "step": step,
        "target": run.target.path,
        "target_fingerprint": run.target.fingerprint,
        "data": named(given),
        "data_digest": open_source(given, run.find).key(),
        "left_out": run.left_out,
        "eval": config.eval.model_dump(mode="json"),
        "device": str(run.target.model.device),
        "dtype": str(run.target.dtype).removeprefix("torch."),
        "plugins": run.manifest([draft]),
        "versions": {one: version(one) for one in ("draftcore", "torch", "transformers")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    report = dataclasses.replace(report, about=about)
    more = more_metrics(draft.algorithm.hook, built, report.to_json(), draft.options)
    report = dataclasses.replace(report, more=more)
    run.observers.evaluated(step=step, report=report.to_json(), draft=draft.label)
    return report
