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
from draftcore.contracts import algorithm
from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, StepContext, StepOutput
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

DATA = Rows(7)
TOKENS = np.concatenate([DATA.tokens(row)[DATA.loss_mask(row)] for row in range(7)])
MEAN, ODD = float(TOKENS.mean()), float((TOKENS % 2).mean())  # over all supervised tokens


class Capture:
    """Features are the tokens; counts what it is asked for."""

    def __init__(self) -> None:
        self.opened, self.closed, self.broken = 0, 0, -1
        self.batches: list[tuple[int, ...]] = []

    def features(self, batches: Iterable[CaptureBatch]) -> Iterator[CapturedBatch]:
        for batch in batches:
            self.batches.append(batch.rows)
            rows = [torch.tensor(ids).float()[:, None] for ids in batch.token_ids]
            for number, row in zip(batch.rows, rows, strict=True):
                row[0] = torch.inf if number == self.broken else row[0]
            yield CapturedBatch(batch, tuple({NAME: row} for row in rows))

    def close(self) -> None:
        self.closed += 1


class Algorithm:
    """A loss of a weight times the token, with dropout while it trains; perhaps a term of odd ones."""

    terms = 1

    def __init__(self) -> None:
        self.modes, self.steps = set[tuple[bool, bool]](), set[StepContext]()

    @hookimpl
    def feature_request(self) -> FeatureRequest:
        return FeatureRequest((0,), False, "float32")

    @hookimpl
    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        return padded(samples)

    @hookimpl
    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        self.modes.add((draft.module.training, torch.is_grad_enabled()))
        self.steps.add(context)
        loss_BT = draft.module(batch.features[NAME])[..., 0] * batch.loss_mask_BT
        odd_BT = batch.token_ids_BT % 2 * batch.loss_mask_BT
        count, odd = batch.loss_mask_BT.sum(), odd_BT.sum()
        counts = {"odd": (odd, count), "none": (0 * odd, 0 * odd)}
        if self.terms == 1:
            return StepOutput(loss_BT.sum(), count, counts)
        terms = [(loss_BT.sum(), count, 1.0), ((loss_BT * odd_BT).sum(), odd, 0.5)]
        return StepOutput(terms=[*terms, (loss_BT.sum(), 0 * odd, 9.0)], counts=counts)

    @hookimpl
    def eval_metrics(self, draft: Draft, report: dict[str, Any]) -> dict[str, Any]:
        return {"twice": torch.tensor(2 * report["loss"]), "training": draft.module.training}


class Setting:
    """A run with held-out rows, its data and evaluation, and a draft of it in training."""

    eval, target = "eval.jsonl", None

    def __init__(self, folder: Path, **train: Any) -> None:
        chosen = {"batch": 2, "eval_prompts": 0, "seed": 5, "device": "cpu", **train}
        self.config = RunConfig(
            run=folder, target=TargetConfig(name="toy"), algorithm=Choice(name="toy"),
            train=TrainConfig.model_validate(chosen),
        )  # fmt: skip
        self.capture, self.algorithm = Capture(), Algorithm()
        self.data, self.ranks = self, SINGLE_RANK
        self.asked, self.evaluated = list[tuple[Any, ...]](), list[Any]()
        self.features = Features(self.algorithm.feature_request(), "made up")
        hook = register([Plugin("toy", "", "", "", instance=self.algorithm)]).hook
        self.bound = SimpleNamespace(hook=hook, options=None, capabilities=frozenset())
        linear = nn.Linear(1, 1, bias=False)
        nn.init.constant_(linear.weight, 2.0)
        module = nn.Sequential(linear, nn.Dropout(0.5))
        self.draft = Draft(module, {}, algorithm.TrainingDefaults(1e-3, 0.0, 1.0), [])

    def samples(self, part: str, date: str, limit: int) -> Rows:
        self.asked.append((part, date, limit))
        return DATA

    def bind(self, *choice: Any) -> Any:
        return self.bound

    def open_capture(self, request: FeatureRequest, samples: Rows) -> Capture:
        assert request == self.features.request
        self.capture.opened += 1
        return self.capture

    def evaluation(self) -> Setting:
        return self

    def in_training(self, draft: OpenDraft) -> Callable[[Draft], dict[str, float]]:
        def measure(built: Draft) -> dict[str, float]:
            torch.rand(5)
            self.evaluated.append((draft.label, built.module.training))
            return {"acceptance_length": 2.5}

        return measure

    def open(self) -> HeldOut:
        """What measures drafts, as a run opens it once for all."""
        run = cast(Run, self)
        self.drafts = [DraftRun(run, "")]
        held_out = HeldOut(run, self.features)
        held_out.read("2026-11-25")
        return held_out

    def measure(self, held_out: HeldOut | None = None, step: int = 1) -> dict[str, Any]:
        """Measure the draft as it is now, after so many of nine steps in two epochs."""
        return (held_out or self.open()).evaluate(self.drafts[0], self.draft, at(step))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def at(step: int) -> StepContext:
    return StepContext(step, 9, 5, training=False, epoch=1 + step // 5)


@pytest.mark.parametrize("batch", [1, 2, 7, 50])
def test_the_loss_is_one_ratio_over_all_held_out_rows(tmp_path: Path, batch: int) -> None:
    """Never a mean of the batches' means, however they are cut; without prompts it is all there is.

    Of several terms it is the sum of their ratios; one that has nothing there adds nothing.
    """
    setting = Setting(tmp_path, batch=batch)
    report = setting.measure()
    assert report["loss"] == pytest.approx(2 * MEAN)
    assert report["odd"] == pytest.approx(ODD)
    assert setting.evaluated == []
    setting.algorithm.terms = 3
    wanted = 2 * MEAN + 0.5 * 2 * TOKENS[TOKENS % 2 == 1].mean()
    assert setting.measure()["loss"] == pytest.approx(wanted)


def test_it_is_measured_with_the_weights_of_now(setting: Setting) -> None:
    held_out = setting.open()
    assert setting.measure(held_out, 1)["loss"] == pytest.approx(2 * MEAN)
    with torch.no_grad():
        next(setting.draft.module.parameters()).fill_(3.0)
    assert setting.measure(held_out, 2)["loss"] == pytest.approx(3 * MEAN)
    assert setting.algorithm.steps == {at(1), at(2)}


@pytest.mark.parametrize("training", [True, False])
def test_all_that_is_found_is_reported_and_leaves_no_trace(tmp_path: Path, training: bool) -> None:
    """What an evaluation finds, and what plugins add to what is there so far, of the draft as evaluated.

    Neither random numbers, the module's mode, nor gradients change.
    """
    setting = Setting(tmp_path, eval_prompts=3)
    module = setting.draft.module.train(training)
    before, weights = torch.get_rng_state(), [p.clone() for p in module.parameters()]
    report = setting.measure()
    assert report["loss"] == pytest.approx(2 * MEAN)
    assert report["twice"] == pytest.approx(2 * report["loss"])
    assert (type(report["twice"]), report["training"]) == (float, 0.0)
    assert (report["acceptance_length"], setting.evaluated) == (2.5, [("", False)])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training == training for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    assert all(map(torch.equal, module.parameters(), weights))
    assert setting.algorithm.modes == {(False, False)}
    assert torch.is_grad_enabled()


def test_held_out_rows_are_captured_once_for_all_drafts_and_stay_whole(setting: Setting) -> None:
    held_out, capture = setting.open(), setting.capture
    assert setting.asked == [("eval", "2026-11-25", 64)], "the date of the rows trained on"
    assert capture.opened == 0, "not before they are needed"
    for step in (1, 1, 2, 2):  # of two drafts in turn
        setting.measure(held_out, step)
    assert (capture.opened, capture.closed) == (1, 1)
    assert sorted(row for rows in capture.batches for row in rows) == list(range(7))
    assert {len(rows) for rows in capture.batches} == {1, 2}
    samples = {sample.id: sample for batch in held_out.batches for sample in batch}
    for row, one in enumerate(samples[algorithm.SampleId(i, 1)] for i in DATA.feature_ids):
        tokens = DATA.tokens(row).tolist()
        assert (one.token_ids_T.tolist(), one.features[NAME].flatten().tolist()) == (tokens, tokens)
        assert one.loss_mask_T.tolist() == DATA.loss_mask(row).tolist()


def test_held_out_rows_that_are_missing_unreadable_or_not_finite_are_refused(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*asked: object) -> None:
        raise UsageError("no row can be used")

    setting.capture.broken = 3
    wanted = r"held-out rows of eval.jsonl: .* row 3 .*holds inf or nan .*\n.*capture.dtype=float32"
    with pytest.raises(UsageError, match=wanted):
        setting.measure()
    assert setting.capture.closed == 1
    with monkeypatch.context() as patch:
        patch.setattr(Setting, "samples", refuse)
        with pytest.raises(UsageError, match=r"no row can be used\n  train.eval_every=0 trains"):
            setting.open()
    monkeypatch.setattr(Setting, "eval", None)
    with pytest.raises(UsageError, match=r"train.eval_every needs held-out rows: set data.eval"):
        setting.open()
