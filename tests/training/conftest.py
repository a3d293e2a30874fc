"""A toy run: everything that trains, with rows made up as they are needed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from draftcore_sdk.internals import register
from torch import Tensor, nn

from draftcore import hookimpl
from draftcore.config import Choice, DataConfig, RunConfig, TargetConfig, TrainConfig
from draftcore.contracts import algorithm
from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, StepContext, StepOutput
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.run import Loaded, Ranks
from draftcore.data.plan import Plan
from draftcore.data.skipped import Skipped
from draftcore.plugins.binding import observers
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import Registry
from draftcore.training.checkpoint import Checkpoint, latest
from draftcore.training.loop import Trainer, train
from draftcore.training.ranks import SINGLE_RANK

NAME, WIDTH = "hidden.0", 4


@dataclass
class Options:
    dropout: float
    dtype: torch.dtype


class Module(nn.Module):
    """A layer with dropout, a weight under two names, and a head that is the target's."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.second.bias = self.first.bias
        self.dropout = nn.Dropout(options.dropout)
        self.register_buffer("head", torch.arange(3.0))
        self.to(options.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        y: Tensor = self.first(x) * torch.tanh(self.second(x)) @ cast(Tensor, self.head)
        return y


def padded(samples: Sequence[Sample], dtype: torch.dtype = torch.float32) -> DraftBatch:
    """Collate samples, whose feature is NAME, by padding them on the right."""
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return DraftBatch(
        tuple(sample.id for sample in samples),
        pad([sample.token_ids_T for sample in samples]),
        pad([sample.loss_mask_T for sample in samples]),
        pad([torch.ones_like(sample.loss_mask_T) for sample in samples]),
        {NAME: pad([sample.features[NAME].to(dtype) for sample in samples])},
    )


class Algorithm:
    """The hooks of an algorithm whose loss has up to three `terms`; `wrong` may change a batch's."""

    def __init__(self, terms: int = 1) -> None:
        self.terms, self.contexts = terms, list[StepContext]()
        self.wrong: Callable[[DraftBatch, StepContext, Tensor], Tensor] = lambda b, c, loss: loss

    @hookimpl
    def collate(self, samples: Sequence[Sample], options: Options) -> DraftBatch:
        return padded(samples, options.dtype)

    @hookimpl
    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        """Squared error of a number per token; then its square, and that of rows of two tokens."""
        self.contexts.append(context)
        guess_BT = draft.module(batch.features[NAME])
        error_BT = (guess_BT - batch.token_ids_BT) ** 2 * batch.loss_mask_BT
        loss, count = self.wrong(batch, context, error_BT.sum()), batch.loss_mask_BT.sum()
        counts = {"error": (error_BT.detach().sum(), count)}
        if self.terms == 1:
            return StepOutput(loss, count, counts)
        real_BT = batch.attention_mask_BT
        short_BT = real_BT & (real_BT.sum(1, keepdim=True) == 2)
        others = [((guess_BT**2 * rows_BT).sum(), rows_BT.sum()) for rows_BT in (real_BT, short_BT)]
        terms = [(loss, count, 1.0), (*others[0], 0.5), (*others[1], 3.0)]
        return StepOutput(terms=terms[: self.terms], counts=counts)


class Observer:
    """Notes what a run tells of."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    @hookimpl
    def step_finished(self, step: int, draft: str) -> None:
        self.said.append(("step", draft, step))

    @hookimpl
    def evaluated(self, step: int, draft: str) -> None:
        self.said.append(("evaluated", draft, step))

    @hookimpl
    def checkpoint_saved(self, step: int, draft: str) -> None:
        self.said.append(("saved", draft, step))


def registry_of(*plugins: object) -> Registry:
    """These objects as plugins that every run has, each named like its class."""
    about: Any = {"dist": "", "version": "", "module": "", "loose": True, "state": "ready"}
    return Registry([Plugin(type(p).__name__.lower(), instance=p, **about) for p in plugins])


class Run:
    """Drafts in training on made-up rows, from their latest checkpoints on."""

    def __init__(
        self, folder: Path, *, rows: int = 13, accumulate: int = 2, labels: Sequence[str] = ("",),
        dropout: float = 0.0, double: bool = False, ranks: Ranks = SINGLE_RANK, evaluate: Any = None,
        held_out: str = "these rows", skipped: dict[int, str] | None = None, terms: int = 1,
        plugins: Sequence[object] = (), **settings: Any,
    ) -> None:  # fmt: skip
        self.folder, self.ranks, self.labels, self.held_out = folder, ranks, labels, held_out
        self.options = Options(dropout, torch.float64 if double else torch.float32)
        chosen = {"batch": 2, "lr": 0.05, "device": "cpu", "log_every": 1, "warmup_ratio": 0.0}
        self.config = RunConfig(
            run=folder, target=TargetConfig(path="none"), algorithm=Choice(name="toy"),
            data=DataConfig(eval="none"),
            train=TrainConfig.model_validate({**chosen, **settings}),
        )  # fmt: skip
        self.skipped = Skipped(skipped or {}, rows=rows, share=1)
        train = self.config.train
        self.plan = Plan(
            [f"s{row}" for row in range(rows)], [self.length(row) for row in range(rows)],
            batch=train.batch, accumulate=accumulate, seed=train.seed, epochs=train.epochs,
            max_steps=train.max_steps,
        )  # fmt: skip
        self.observers, self.evaluate, self.plugins = Observer(), evaluate, plugins
        self.algorithms = {label: Algorithm(terms) for label in labels}
        self.masked, self.bad = set[int](), dict[int, str]()  # rows without loss; that turn out bad
        self.stop_after = self.dry_after = 10**9  # batches, of this rank
        self.read = self.released = 0
        self.finished, self.trainers = list[int](), list[Trainer]()
        self.stopped = dict[str, algorithm.Stop]()

    def length(self, row: int) -> int:
        return 2 + row % 5

    def sample(self, row: int, epoch: int) -> Sample:
        made = torch.Generator().manual_seed(row)
        shape, mask = self.length(row), torch.arange(self.length(row)) % 3 != 1
        return Sample(
            algorithm.SampleId(f"s{row}", epoch),
            torch.randint(0, 5, (shape,), generator=made),
            mask & (row not in self.masked),
            {NAME: torch.randn(shape, WIDTH, generator=made, dtype=torch.float64).float()},
        )

    def draft(self) -> Draft:
        torch.manual_seed(self.config.train.seed)
        module, head = Module(self.options), frozenset({"head"})
        groups = [{"params": list(module.parameters())}]
        return Draft(module, {}, algorithm.TrainingDefaults(1e-2, 0.0, 1.0), groups, frozen=head)

    def found(self, label: str = "") -> Checkpoint | None:
        root = self.folder / label / "checkpoints"
        return self.ranks.on_rank0(lambda: latest(root))

    def last(self) -> Checkpoint:
        """The newest checkpoint, which is there."""
        return cast(Checkpoint, self.found())

    def build(self) -> Run:
        """Build the drafts and load their checkpoints."""
        request = FeatureRequest((0,), False, "float32")
        about = {"target": "none", "plugins": [], "features": "", "held_out": self.held_out}
        watching = registry_of(*() if self.ranks.rank else (self.observers, *self.plugins))
        opened = SimpleNamespace(ranks=self.ranks, observers=observers(watching), width=WIDTH)
        for label in self.labels:
            hook = register(registry_of(self.algorithms[label], *self.plugins).plugins).hook
            draft: Any = SimpleNamespace(
                run=opened, label=label, folder=self.folder / label, config=self.config,
                options=self.options,
                algorithm=SimpleNamespace(hook=hook, capabilities=frozenset()),
            )  # fmt: skip
            if (last := self.found(label)) is not None:
                self.skipped |= {int(row): why for row, why in last.state["skipped"]}
            rows = self.plan, self.skipped
            made = Trainer(draft, request, about, self.draft(), *rows, self.evaluate, last)
            self.trainers.append(made)
        first = min(trainer.step for trainer in self.trainers)
        self.uses = self.plan.uses(first, self.ranks.rank, self.ranks.size)
        return self

    def train(self) -> tuple[str, dict[str, Exception]]:
        if not self.trainers:
            self.build()
        reason, failed, self.stopped = train(
            self.plan, self.trainers, self, skipped=self.skipped,
            stop=lambda: self.read >= self.stop_after, finished=self.finished.append,
            release_batch=self.release, status_line=str,
        )  # fmt: skip
        return reason, failed

    def trained(self) -> Run:
        self.train()
        return self

    def step_on(self, rows: Sequence[int]) -> None:
        """Take the first step, on these rows as its only batch."""
        batch = Loaded(self.plan.step(0)[0], [self.sample(row, 1) for row in rows])
        self.trainers[0].accumulate(batch, last=True)
        self.trainers[0].update(1)

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        if self.read >= self.dry_after:
            raise StopIteration
        planned = next(self.uses)
        self.read += 1
        for row in planned.rows:
            if row in self.bad and row not in self.skipped:
                self.skipped.add({row: self.bad[row]})
        rows = [row for row in planned.rows if row not in self.skipped]
        return Loaded(planned, [self.sample(row, planned.epoch) for row in rows])

    def release(self) -> None:
        self.released += 1

    def weights(self, at: int = 0) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in self.trainers[at].built.module.state_dict().items()}

    def moments(self, at: int = 0) -> list[Tensor]:
        """Of each weight in turn: exp_avg, exp_avg_sq, step."""
        trainer = self.trainers[at]
        states = [trainer.optimizer.state.get(p, {}) for p in trainer.parameters]
        return [state[key].clone() for state in states for key in sorted(state)]

    def lines(self, label: str = "") -> list[dict[str, Any]]:
        text = (self.folder / label / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def losses(self, label: str = "") -> list[float]:
        return [line["loss"] for line in self.lines(label) if "loss" in line]


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


NewRun = Callable[..., Run]


@pytest.fixture
def new_run(tmp_path: Path) -> NewRun:
    """Make a run in a folder of this name."""
    return lambda name="run", **settings: Run(tmp_path / name, **settings)
