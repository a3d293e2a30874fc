"""Evaluation during training: the right numbers, features captured once, and no trace of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from draftcore.training.held_out import Probe, held_out_samples
from draftcore_data.dataset import Dataset, read_prompts
from draftcore_sdk.targets import byte_tokenizer, conversations
from numpy.typing import NDArray
from torch import Tensor, nn

from draftcore import hookimpl
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
from draftcore.contracts.capture import CaptureBatch, CapturedBatch, FeatureRequest, Image
from draftcore.errors import UsageError
from draftcore.evaluation import during
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import register
from draftcore.training.loop import DraftSetup

NAME, ROWS = "hidden.0", 7


class Data:
    """Held-out rows of 2 to 6 tokens."""

    feature_ids = tuple(f"s{row}" for row in range(ROWS))
    lengths = np.array([2 + 3 * row % 5 for row in range(ROWS)])

    def tokens(self, row: int) -> NDArray[np.int64]:
        return np.arange(self.lengths[row]) + row

    def loss_mask(self, row: int) -> NDArray[np.bool_]:
        return np.array([at != 1 for at in range(self.lengths[row])])

    def images(self, row: int) -> tuple[Image, ...]:
        return ()


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
    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        def pad(parts: list[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(parts, batch_first=True)

        return DraftBatch(
            tuple(sample.id for sample in samples),
            pad([sample.token_ids_T for sample in samples]),
            pad([sample.loss_mask_T for sample in samples]),
            pad([torch.ones_like(sample.loss_mask_T) for sample in samples]),
            {NAME: pad([sample.features[NAME] for sample in samples])},
        )

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


class Setting:
    """A probe over the held-out rows, and a draft in training."""

    def __init__(self, folder: Path, **train: Any) -> None:
        self.config = RunConfig(
            run=folder,
            target=TargetConfig(path="none"),
            data=DataConfig(eval=str(conversations(folder / "eval.jsonl", 5))),
            algorithm=Choice(name="toy"),
            train=TrainConfig.model_validate({"batch": 2, "eval_prompts": 0, "seed": 5, **train}),
        )
        self.capture, self.algorithm = Capture(), Algorithm()
        data, opener = cast(Dataset, Data()), self.capture.open
        self.tokenizer, eval_data = byte_tokenizer(), self.config.data
        self.prompts = partial(
            read_prompts,
            str(eval_data.eval),
            self.tokenizer,
            self.config.train.eval_prompts,
            eval_data,
        )
        self.samples = held_out_samples(self.config, data, opener)
        self.decoders: list[Draft] = []
        self.draft = self.new_draft()

    def new_draft(self) -> Draft:
        linear = nn.Linear(1, 1, bias=False)
        nn.init.constant_(linear.weight, 2.0)
        module = nn.Sequential(linear, nn.Dropout(0.5))
        return Draft(module, {}, TrainingDefaults(1e-3, 0.0, 1.0), [])

    def decoder(self, draft: Draft) -> Any:
        self.decoders.append(draft)
        return SimpleNamespace(draft=draft)

    def probe(self) -> Probe:
        request = FeatureRequest((0,), False, "float32")
        hook = register([Plugin("toy", "", "", "", instance=self.algorithm)]).hook
        setup = DraftSetup("", self.config.run, self.config, hook, None, request, {})
        return Probe(self.samples, self.prompts, torch.device("cpu"), setup, self.decoder)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def at(step: int) -> StepContext:
    """Where a run of nine steps in two epochs stands."""
    return StepContext(step, 9, 5, training=False, epoch=1 + step // 5)


def by_hand() -> tuple[float, float]:
    """The mean token and the share of odd ones, over all supervised tokens."""
    data = Data()
    tokens = np.concatenate([data.tokens(row)[data.loss_mask(row)] for row in range(ROWS)])
    return float(tokens.mean()), float((tokens % 2).mean())


@pytest.mark.parametrize("batch", [1, 2, 7, 50])
def test_the_loss_is_one_ratio_over_all_held_out_rows(tmp_path: Path, batch: int) -> None:
    """Never a mean of the batches' means, however they are cut; without prompts it is all there is."""
    (mean, odd), setting = by_hand(), Setting(tmp_path, batch=batch)
    report = setting.probe().evaluate(setting.draft, at(1))
    assert {name: report[name] for name in ("loss", "odd")} == {
        "loss": pytest.approx(2 * mean), "odd": pytest.approx(odd)
    }  # fmt: skip
    assert setting.decoders == []


@pytest.mark.parametrize("batch", [1, 2, 50])
def test_a_loss_of_several_terms_is_the_sum_of_their_ratios(tmp_path: Path, batch: int) -> None:
    """Each over all held-out rows; one that has nothing there adds nothing."""
    setting, data = Setting(tmp_path, batch=batch), Data()
    setting.algorithm.terms = 3
    tokens = np.concatenate([data.tokens(row)[data.loss_mask(row)] for row in range(ROWS)])
    wanted = 2 * tokens.mean() + 0.5 * 2 * tokens[tokens % 2 == 1].mean()
    report = setting.probe().evaluate(setting.draft, at(1))
    assert report["loss"] == pytest.approx(wanted)


def test_what_plugins_add_to_a_report_is_in_it_as_numbers(setting: Setting) -> None:
    """Of what is there so far, and of the draft as it is evaluated."""
    report = setting.probe().evaluate(setting.draft, at(1))
    assert report["twice"] == pytest.approx(2 * report["loss"])
    assert (type(report["twice"]), report["training"]) == (float, 0.0)


def test_it_is_measured_with_the_weights_of_now(setting: Setting) -> None:
    probe, mean = setting.probe(), by_hand()[0]
    assert probe.evaluate(setting.draft, at(1))["loss"] == pytest.approx(2 * mean)
    with torch.no_grad():
        next(setting.draft.module.parameters()).fill_(3.0)
    assert probe.evaluate(setting.draft, at(2))["loss"] == pytest.approx(3 * mean)
    assert set(setting.algorithm.steps) == {at(1), at(2)}


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_no_trace(setting: Setting, training: bool) -> None:
    """Neither in the random numbers, the module's mode, nor the gradients."""
    module = setting.draft.module.train(training)
    before, weights = torch.get_rng_state(), [p.clone() for p in module.parameters()]
    setting.probe().evaluate(setting.draft, at(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training == training for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    assert all(map(torch.equal, module.parameters(), weights))
    assert set(setting.algorithm.modes) == {(False, False)}
    assert torch.is_grad_enabled()


def test_held_out_rows_are_captured_once_for_all_drafts_and_steps_and_stay_whole(
    setting: Setting,
) -> None:
    assert setting.capture.opened == 0, "not before they are needed"
    for probe in (setting.probe(), setting.probe()):
        for step in (1, 2):
            probe.evaluate(setting.draft, at(step))
    assert (setting.capture.opened, setting.capture.closed) == (1, 1)
    assert sorted(row for rows in setting.capture.batches for row in rows) == list(range(ROWS))
    assert {len(rows) for rows in setting.capture.batches} == {1, 2}
    data, samples = Data(), setting.samples()
    assert [one.id for one in samples] == [SampleId(name, 1) for name in data.feature_ids]
    for row, one in enumerate(samples):
        tokens = data.tokens(row).tolist()
        assert (one.token_ids_T.tolist(), one.features[NAME].flatten().tolist()) == (tokens, tokens)
        assert one.loss_mask_T.tolist() == data.loss_mask(row).tolist()


def test_a_held_out_feature_that_is_not_finite_is_refused_and_its_row_named(
    setting: Setting,
) -> None:
    setting.capture.broken = 3
    wanted = r"row 3 of .*eval.jsonl holds inf or nan\n.*capture.dtype=float32"
    with pytest.raises(UsageError, match=wanted):
        setting.probe().evaluate(setting.draft, at(1))
    assert setting.capture.closed == 1


def test_the_first_prompts_are_decoded_by_one_runner_as_long_as_the_draft_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has recorded reads the weights where they are; another draft's lie elsewhere."""
    given: list[tuple[Any, list[list[int]], bool]] = []

    def decode(runner: Any, prompts: list[list[int]], config: Any) -> Any:
        torch.rand(5)
        given.append((runner, prompts, runner.draft.module.training))
        return SimpleNamespace(acceptance_length=2.5)

    monkeypatch.setattr(during, "evaluate_prompts", decode)
    setting = Setting(tmp_path, eval_prompts=3)
    other, probe, before = setting.new_draft(), setting.probe(), torch.get_rng_state()
    assert probe.evaluate(setting.draft, at(1))["acceptance_length"] == 2.5
    probe.evaluate(setting.draft, at(2))
    assert setting.decoders == [setting.draft]
    probe.evaluate(other, at(3))
    assert [id(one) for one in setting.decoders] == [id(setting.draft), id(other)]
    assert len({id(runner) for runner, _, _ in given}) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(training for _, _, training in given)
    texts = [setting.tokenizer.decode(prompt) for prompt in given[0][1]]
    assert [f"q{at}?" in text for at, text in enumerate(texts)] == [True] * 3
    assert all(text.endswith("<|im_start|>assistant\n") for text in texts)
