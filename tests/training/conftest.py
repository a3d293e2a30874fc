"""A toy run: everything that trains, with rows made up as they are needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from draftcore.config import Choice, DataConfig, RunConfig, TargetConfig, TrainConfig
from draftcore.contracts.algorithm import (
    Draft,
    DraftBatch,
    Sample,
    SampleId,
    StepContext,
    StepOutput,
    TrainingDefaults,
)
from draftcore.contracts.capture import FeatureRequest
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.skipped import Skipped
from draftcore.training.checkpoint import Checkpoint, latest
from draftcore.training.distributed import ALONE, Ranks
from draftcore.training.loop import DraftSetup, Trainer, train

NAME, WIDTH = "hidden.0", 4


@dataclass
class Options:
    dropout: float
    dtype: torch.dtype


class Module(nn.Module):
    """A layer with dropout, a weight under two names, and a head that is the target's."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3)
        self.second = nn.Linear(WIDTH, 3)
        self.second.bias = self.first.bias
        self.dropout = nn.Dropout(options.dropout)
        self.register_buffer("head", torch.arange(3.0))
        self.to(options.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        y: Tensor = self.first(x) * torch.tanh(self.second(x)) @ cast(Tensor, self.head)
        return y


class Algorithm:
    """The hooks of an algorithm; `wrong` may change a batch's loss."""

    def __init__(self) -> None:
        self.wrong: Callable[[DraftBatch, StepContext, Tensor], Tensor] = lambda b, c, loss: loss

    def collate(self, samples: Sequence[Sample], options: Options) -> DraftBatch:
        def pad(parts: list[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(parts, batch_first=True)

        return DraftBatch(
            tuple(sample.id for sample in samples),
            pad([sample.token_ids_T for sample in samples]),
            pad([sample.loss_mask_T for sample in samples]),
            pad([torch.ones_like(sample.loss_mask_T) for sample in samples]),
            {NAME: pad([sample.features[NAME].to(options.dtype) for sample in samples])},
        )

    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        """Squared error of a number per token."""
        guess_BT = draft.module(batch.features[NAME])
        error_BT = (guess_BT - batch.token_ids_BT) ** 2 * batch.loss_mask_BT
        loss, count = self.wrong(batch, context, error_BT.sum()), batch.loss_mask_BT.sum()
        return StepOutput(loss, count, {"error": (error_BT.detach().sum(), count)})


class Observers:
    """Notes what a run tells of."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def step_finished(self, step: int, metrics: dict[str, float], draft: str) -> None:
        self.said.append(("step", draft, step))

    def evaluated(self, step: int, report: dict[str, Any], draft: str) -> None:
        self.said.append(("evaluated", draft, step))

    def checkpoint_saved(self, step: int, folder: Path, draft: str) -> None:
        self.said.append(("saved", draft, step))


@dataclass
class Batch:
    planned: PlannedBatch
    samples: list[Sample]


class Run:
    """Drafts in training on made-up rows, from their latest checkpoints on."""

    def __init__(
        self,
        folder: Path,
        *,
        rows: int = 13,
        accumulate: int = 2,
        labels: Sequence[str] = ("",),
        dropout: float = 0.0,
        double: bool = False,
        ranks: Ranks = ALONE,
        evaluate: Any = None,
        skipped: dict[int, str] | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.ranks = folder, ranks
        self.options = Options(dropout, torch.float64 if double else torch.float32)
        self.rows, self.accumulate, self.labels = rows, accumulate, labels
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
        self.observers, self.evaluate = Observers(), evaluate
        self.algorithms = {label: Algorithm() for label in labels}
        self.masked, self.bad = set[int](), dict[int, str]()  # rows without loss; that turn out bad
        self.stop_after = self.dry_after = 10**9  # batches, of this rank
        self.read = self.let_gone = 0
        self.finished, self.trainers = list[int](), list[Trainer]()

    def length(self, row: int) -> int:
        return 2 + row % 5

    def sample(self, row: int, epoch: int) -> Sample:
        made = torch.Generator().manual_seed(row)
        shape, mask = self.length(row), torch.arange(self.length(row)) % 3 != 1
        return Sample(
            SampleId(f"s{row}", epoch),
            torch.randint(0, 5, (shape,), generator=made),
            mask & (row not in self.masked),
            {NAME: torch.randn(shape, WIDTH, generator=made, dtype=torch.float64).float()},
        )

    def draft(self) -> Draft:
        torch.manual_seed(self.config.train.seed)
        module = Module(self.options)
        groups = [{"params": list(module.parameters())}]
        return Draft(
            module, {}, TrainingDefaults(1e-2, 0.0, 1.0), groups, frozen=frozenset({"head"})
        )

    def found(self, label: str = "") -> Checkpoint | None:
        return latest(self.folder / label / "checkpoints", self.ranks)

    def build(self) -> Run:
        """Build the drafts and load their checkpoints."""
        request = FeatureRequest((0,), False, "float32")
        about = {"target": "none", "width": WIDTH, "plugins": [], "features": "made up"}
        for label in self.labels:
            setup = DraftSetup(
                label, self.folder / label, self.config, self.algorithms[label], self.options,
                request, about,
            )  # fmt: skip
            last = self.found(label)
            if last is not None:
                self.skipped |= {int(row): why for row, why in last.state["skipped"]}
            trainer = Trainer(
                setup, self.draft(), self.ranks, self.plan, self.skipped,
                self.observers, self.evaluate, last,
            )  # fmt: skip
            self.trainers.append(trainer)
        self.uses = self.plan.uses(
            min(trainer.step for trainer in self.trainers), self.ranks.rank, self.ranks.size
        )
        return self

    def train(self) -> tuple[str, dict[str, Exception]]:
        if not self.trainers:
            self.build()
        return train(
            self.plan, self.trainers, self, ranks=self.ranks, skipped=self.skipped,
            stop=lambda: self.read >= self.stop_after, finished=self.finished.append,
            let_go=self.let_go, beside=str,
        )  # fmt: skip

    def step_on(self, rows: Sequence[int]) -> None:
        """Take the first step, on these rows as its only batch."""
        batch = Batch(self.plan.step(0)[0], [self.sample(row, 0) for row in rows])
        self.trainers[0].accumulate(0, batch, last=True)
        self.trainers[0].update([self.trainers[0].sums()])

    # ------------------------------------------------------------ as a loader

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.read >= self.dry_after:
            raise StopIteration
        planned = next(self.uses)
        self.read += 1
        for row in planned.rows:
            if row in self.bad and row not in self.skipped:
                self.skipped.add({row: self.bad[row]})
        rows = [row for row in planned.rows if row not in self.skipped]
        return Batch(planned, [self.sample(row, planned.epoch) for row in rows])

    def let_go(self) -> None:
        self.let_gone += 1

    # ------------------------------------------------------------ what became of it

    def weights(self, at: int = 0) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.trainers[at].built.module.state_dict().items()}

    def moments(self, at: int = 0) -> list[Tensor]:
        """Of each weight in turn: exp_avg, exp_avg_sq, step."""
        states = self.trainers[at].optimizer.state.values()
        return [state[key].clone() for state in states for key in sorted(state)]

    def lines(self, label: str = "") -> list[dict[str, Any]]:
        text = (self.folder / label / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def losses(self, label: str = "") -> list[float]:
        return [line["loss"] for line in self.lines(label) if "loss" in line]


NewRun = Callable[..., Run]


@pytest.fixture
def new_run(tmp_path: Path) -> NewRun:
    """Make a run in a folder of this name."""

    def new_run(name: str = "run", **kwargs: Any) -> Run:
        return Run(tmp_path / name, **kwargs)

    return new_run
