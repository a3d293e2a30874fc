"""A configured run: target, drafts and captures, opened and checked against each other.

This package is the composition root: nothing else reads the configuration to decide what to build. A
`Run` is what every verb needs. `features` opens what a run captures and where it is kept. Each program
is a module that reads from top to bottom: `train`, `capture`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel

from draftcore.config import Choice, RunConfig, Selection, TargetConfig
from draftcore.contracts.algorithm import DataSummary, Draft, Drafter
from draftcore.contracts.capture import BadRows, FeatureRequest
from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import FREE, SAME_FEATURES, Kind
from draftcore.contracts.run import Evaluation, OpenDraft, OpenRun, Ranks, RunSamples, Samples
from draftcore.contracts.runner import PhaseName, Runner, RunnerContext
from draftcore.contracts.store import FeatureStore
from draftcore.data.samples import batch_of
from draftcore.errors import DraftcoreError, UsageError, nearest, raised
from draftcore.features.checks import CheckedCapture
from draftcore.files import require_exported
from draftcore.plugins import catalog
from draftcore.plugins.binding import Binding, bind, observers
from draftcore.plugins.registry import Registry
from draftcore.training.checkpoint import Checkpoint, best, latest, missing, open_checkpoint
from draftcore.training.ranks import SINGLE_RANK
from draftcore.uris import format_size

Role = Literal["both", "trainer"]
NO_MEMORY = "out of memory|can't allocate memory|MemoryError"  # as torch and Python say it


class Run(OpenRun):
    """What every verb needs of a run; each rank has one.

    Raises UsageError for a plugin that the run names and that is not here, before any work.
    """

    def __init__(self, config: RunConfig, registry: Registry, ranks: Ranks = SINGLE_RANK) -> None:
        self.config, self.registry, self.folder, self.ranks = config, registry, config.run, ranks
        self.closing = ExitStack()  # of the stores that were opened, however the verb ends
        self.selected = dict[tuple[str, str], Binding]()
        self.opened_evaluation: Evaluation | None = None
        for offer in (offer for p in registry.extras(config.plugins) for offer in p.offers):
            if offer.kind == "observer" and (lacks := offer.lacks()):
                raise UsageError(lacks)
        self.capture = self.select("capture", config.capture)
        for key in {"batches", "channel", "store"} & config.model_fields_set:
            if (name := getattr(config, key).partition(":")[0]) != "auto":
                registry.find(key, name)
        named, self.target_kind = config.target, self.select("target", config.target)
        self.target_options = self.target_kind.options
        resolved = self.target_options.model_dump(mode="json")
        section = TargetConfig(**resolved, name=named.name, plugin=named.plugin)
        self.config = config.model_copy(update={"target": section})
        later = {"samples": config.data, "evaluation": config.eval, "runner": config.runner.decode}
        for kind, choice in later.items():
            if choice is not None and choice.model_fields_set:  # a mistake there is named now
                self.select(kind, choice)
        self.target = self.target_kind.hook.target(name=named.name, options=self.target_options)
        if self.target.devices > 1 and "tensor-parallel" not in self.capture.capabilities:
            raise UsageError(
                f"the capture {config.capture.name!r} does not share a target over devices as "
                "target.tensor_parallel says: its own options, or its servers, do\n"
                "  set capture.options.tp, see its README, or "
                f"capture.name={', '.join(registry.offering('capture', 'tensor-parallel'))}"
            )
        self.prefill: Runner | None = None
        if (runner := config.runner.prefill) is not None:
            rows, longest = self.largest_batch()
            self.prefill = self.open_runner("prefill", runner, rows=rows, longest=longest)
            self.target.prefill_with = self.prefill.prefill
        if self.target.is_multimodal:
            self.target.images = self.data.images
        self.width = int(self.target.text_config.hidden_size)
        labels = config.drafts or [""]
        self.drafts: tuple[DraftRun, ...] = tuple(DraftRun(self, label) for label in labels)
        name = catalog.default("observer")
        owner = name, catalog.owners("observer")[name]
        judged = registry.judged(lambda plugin: (plugin.name, plugin.dist) == owner)
        always = [plugin.name for plugin in judged if not plugin.problem]
        watching = (Registry(()), ()) if ranks.rank else (registry, [*config.plugins, *always])
        self.observers: Specs = observers(*watching)

    @functools.cached_property
    def data(self) -> RunSamples:
        """The rows of the run; opened when they are first asked for."""
        bound = self.select("samples", section := self.config.data)
        return bound.hook.samples(name=section.name, run=self, options=bound.options)

    def largest_batch(self) -> tuple[int, int]:
        """Return how many of the longest rows make a batch, and the tokens of each."""
        train, longest = self.config.train, self.data.longest
        most = max(1, (train.batch_tokens or 10**9) // longest)
        return min(train.batch, most), longest

    def evaluation(self) -> Evaluation:
        """Open what measures drafts; one for all of them."""
        if self.opened_evaluation is None:
            bound = self.select("evaluation", section := self.config.eval)
            asked = {"name": section.name, "run": self, "options": bound.options}
            self.opened_evaluation = bound.hook.evaluation(**asked)
        return self.opened_evaluation

    def open_runner(
        self, phase: PhaseName, choice: Choice | None, *, rows: int, longest: int,
        temperature: float = 0.0,
    ) -> Runner:  # fmt: skip
        """Open who runs the target in capture, or target and draft in decoding; without a choice ours."""
        choice = choice or Choice(name=catalog.default("runner"))
        capture = self.config.capture.name
        context = RunnerContext(
            phase, rows, longest, temperature, capture, bind=self.bind, offered=self.offered
        )
        try:
            binding = self.select("runner", choice)
        except UsageError as error:
            raise UsageError(f"runner.{phase}: {error}") from None
        return binding.hook.runner(name=choice.name, context=context, options=binding.options)

    def report_runners(self, say: Callable[[str], object]) -> None:
        """Tell what the runners of capture and evaluation have to say of what they ran."""
        decode = getattr(self.opened_evaluation, "runner", None)
        for phase, runner in (("prefill", self.prefill), ("decode", decode)):
            for line in runner.report() if runner is not None else ():
                say(f"{f'runner.{phase}':28}  {line}")

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

    def select(self, kind: str, section: Selection | Choice) -> Binding:
        """Bind what a section of the configuration selects; one that is read twice is bound once."""
        key = kind, section.model_dump_json()
        if key not in self.selected:
            beside = type(section).model_fields if isinstance(section, Selection) else ()
            choice, extras = (kind, section.name, section.options), self.config.plugins
            self.selected[key] = bind(self.registry, *choice, extras, section.plugin, beside)
        return self.selected[key]

    def offered(self, kind: Kind) -> Mapping[str, frozenset[str]]:
        return self.registry.offered(kind)

    def provenance(self, request: FeatureRequest) -> str:
        """Describe how features of this request are made here: what others must equal to stand for them.

        It is stored beside each sample and in a durable store's manifest: JSON of the settings that change
        a bit of a feature. Of a capture's options all do, unless their field says otherwise:

            patience: float = Field(default=300, json_schema_extra=SAME_FEATURES)

        Where the target runs is left out: features captured on a GPU may be trained on elsewhere.
        """
        config, target = self.config, self.target
        settings: dict[str, Any] = {
            "target": target.fingerprint(),
            "target.dtype": str(target.dtype).removeprefix("torch."),
            "features": request.names,
            "capture.dtype": request.dtype,
            "capture": config.capture.name,
            "train.batch": config.train.batch,
            **target.settings,
        }
        beside = {"topk": request.topk, "capture.options": changed_options(self.capture.options)}
        beside["train.batch_tokens"] = config.train.batch_tokens
        settings |= {name: value for name, value in beside.items() if value}
        if config.target.name != catalog.default("target"):
            settings["target.name"] = config.target.name
        if (runner := config.runner.prefill) is not None:
            # A runner may pad, to sizes that follow from these two, and that changes the last bits.
            settings["runner.prefill"] = runner.model_dump(mode="json", exclude_defaults=True)
            settings["data.max_length"] = self.data.longest
        return json.dumps(settings, sort_keys=True)

    def differences(self, request: FeatureRequest, theirs: str, whose: str) -> str:
        """Say where another provenance of these features differs from that here, a line each."""
        return differences(self.provenance(request), theirs, whose)

    def open_store(self, uri: str) -> tuple[Binding, FeatureStore]:
        """Open a store: a durable one on each rank, any other on rank 0, whose URI the others join."""
        name, ranks = uri.partition(":")[0], self.ranks
        binding, store = self.bind("store", name), None
        open_at = functools.partial(binding.hook.feature_store, name=name)
        with ranks.raise_on_all():
            if not ranks.rank or "durable" in binding.capabilities:
                store = open_at(uri=uri)
        (first_uri, *_) = ranks.all_gather(store.uri if store else "")
        store = store or open_at(uri=first_uri)
        self.closing.callback(store.close)
        return binding, store

    def open_capture(
        self, request: FeatureRequest, samples: Samples | None = None
    ) -> CheckedCapture:
        """Open the run's capture, which checks itself, also on a row with images if `samples` have one.

        Raises UsageError where it cannot work.
        """
        if self.prefill is not None:
            self.prefill.check(self.target)  # also where the backend does not ask
        asked: Any = {"target": self.target, "request": request, "options": self.capture.options}
        capture = self.capture.hook.capture(name=self.capture.offer.name, **asked)
        specs = request.feature_specs(self.width)
        checked = CheckedCapture(capture, str(self.capture.plugin), specs)
        if samples is None or not self.target.images:
            return checked
        with ExitStack() as failed:
            failed.callback(checked.close)
            for row in filter(samples.images, range(len(samples.feature_ids))):
                with suppress(BadRows):  # a target whose images it cannot capture is refused now
                    list(checked.features([batch_of(0, (row,), samples)]))
                break
            failed.pop_all()
        return checked

    def explain_memory(self, error: BaseException) -> None:
        """Raise DraftcoreError where the cause of an error is too little memory, whoever asked for it."""
        while error.__cause__ is not None:
            error = error.__cause__
        if isinstance(error, DraftcoreError) or not re.search(NO_MEMORY, raised(error)):
            return
        options = {k: n for d in self.drafts if d.options for k, n in vars(d.options).items()}
        counts = [f"algorithm.options.{k}={n}, " for k, n in options.items() if type(n) is int]
        train, (rows, longest) = self.config.train, self.largest_batch()
        limit = f"train.batch_tokens={train.batch_tokens}, " * bool(train.batch_tokens)
        _, step = self.step_memory([longest] * rows)
        taken = f", where a step takes up to {format_size(step)} beside weights" * (step > 0)
        free = format_size(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        raise DraftcoreError(
            f"{' '.join(re.split(r'(?<=[.]) ', raised(error))[:3])}\n"
            f"  asked: {limit}train.batch={train.batch}, data.max_length={longest}, "
            f"{''.join(counts)}vocabulary {self.target.vocab_size}{taken}; free beside GPUs: {free}\n"
            "  lower these, in this order, in another run folder, and eval.batch to evaluate; or set "
            "topology.producers, to capture in other processes, or train.shard, to divide drafts\n"
            "  `draftcore plan` says what each comes to"
        )

    def step_memory(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Return what all drafts take between steps, and the most that a step on such rows takes more.

        Both are 0 where nobody knows, or is here to say.
        """
        masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
        with suppress(Exception):  # of an algorithm that reads what features hold
            name, *_ = catalog.owners("memory")
            hook: Any = self.bind("memory", name).hook
            taken = [hook.step_memory(name=name, draft=d, masks=masks) for d in self.drafts]
            return sum(held for held, _ in taken), max(peak - held for held, peak in taken)
        return 0, 0

    def manifest(self, drafts: Iterable[DraftRun], *shared: Any) -> list[dict[str, str]]:
        """Name, dist, version and origin of every plugin that these drafts depend on."""
        bound = (*(draft.algorithm for draft in drafts), self.target_kind, *shared)
        plugins = [*(b.plugin for b in bound), *self.registry.extras(self.config.plugins)]
        by_name, keys = {p.name: p for p in plugins}, ("name", "dist", "version", "origin")
        return [{key: getattr(plugin, key) for key in keys} for plugin in by_name.values()]


class DraftRun(OpenDraft):
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
        self.prefix = f"{label}: " if label else ""
        self.choice = choice = config.algorithm
        try:
            self.algorithm = run.bind("algorithm", choice.name, choice.options, choice.plugin)
        except UsageError:
            self.checkpoint()  # which knows who is missing
            raise
        self.options = self.algorithm.options
        for value in filter(lambda value: isinstance(value, str), choice.options.values()):
            require_exported(Path(value))  # that the draft starts from

    def checkpoint(self, folder: Path | None = None) -> Checkpoint | None:
        """Open the checkpoint in a folder, the draft's `best`, or its newest, if any.

        Raises UsageError where a plugin that took part in its run is not here.
        """
        ranks, root = self.run.ranks, self.folder / "checkpoints"
        if folder == Path("best"):
            folder = root / best(root).get("step", "best")
        opened = open_checkpoint(folder) if folder else ranks.on_rank0(lambda: latest(root))
        with ranks.raise_on_all():
            if opened and (lacking := missing(opened.state["plugins"], self.run.registry)):
                raise UsageError(f"{opened.folder}: {lacking}")
        return opened

    def request(self) -> FeatureRequest:
        """Return the features that this draft trains on, in the run's dtype if it sets one."""
        hook, dtype = self.algorithm.hook, self.config.capture.dtype
        request = hook.feature_request(target=self.run.target, options=self.options)
        return request if dtype == "auto" else dataclasses.replace(request, dtype=dtype)

    def build(self, summary: DataSummary) -> Draft:
        """Build a fresh draft in fp32; the same seed and summary give the same bits."""
        torch.manual_seed(self.config.train.seed)
        hook, target = self.algorithm.hook, self.run.target
        return hook.build_draft(target=target, data=summary, options=self.options)

    def drafter(self, draft: Draft) -> Drafter:
        hook, target = self.algorithm.hook, self.run.target.load_model()
        return hook.drafter(draft=draft, target=target, options=self.options)

    def more_metrics(self, draft: Draft, report: Mapping[str, Any]) -> dict[str, float]:
        """Return what the algorithm and the plugins of the run add to a report."""
        hook: Any = self.algorithm.hook
        answers = hook.eval_metrics(draft=draft, report=report, options=self.options)
        return {name: float(value) for more in answers for name, value in more.items()}


def changed_options(options: BaseModel | None) -> dict[str, Any]:
    """Return the options that change features, where they are not at their defaults."""
    if options is None:
        return {}
    neutral, same = set[str](), SAME_FEATURES.items()
    for name, info in type(options).model_fields.items():
        if isinstance(extra := info.json_schema_extra, dict) and same <= extra.items():
            neutral.add(name)
    return options.model_dump(mode="json", exclude_defaults=True, exclude=neutral)


def changes(now: BaseModel, then: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the settings that a resumed run must not change and did, with both values."""
    values = now.model_dump(mode="json")
    for name, info in type(now).model_fields.items():
        section, was = getattr(now, name), then.get(name)
        if FREE in info.metadata:
            continue
        if isinstance(section, BaseModel) and isinstance(was, Mapping):
            yield from changes(section, was, f"{path}{name}.")
        elif values[name] != was:
            yield f"{path}{name}: {was!r} then, {values[name]!r} now"


def differences(ours: str, theirs: str, whose: str) -> str:
    """Name the settings in which two provenances differ, one a line, indented."""
    here, there = json.loads(ours), json.loads(theirs)
    names = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    values = ((name, as_text(here.get(name)), as_text(there.get(name))) for name in names)
    return "\n".join(f"  {name}: {now} here, {then} {whose}" for name, now, then in values)


def as_text(value: Any) -> str:
    """Write a setting for people; one that is not set is at its default."""
    return "as by default" if value is None else json.dumps(value)
