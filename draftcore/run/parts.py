"""A configured run: every part opened once, when first needed, checked against the others.

This is the composition root. Nothing else reads the configuration to decide what to build, and
nothing here computes: it finds the plugin, opens the part and says what does not fit. A `Run` is
what its drafts share, from the data to the feed; a `DraftRun` is one of them, with a configuration
as if it were alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast
from urllib.parse import quote

import numpy as np
import torch

from draftcore.config import RunConfig
from draftcore.contracts.algorithm import DataSummary, Draft, DraftBatch, Drafter, Sample
from draftcore.contracts.capture import Capture, FeatureRequest
from draftcore.contracts.channel import Channel
from draftcore.contracts.hooks import Specs
from draftcore.contracts.runner import DecodeRunner, PhaseName, Runner, RunnerContext
from draftcore.contracts.store import DurableStore, FeatureStore
from draftcore.contracts.target import TargetSpec
from draftcore.data.dataset import DataOptions, Dataset, build_dataset
from draftcore.data.plan import Plan
from draftcore.data.samples import Samples, StoredSamples, samples_data
from draftcore.errors import UsageError, nearest
from draftcore.feed import Feed, Producer, Source
from draftcore.files import hold, write_atomic
from draftcore.plugins.binding import Binding, bind, observers
from draftcore.plugins.catalog import lacking
from draftcore.plugins.registry import Plugin, Registry
from draftcore.run.provenance import differences, provenance
from draftcore.target import TransformersTarget
from draftcore.tensors import resolve_device
from draftcore.training.checkpoint import Checkpoint
from draftcore.training.ranks import ALONE, Ranks

PATIENCE = 600.0  # seconds that a producer waits for the trainer's first word
LEAST_RING = 64 << 20  # bytes
TEXT_BYTES, HEAD_BYTES = 9, 4096  # beside the features: of a token, of a sample


class Run:
    """The parts of one run. Properties open on first use; `close` ends what was opened.

    On several ranks each has a Run. What reads data, asks the channel or writes into the folder is
    opened on rank 0 alone.
    """

    def __init__(
        self,
        config: RunConfig,
        registry: Registry,
        ranks: Ranks = ALONE,
        role: Literal["both", "trainer", "producer"] = "both",
    ) -> None:
        self.config, self.registry, self.folder = config, registry, config.run
        self.ranks, self.role = ranks, role
        self._lock: int | None = None

    # ------------------------------------------------------------ drafts and plugins

    @functools.cached_property
    def drafts(self) -> tuple[DraftRun, ...]:
        """The drafts of the run: one without a label, or several by label."""
        if self.config.algorithm is not None:
            return (DraftRun(self, "", self.config),)
        return tuple(
            DraftRun(self, label, _alone(self.config, label)) for label in self.config.drafts
        )

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

    @functools.cached_property
    def observers(self) -> Specs:
        """The run's observers; none on ranks other than 0."""
        if self.ranks.rank:
            return observers(Registry(()))
        return observers(self.registry, self.config.plugins)

    @functools.cached_property
    def plugins(self) -> tuple[Plugin, ...]:
        """Who provides what the drafts share: capture, store, channel, wrappers and observers."""
        config = self.config
        return (
            self.registry.find("capture", config.capture.name),
            self.registry.find("store", self.store_name),
            self.registry.find("channel", _scheme(self.channel_uri)),
            *self.registry.extras(config.plugins),
        )

    def manifest(self, drafts: Iterable[DraftRun]) -> list[dict[str, str]]:
        """Name, dist, version and origin of every plugin that these drafts depend on."""
        chosen = [*(draft.algorithm.plugin for draft in drafts), *self.plugins]
        return self.registry.manifest({plugin.name: plugin for plugin in chosen}.values())

    # ------------------------------------------------------------ target, features, data

    @functools.cached_property
    def target(self) -> TargetSpec:
        target = self.config.target
        spec = TransformersTarget(target.path, target.revision, target.dtype, target.device)
        spec.prefill_with = lambda model: self.runners["prefill"].prefill(model)
        return spec

    @functools.cached_property
    def runners(self) -> Mapping[PhaseName, Runner]:
        """Who runs the target in capture (prefill), and target and draft in decoding (decode)."""
        config, longest = self.config, self.config.data.max_length
        decoded = longest + config.eval.max_new_tokens
        return {
            "prefill": self._runner("prefill", config.capture.batch, longest),
            "decode": self._runner("decode", config.eval.batch, decoded),
        }

    def _runner(self, phase: PhaseName, rows: int, longest: int) -> Runner:
        config, chosen = self.config, getattr(self.config.runner, phase)
        bind_offer = functools.partial(bind, self.registry, extras=config.plugins)
        try:
            binding = bind_offer("runner", chosen.name)
            options = binding.options(chosen.options)
        except UsageError as error:
            raise UsageError(f"runner.{phase}: {error}") from None
        context = RunnerContext(
            phase=phase,
            rows=rows,
            longest=longest,
            temperature=config.eval.temperature,
            capture=config.capture.name,
            bind=bind_offer,
            offered=self.registry.offered,
        )
        opened: Runner = binding.hook.runner(name=chosen.name, context=context, options=options)
        return opened

    @functools.cached_property
    def request(self) -> FeatureRequest:
        """What is captured: all that any draft asks for, or a durable store's wider request."""
        requests = [draft.request for draft in self.drafts]
        if len(dtypes := {request.dtype for request in requests}) > 1:
            raise UsageError(
                f"the drafts of this run ask for features of {' and '.join(sorted(dtypes))}\n"
                "  set capture.dtype to one type for all"
            )
        wanted, manifest = functools.reduce(FeatureRequest.union, requests), self._manifest()
        if manifest is None:
            return wanted
        held = FeatureRequest(
            **{**manifest["request"], "layers": tuple(manifest["request"]["layers"])}
        )
        return held if held.serves(wanted) else wanted

    @property
    def token_bytes(self) -> int:
        """Stored bytes of one token's features."""
        dtype: torch.dtype = getattr(torch, self.request.dtype)
        width = int(self.target.text_config.hidden_size)
        return len(self.request.names) * width * dtype.itemsize

    @functools.cached_property
    def samples(self) -> Samples:
        """The training samples, from the data file or, without one, from the store's manifest.

        Ranks other than 0 take its description of them, so all must ask for it at the same time.
        """
        return self.ranks.first(self._samples, pack=samples_data, unpack=StoredSamples)

    def _samples(self) -> Samples:
        manifest = self._manifest()
        if self.config.data.train is None:
            if manifest is None or not manifest["complete"]:
                raise UsageError(
                    f"data.train is not set and the store {self.config.store!r} holds no complete capture\n"
                    "  set data.train, or point store at a folder that `draftcore capture` finished"
                )
            return StoredSamples(manifest)
        dataset = self.dataset(self.config.data.train, "train", limit=self.config.data.limit)
        if manifest is not None and manifest["fingerprint"] != dataset.fingerprint:
            raise UsageError(
                f"the store {self.config.store!r} holds features of other data\n"
                f"  store: {manifest['fingerprint']}, {self.config.data.train}: {dataset.fingerprint}\n"
                "  use another store folder, or delete this one to capture again"
            )
        return dataset

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
        if dataset.report.skipped:
            print(dataset.report.text(), file=sys.stderr)
        return dataset

    @functools.cached_property
    def plan(self) -> Plan:
        train = self.config.train
        return Plan(
            self.samples.feature_ids,
            self.samples.lengths.tolist(),
            capture_batch=self.config.capture.batch,
            batch=train.batch * train.accumulate,
            seed=train.seed,
            epochs=train.epochs,
            max_steps=train.max_steps,
            window=train.window,
        )

    # ------------------------------------------------------------ stores and channels

    @functools.cached_property
    def store_uri(self) -> str:
        """Where features lie; a producer asks the trainer. All ranks must ask at the same time."""
        if self.role == "producer":
            return self.channel.about(PATIENCE)["store"]
        if self.config.store != "auto":
            return self.config.store
        if self.store_name == "memory":
            return "memory"
        run_id = self.ranks.first(lambda: self.run_id)
        return f"{self.store_name}:{run_id}?run={run_id}&max_bytes={self._ring_bytes()}"

    @functools.cached_property
    def store_name(self) -> str:
        """The store's name among the plugins; `auto` of several processes is one in shared memory."""
        if self.role == "producer" or self.config.store != "auto":
            return _scheme(self.store_uri)
        if self.role == "both" and self.ranks.size == 1:
            return "memory"
        fast = self.registry.offering("store", "memory-speed")
        if len(fast) != 1:
            several = f"several stores are in shared memory: {', '.join(fast)}"
            raise UsageError(
                "the features of several processes need a store in shared memory, for store=auto\n"
                f"  {several if fast else lacking('store', 'memory-speed')}\n"
                "  or set store to the one that you mean, such as file:FOLDER"
            )
        return fast[0]

    def _ring_bytes(self) -> int:
        """Room for two windows of the plan, twice over: what is free in a ring may lie scattered.

        At most half of the host's shared memory. The same at every start of a run, as processes
        that outlive the trainer hold on to its ring.
        """
        longest = np.sort(self.samples.lengths)[-2 * self.plan.window * self.plan.batch :]
        need = 2 * int((longest * (self.token_bytes + TEXT_BYTES) + HEAD_BYTES).sum())
        return max(LEAST_RING, min(need, shutil.disk_usage("/dev/shm").total // 2))

    @functools.cached_property
    def channel_uri(self) -> str:
        if self.config.channel != "auto":
            return self.config.channel
        if self.role == "both":
            return "memory"
        # Named by where the run ends: one that is made longer finds its old channel finished.
        train = self.config.train
        end = f"{train.epochs}-{train.max_steps}" if train.max_steps else f"{train.epochs}"
        uri = f"sqlite:{quote(str(self.folder))}/channel-{end}.db"
        if self.role == "producer" or (limit := self.store.stats().limit_bytes) is None:
            return uri
        return f"{uri}?limit_bytes={limit // 2}"  # what is free in a ring may lie scattered

    @functools.cached_property
    def durable(self) -> bool:
        return "durable" in self._store_binding.capabilities

    @functools.cached_property
    def _store_binding(self) -> Binding:
        return bind(self.registry, "store", self.store_name, self.config.plugins)

    @functools.cached_property
    def store(self) -> FeatureStore:
        """Unless it is durable, rank 0 makes it, and all ranks must ask for it at the same time."""
        uri = self.store_uri
        if self.durable:
            return self._open_store(uri)
        return self.ranks.first(
            lambda: self._open_store(uri), pack=lambda store: store.uri, unpack=self._open_store
        )

    def _open_store(self, uri: str) -> FeatureStore:
        name, binding = _scheme(uri), self._store_binding
        return binding.hook.feature_store(name=name, uri=uri, options=binding.options({}))

    def change_store(self) -> None:
        """Leave a producer's store for the one of a trainer that began again."""
        if "store" in self.__dict__:  # else it did not answer when this was tried before
            self.store.close()
        for part in ("store", "durable", "_store_binding", "store_name", "store_uri"):
            self.__dict__.pop(part, None)
        self.require_shared_store()
        self.producer.store = self.store

    @functools.cached_property
    def channel(self) -> Channel:
        name, uri = _scheme(self.channel_uri), self.channel_uri
        binding = bind(self.registry, "channel", name, self.config.plugins)
        if self.role != "both" and "shared" not in binding.capabilities:
            raise UsageError(
                f"trainer and producers are processes of their own, and {uri!r} stays in one\n"
                "  set channel=sqlite:FILE, or another that `draftcore list-plugins` shows as shared"
            )
        run_id = self.run_id if self.role != "producer" else self._known_run_id()
        return binding.hook.channel(
            name=name, uri=uri, run_id=run_id, options=binding.options({}), role=self.role
        )

    @functools.cached_property
    def feed(self) -> Feed:
        """The features of every step, from this store, this channel and, if needed, this target."""
        self.check_store()
        # Features in this process's memory, and those captured on demand, are not waited for.
        ahead = self.durable or self.role == "trainer"
        return Feed(
            self.ranks,
            self.store,
            self._source,
            names=self.request.names,
            durable=self.durable,
            ahead=ahead,
            overlap=self.overlap,
        )

    def _source(self) -> Source:
        self.channel.announce({"store": self.store.uri, "provenance": self.provenance})
        return Source(
            self.plan,
            self.store,
            self.channel,
            self.producer if self.role == "both" else None,
            names=self.request.names,
            dtype=self.request.dtype,
            width=self.target.text_config.hidden_size,
            provenance=self.provenance,
        )

    @functools.cached_property
    def producer(self) -> Producer:
        return Producer(self.open_capture, self.samples, self.store, self.channel, self.provenance)

    def open_capture(self) -> Capture:
        self.runners["prefill"].check(self.target)  # also where the backend does not ask
        return self.capture_binding.hook.capture(
            name=self.config.capture.name,
            target=self.target,
            request=self.request,
            options=self.capture_options,
        )

    @property
    def overlap(self) -> torch.device | None:
        """Where the target captures for a step while the one before trains; None: it does not.

        Raises UsageError where that was asked for and the capture backend does not offer it.
        """
        name = self.config.capture.name
        if self.role != "both" or not self.config.train.overlap:
            return None
        offer = self.registry.find("capture", name).offer("capture", name)
        assert offer is not None
        if "overlap" not in offer.capabilities:
            raise UsageError(
                f"train.overlap=true was set, and the capture {name!r} cannot work beside training\n"
                "  leave train.overlap out, or choose a capture that `draftcore list-plugins` shows "
                "with overlap"
            )
        return resolve_device(self.config.target.device)

    @functools.cached_property
    def capture_binding(self) -> Binding:
        return bind(self.registry, "capture", self.config.capture.name, self.config.plugins)

    @functools.cached_property
    def capture_options(self) -> Any:
        """The capture's options, checked by its plugin's model; None where it has none."""
        return self.capture_binding.options(self.config.capture.options)

    @functools.cached_property
    def provenance(self) -> str:
        """How features were made: what must be equal for one to stand for another."""
        return provenance(self.target, self.request, self.config, self.capture_options)

    def check_store(self) -> None:
        """Refuse a durable store that holds features of another target, request or capture."""
        manifest = self._manifest()
        if manifest is not None and manifest["provenance"] != self.provenance:
            differ = differences(self.provenance, manifest["provenance"], "in the store")
            raise UsageError(
                f"the store {self.store_uri!r} holds features that this run cannot use\n{differ}\n"
                "  use another store folder, or delete this one to capture again"
            )

    def require_shared_store(self) -> None:
        """Refuse a store that only one process reaches for a run of several."""
        alone = self.ranks.size == 1 and self.role == "both"
        if not alone and "shared" not in self._store_binding.capabilities:
            raise UsageError(
                "this run has several processes that reach for its features, and the store "
                f"{self.store_uri!r} is reached by one only\n"
                "  set store=file:FOLDER, or another store that `draftcore list-plugins` shows as shared"
            )
        producers = self.config.topology.producers
        if producers > 1 and "one-writer" in self._store_binding.capabilities:
            raise UsageError(
                f"{producers} producers put features into the store, and {self.store_uri!r} lets one "
                "process write\n  set topology.producers=1, or store=auto"
            )

    def write_manifest(self, *, complete: bool) -> None:
        """Describe a durable store's content, so that another host can train from it alone."""
        cast(DurableStore, self.store).write_manifest(
            {
                "complete": complete,
                "fingerprint": self.samples.summary.fingerprint,
                "request": dataclasses.asdict(self.request),
                "provenance": self.provenance,
                **samples_data(self.samples),
                "target": {"path": self.target.path, "revision": self.target.revision},
                "plugins": self.manifest(self.drafts),
            }
        )

    def _manifest(self) -> dict[str, Any] | None:
        return cast(DurableStore, self.store).read_manifest() if self.durable else None

    # ------------------------------------------------------------ the folder

    @functools.cached_property
    def run_id(self) -> str:
        """Made at the first start, kept in the run's folder; stores and channels check it."""
        run_id = self._known_run_id() or uuid.uuid4().hex
        write_atomic(self.folder / "run.json", json.dumps({"run_id": run_id}))
        return run_id

    def hold_folder(self) -> None:
        """Be the one trainer of this folder until `close`. Raises DraftcoreError beside another."""
        self._lock = hold(
            self.folder / ".lock",
            f"trains in {self.folder}",
            "wait for it to end, or set another run folder: two would overwrite each other's work",
        )

    def _known_run_id(self) -> str:
        """The run's id if the folder has it; '' for a producer elsewhere, which is told it."""
        file = self.folder / "run.json"
        if not file.exists():
            return ""
        try:
            return str(json.loads(file.read_text())["run_id"])
        except (ValueError, TypeError, KeyError):
            raise UsageError(
                f"{file} does not hold a run's id, as draftcore writes it\n"
                "  delete it to give the run another id, or set another run folder"
            ) from None

    def close(self) -> None:
        """Close what was opened, in the order of use."""
        parts = ("feed",) if "feed" in self.__dict__ else ("producer", "channel", "store")
        try:
            for part in parts:
                if part in self.__dict__:
                    getattr(self, part).close()
        finally:
            if self._lock is not None:
                os.close(self._lock)


class DraftRun:
    """One draft of a run: its algorithm, bound alone, its settings and its folder.

    `config` is the run's as if this draft were the only one, so that a checkpoint made beside
    others is the one that the draft alone would have made. `label` is empty for a single draft.
    """

    def __init__(self, run: Run, label: str, config: RunConfig) -> None:
        assert config.algorithm is not None
        self.run, self.label, self.config, self.folder = run, label, config, config.run
        self.choice = config.algorithm

    @functools.cached_property
    def algorithm(self) -> Binding:
        run = self.run
        return bind(run.registry, "algorithm", self.choice.name, run.config.plugins)

    @functools.cached_property
    def options(self) -> Any:
        return self.algorithm.options(self.choice.options)

    @functools.cached_property
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

    def collate(self, samples: Sequence[Sample], device: torch.device) -> DraftBatch:
        """Batch samples on a device, with the features that this draft asked for and no others'.

        They are moved before they are padded: a host took an eighth of a GPU's step for that.
        """
        names = self.request.names
        own = [
            dataclasses.replace(s, features={name: s.features[name] for name in names}).to(device)
            for s in samples
        ]
        batch: DraftBatch = self.algorithm.hook.collate(samples=own, options=self.options)
        return batch.to(device)

    def drafter(self, draft: Draft) -> Drafter:
        return self.algorithm.hook.drafter(
            draft=draft, target=self.run.target.model, options=self.options
        )

    def decoder(self, draft: Draft) -> DecodeRunner:
        """What decodes with the draft, whose weights may be updated in place meanwhile."""
        target, drafter = self.run.target.model, self.drafter(draft)
        return self.run.runners["decode"].decode(target, drafter, draft.module)


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


def require_plugins(found: Checkpoint, registry: Registry) -> None:
    """Raise UsageError where a plugin that took part in a checkpoint's run is not here."""
    if missing := registry.missing(found.state["plugins"]):
        raise UsageError(f"{found.folder}: {missing}")


def _scheme(uri: str) -> str:
    return uri.partition(":")[0]
