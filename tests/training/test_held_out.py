"""Held-out loss in training: the right numbers, features captured once, and no trace of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from draftcore_sdk.internals import register
from torch import nn

from draftcore import hookimpl
from draftcore.config import Choice, RunConfig, TargetConfig, TrainConfig
from draftcore.contracts.algorithm import (
    Draft,
    DraftBatch,
    Sample,
    SampleId,
    StepContext,
    StepOutput,
    TrainingDefaults,
)
from draftcore.contracts.capture import CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.run import OpenDraft
from draftcore.errors import UsageError
from draftcore.plugins.dists import Plugin
from draftcore.run import DraftRun, Run
from draftcore.run.features import Features
from draftcore.run.held_out import HeldOut
from draftcore.training.ranks import SINGLE_RANK
from tests.features.world import Rows
from tests.training.conftest import NAME, padded

ROWS = 7
DATA = Rows(ROWS)


class Capture:
    """Features are the tokens; counts what it is asked for."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.batches: list[tuple[int, ...]] = []
        self.broken = -1

    def open(self) -> Capture:
        self.opened += 1
        return self

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        for batch in batches:
            self.batches.append(batch.rows)
            rows = [torch.tensor(ids).float()[:, None] for ids in batch.token_ids]
            for number, row in zip(batch.rows, rows, strict=True):
                if number == self.broken:
                    row[0] = torch.inf
            yield CapturedBatch(batch, tuple({NAME: row} for row in rows))

    def close(self) -> None:
        self.closed += 1


class Algorithm:
    """A loss of a weight times the token, with dropout while it trains; perhaps a term of odd ones."""

    terms = 1

    def __init__(self) -> None:
        self.modes: list[tuple[bool, bool]] = []
        self.steps: list[StepContext] = []

    @hookimpl
    def feature_request(self) -> FeatureRequest:
        return FeatureRequest((0,), False, "float32")

    @hookimpl
    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        return padded(samples)

    @hookimpl
    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        self.modes.append((draft.module.training, torch.is_grad_enabled()))
        self.steps.append(context)
        loss_BT = draft.module(batch.features[NAME])[..., 0] * batch.loss_mask_BT
        count = batch.loss_mask_BT.sum()
        odd_BT = batch.token_ids_BT % 2 * batch.loss_mask_BT
        odd = odd_BT.sum()
        counts = {"odd": (odd, count), "none": (0 * odd, 0 * odd)}
        if self.terms == 1:
            return StepOutput(loss_BT.sum(), count, counts)
        terms = [(loss_BT.sum(), count, 1.0), ((loss_BT * odd_BT).sum(), odd, 0.5)]
        return StepOutput(terms=[*terms, (loss_BT.sum(), 0 * odd, 9.0)], counts=counts)

    @hookimpl
    def eval_metrics(self, draft: Draft, report: dict[str, Any]) -> dict[str, Any]:
        return {"twice": torch.tensor(2 * report["loss"]), "training": draft.module.training}


class Evaluation:
    """What is measured beside the loss: draws at random, and notes whether the draft trains then."""

    def __init__(self) -> None:
        self.opened, self.training = list[str](), list[bool]()

    def in_training(self, draft: OpenDraft) -> Callable[[Draft], dict[str, float]]:
        self.opened.append(draft.label)

        def measure(built: Draft) -> dict[str, float]:
            torch.rand(5)
            self.training.append(built.module.training)
            return {"acceptance_length": 2.5}

        return measure


class Setting:
    """A run with held-out rows, and a draft of it in training."""

    eval, target = "eval.jsonl", None

    def __init__(self, folder: Path, **train: Any) -> None:
        self.config = RunConfig(
            run=folder,
            target=TargetConfig(name="toy"),
            algorithm=Choice(name="toy"),
            train=TrainConfig.model_validate(
                {"batch": 2, "eval_prompts": 0, "seed": 5, "device": "cpu", **train}
            ),
        )
        self.capture, self.algorithm, self.beside = Capture(), Algorithm(), Evaluation()
        self.asked, self.ranks = list[tuple[Any, ...]](), SINGLE_RANK
        self.features = Features(self.algorithm.feature_request(), "made up")
        hook = register([Plugin("toy", "", "", "", instance=self.algorithm)]).hook
        self.bound = SimpleNamespace(hook=hook, options=None, capabilities=frozenset())
        self.draft = self.new_draft()

    # ------------------------------------------------------------ as the run, and its rows

    @property
    def data(self) -> Setting:
        return self

    def samples(self, part: str, date: str, limit: int) -> Rows:
        self.asked.append((part, date, limit))
        return DATA

    def bind(self, *choice: Any) -> Any:
        return self.bound

    def open_capture(self, request: FeatureRequest, samples: Rows) -> Capture:
        assert request == self.features.request
        return self.capture.open()

    def evaluation(self) -> Evaluation:
        return self.beside

    # ------------------------------------------------------------ what is measured

    def new_draft(self) -> Draft:
        linear = nn.Linear(1, 1, bias=False)
        nn.init.constant_(linear.weight, 2.0)
        module = nn.Sequential(linear, nn.Dropout(0.5))
        return Draft(module, {}, TrainingDefaults(1e-3, 0.0, 1.0), [])

    def open(self) -> HeldOut:
        """What measures drafts, as a run opens it once for all."""
        run = cast(Run, self)
        self.drafts = [DraftRun(run, "")]
        return HeldOut(run, self.features, "2026-11-25")

    def measure(self, held_out: HeldOut, step: int) -> dict[str, Any]:
        """Measure the draft as it is now, after so many of nine steps in two epochs."""
        return held_out.evaluate(self.drafts[0], self.draft, at(step))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def at(step: int) -> StepContext:
    """Where a run of nine steps in two epochs stands."""
    return StepContext(step, 9, 5, training=False, epoch=1 + step // 5)


def by_hand() -> tuple[float, float]:
    """The mean token and the share of odd ones, over all supervised tokens."""
    tokens = np.concatenate([DATA.tokens(row)[DATA.loss_mask(row)] for row in range(ROWS)])
    return float(tokens.mean()), float((tokens % 2).mean())


@pytest.mark.parametrize("batch", [1, 2, 7, 50])
def test_the_loss_is_one_ratio_over_all_held_out_rows(tmp_path: Path, batch: int) -> None:
    """Never a mean of the batches' means, however they are cut; without prompts it is all there is."""
    (mean, odd), setting = by_hand(), Setting(tmp_path, batch=batch)
    report = setting.measure(setting.open(), 1)
    assert {name: report[name] for name in ("loss", "odd")} == {
        "loss": pytest.approx(2 * mean), "odd": pytest.approx(odd)
    }  # fmt: skip
    assert setting.beside.opened == []


@pytest.mark.parametrize("batch", [1, 2, 50])
def test_a_loss_of_several_terms_is_the_sum_of_their_ratios(tmp_path: Path, batch: int) -> None:
    """Each over all held-out rows; one that has nothing there adds nothing."""
    setting = Setting(tmp_path, batch=batch)
    setting.algorithm.terms = 3
    tokens = np.concatenate([DATA.tokens(row)[DATA.loss_mask(row)] for row in range(ROWS)])
    wanted = 2 * tokens.mean() + 0.5 * 2 * tokens[tokens % 2 == 1].mean()
    report = setting.measure(setting.open(), 1)
    assert report["loss"] == pytest.approx(wanted)


def test_what_plugins_add_to_a_report_is_in_it_as_numbers(setting: Setting) -> None:
    """Of what is there so far, and of the draft as it is evaluated."""
    report = setting.measure(setting.open(), 1)
    assert report["twice"] == pytest.approx(2 * report["loss"])
    assert (type(report["twice"]), report["training"]) == (float, 0.0)


def test_it_is_measured_with_the_weights_of_now(setting: Setting) -> None:
    held_out, mean = setting.open(), by_hand()[0]
    assert setting.measure(held_out, 1)["loss"] == pytest.approx(2 * mean)
    with torch.no_grad():
        next(setting.draft.module.parameters()).fill_(3.0)
    assert setting.measure(held_out, 2)["loss"] == pytest.approx(3 * mean)
    assert set(setting.algorithm.steps) == {at(1), at(2)}


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_no_trace(setting: Setting, training: bool) -> None:
    """Neither in the random numbers, the module's mode, nor the gradients."""
    module = setting.draft.module.train(training)
    before, weights = torch.get_rng_state(), [p.clone() for p in module.parameters()]
    setting.measure(setting.open(), 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training == training for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    assert all(map(torch.equal, module.parameters(), weights))
    assert set(setting.algorithm.modes) == {(False, False)}
    assert torch.is_grad_enabled()


def test_held_out_rows_are_captured_once_for_all_drafts_and_steps_and_stay_whole(
    setting: Setting,
) -> None:
    held_out = setting.open()
    assert setting.asked == [("eval", "2026-11-25", 64)], "the date of the rows trained on"
    assert setting.capture.opened == 0, "not before they are needed"
    for step in (1, 1, 2, 2):  # of two drafts in turn
        setting.measure(held_out, step)
    assert (setting.capture.opened, setting.capture.closed) == (1, 1)
    assert sorted(row for rows in setting.capture.batches for row in rows) == list(range(ROWS))
    assert {len(rows) for rows in setting.capture.batches} == {1, 2}
    samples = held_out.samples
    assert [one.id for one in samples] == [SampleId(name, 1) for name in DATA.feature_ids]
    for row, one in enumerate(samples):
        tokens = DATA.tokens(row).tolist()
        assert (one.token_ids_T.tolist(), one.features[NAME].flatten().tolist()) == (tokens, tokens)
        assert one.loss_mask_T.tolist() == DATA.loss_mask(row).tolist()


def test_a_held_out_feature_that_is_not_finite_is_refused_and_its_row_named(
    setting: Setting,
) -> None:
    setting.capture.broken = 3
    wanted = r"held-out rows of eval.jsonl: .* row 3 .*holds inf or nan .*\n.*capture.dtype=float32"
    with pytest.raises(UsageError, match=wanted):
        setting.measure(setting.open(), 1)
    assert setting.capture.closed == 1


def test_what_an_evaluation_finds_beside_the_loss_is_in_the_report_and_leaves_no_trace(
    tmp_path: Path,
) -> None:
    setting, before = Setting(tmp_path, eval_prompts=3), torch.get_rng_state()
    report = setting.measure(setting.open(), 1)
    assert report["acceptance_length"] == 2.5
    assert report["loss"] == pytest.approx(2 * by_hand()[0])
    assert (setting.beside.opened, setting.beside.training) == ([""], [False])
    assert torch.equal(torch.get_rng_state(), before)


def test_without_held_out_rows_it_says_what_to_set(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Setting, "eval", None)
    with pytest.raises(UsageError, match=r"train.eval_every needs held-out rows: set data.eval"):
        setting.open()
