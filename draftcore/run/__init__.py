"""A configured run: target, drafts and runners, opened and checked against each other.

This package is the composition root: nothing else reads the configuration to decide what to build. A
`Run` is what every verb needs. `features` opens what a run captures and where it is kept. Each program
is a module that reads from top to bottom: `train`, `capture`, `produce`, `evaluate`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from draftcore.config import RunConfig, Sources
from draftcore.contracts.algorithm import DataSummary, Draft, Drafter
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.channel import Channel
from draftcore.contracts.hooks import Specs
from draftcore.contracts.runner import DecodeRunner, PhaseName, Runner, RunnerContext
from draftcore.contracts.target import ImageProcessor, TargetSpec
from draftcore.data.dataset import DataReport, Dataset, build_dataset, date_of, read_prompts
from draftcore.data.rendering import NoImages
from draftcore.data.sources import named
from draftcore.errors import UsageError, nearest
from draftcore.features.provenance import provenance
from draftcore.files import require_exported, secret
from draftcore.plugins.binding import Binding, bind, find_source, observers
from draftcore.plugins.registry import Registry
from draftcore.target import TransformersTarget
from draftcore.training.checkpoint import Checkpoint, latest, open_checkpoint
from draftcore.training.loop import DraftSetup
from draftcore.training.ranks import SINGLE_RANK, Ranks

Role = Literal["both", "trainer", "producer"]
PHASES: tuple[PhaseName, ...] = ("prefill", "decode")


class Run:
    """What every verb needs of a run. On several ranks each has one.

    `target` takes the place of the one that the configuration names. Raises UsageError for a plugin
    that the run names and that is not here, before any work.
    """

    def __init__(
        self, config: RunConfig, registry: Registry, ranks: Ranks = SINGLE_RANK,
        target: TransformersTarget | None = None,
    ) -> None:  # fmt: skip
        self.config, self.registry, self.folder, self.ranks = config, registry, config.run, ranks
        self.queue_file = config.run / "queue.json"  # the address of the trainer's queue
        self.find = functools.partial(find_source, registry)  # opens a plugin's training data
        self.closing = ExitStack()  # of the stores that were opened, however the verb ends
        choice = config.capture
        self.capture = self.bind("capture", choice.name, choice.options, choice.plugin)
        if config.target.tensor_parallel > 1 and "tensor-parallel" not in self.capture.capabilities:
            raise UsageError(
                f"the capture {choice.name!r} does not read target.tensor_parallel: its own options, or its "
                "servers, share a target\n  set capture.options.tp, see its README, or capture.name=hf"
            )
        self.channel = self.bind("channel", config.channel.partition(":")[0])
        if config.store != "auto":
            registry.find("store", config.store.partition(":")[0])
        self.runners = {phase: self._open_runner(phase) for phase in PHASES}
        self.target = target or TransformersTarget(
            **config.target.model_dump(),
            prefill_with=self.runners["prefill"].prefill,
            open_images=self._open_images,
        )
        self.width = int(self.target.text_config.hidden_size)
        self.drafts = tuple(DraftRun(self, label) for label in config.drafts or [""])
        self.observers: Specs = observers(
            Registry(()) if ranks.rank else registry, () if ranks.rank else config.plugins
        )

    def _open_images(self, target: TargetSpec) -> ImageProcessor:
        """Open what reads images, or what refuses rows with images and says why."""
        try:
            processor = self.bind("images", "processor").hook
        except UsageError as error:
            return NoImages(str(error))
        if "images" not in self.capture.capabilities:
            others = ", ".join(self.registry.offering("capture", "images"))
            name = self.config.capture.name
            return NoImages(f"the capture {name!r} reads text alone\n  set capture.name={others}")
        return processor.image_processor(name="processor", target=target)

    def _open_runner(self, phase: PhaseName) -> Runner:
        """Open who runs the target in capture (prefill), or target and draft in decoding (decode)."""
        config, choice = self.config, getattr(self.config.runner, phase)
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
            binding = self.bind("runner", choice.name, choice.options, choice.plugin)
        except UsageError as error:
            raise UsageError(f"runner.{phase}: {error}") from None
        return binding.hook.runner(name=choice.name, context=context, options=binding.options)

    def chosen(self, label: str | None, **folders: Path | None) -> tuple[DraftRun, ...]:
        """Return the draft of this label, or all.

        Raises UsageError for a label that is not there, and for several drafts where an option names
        one of the `folders`, which can be of one draft only.
        """
        labels = list(self.config.drafts)
        drafts = tuple(draft for draft in self.drafts if label in (None, draft.label))
        if not drafts:
            raise UsageError(
                f"there is no draft {label!r}{nearest(str(label), labels)}\n"
                f"  drafts of this run: {', '.join(labels) or 'a single one, without a label'}\n"
                "  name one of them with --draft, or leave that out"
            )
        options = [f"--{name}" for name, folder in folders.items() if folder is not None]
        if options and len(drafts) > 1:
            raise UsageError(
                f"{' and '.join(options)} can be given for one draft only, and the run has "
                f"{', '.join(labels)}\n  choose one with --draft"
            )
        return drafts

    def bind(
        self, kind: Any, name: str, options: Mapping[str, Any] | None = None, plugin: str = ""
    ) -> Binding:
        return bind(self.registry, kind, name, options or {}, self.config.plugins, plugin)

    def open_channel(self) -> Channel:
        """Open the run's channel, with what its processes know and nobody else: the secret."""
        shared = self.ranks.on_rank0(lambda: secret(self.folder)).encode()
        name, uri = self.channel.offer.name, self.config.channel
        return self.channel.hook.channel(name=name, uri=uri, secret=shared)

    def provenance(self, request: FeatureRequest) -> str:
        """Say how features of this request are made here."""
        return provenance(self.target, request, self.config, self.capture.options)

    def manifest(self, drafts: Iterable[DraftRun], *shared: Binding) -> list[dict[str, str]]:
        """Name, dist, version and origin of every plugin that these drafts depend on."""
        plugins = [bound.plugin for bound in (*(draft.algorithm for draft in drafts), *shared)]
        plugins += self.registry.extras(self.config.plugins)
        return self.registry.manifest({plugin.name: plugin for plugin in plugins}.values())

    def dataset(
        self, sources: Sources, name: str, limit: int | None = None, date: str = ""
    ) -> Dataset:
        """Render data with the chat template, which is told `date`; kept in the run's folder."""
        options = self.config.data.model_copy(update={"limit": limit})
        folder, tokenizer = self.folder / "data" / name, self.target.load_tokenizer()
        dataset = build_dataset(
            sources, tokenizer, options, folder,
            find=self.find, date=date, processor=self.target.images,
        )  # fmt: skip
        if (dataset.report.skipped or dataset.report.notes) and not self.ranks.rank:
            print(dataset.report.text(), file=sys.stderr)
        return dataset

    def prompts(self, limit: int | None) -> tuple[list[list[int]], DataReport]:
        """Read the eval prompts, which are told the date of the training data."""
        data, folder = self.config.data, self.folder / "data"
        if data.eval is None:
            raise UsageError("data.eval is not set\n  set it to held-out conversations in JSONL")
        date = date_of(folder / "train") or date_of(folder / "eval")
        report, tokenizer = DataReport(named(data.eval)), self.target.load_tokenizer()
        prompts = read_prompts(
            data.eval, tokenizer, limit, data, find=self.find, date=date, report=report
        )
        return prompts, report


class DraftRun:
    """One draft of a run: its algorithm, bound alone, its settings and its folder.

    `config` is the run's as if this draft were the only one, so that a checkpoint made beside
    others is the one that the draft alone would have made. `label` is empty for a single draft;
    `prefix` begins a line about one of several.
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
        self.prefix, self.choice = f"{label}: " if label else "", config.algorithm
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
        opened = open_checkpoint(folder) if folder else ranks.on_rank0(lambda: latest(root))
        with ranks.raise_on_all():
            if opened and (missing := self.run.registry.missing(opened.state["plugins"])):
                raise UsageError(f"{opened.folder}: {missing}")
        return opened

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
        compiles = "compile" in self.algorithm.capabilities and not self.config.train.shard
        if self.config.train.compile is True and not compiles:
            raise UsageError(
                f"train.compile is on, and the algorithm {self.choice.name!r} has no capability compile, "
                "or train.shard is on\n  leave it out: auto compiles what can be"
            )
        hook, request = self.algorithm.hook, self.request()
        return DraftSetup(
            self.label, self.folder, self.config, hook, self.options, request, about, compiles
        )

    def drafter(self, draft: Draft) -> Drafter:
        return self.algorithm.hook.drafter(
            draft=draft, target=self.run.target.load_model(), options=self.options
        )

    def decoder(self, draft: Draft) -> DecodeRunner:
        """What decodes with the draft, whose weights may be updated in place meanwhile."""
        target, drafter = self.run.target.load_model(), self.drafter(draft)
        return self.run.runners["decode"].decode(target, drafter, draft.module)
