"""What every evaluation must do: measure drafts. See `draftcore_sdk` for how to use it.

It measures the small algorithm that `new-plugin` writes, trained on the answers of a tiny target.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.run import Evaluation, OpenRun, Report
from draftcore.errors import DraftcoreError, UsageError
from draftcore_sdk.running import open_run, small_algorithm
from draftcore_sdk.suite import Suite, bound, offer_of, slow
from draftcore_sdk.workbench import QUESTIONS, Bench, Example, require_same_bits, snapshot


@dataclass
class Measuring:
    """An open run with the evaluation, and drafts to measure: a trained one, and fresh ones."""

    run: OpenRun
    evaluation: Evaluation
    bench: Bench

    def report(self, draft: Draft) -> Report:
        """Measure as the verb does."""
        return self.evaluation.evaluate(self.run.drafts[0], draft, {"step": 3})

    def in_training(self) -> Callable[[Draft], Mapping[str, float]]:
        """Return what measures as the trainer does."""
        measure = self.evaluation.in_training(self.run.drafts[0])

        @torch.no_grad()
        def figures(draft: Draft) -> Mapping[str, float]:
            draft.module.eval()
            found = measure(draft)
            draft.module.train()
            return found

        return figures


@functools.cache
def small_bench(base: Path) -> Bench:
    """Return the small algorithm's bench, with a draft that is trained once in a process."""
    own, example = bound(small_algorithm(base).stem, "algorithm"), base / "algorithm-suite"
    return Bench(own.hook, own.offer, own.options, Example.of(example), base, {}, [])


class EvaluationSuite(Suite):
    """Standard tests of an evaluation: its reports, and that measuring changes nothing."""

    @pytest.fixture
    def bench(self, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        return small_bench(tmp_path_factory.getbasetemp())

    @contextmanager
    def measuring(self, bench: Bench, folder: Path, held_out: bool = True) -> Iterator[Measuring]:
        """Open a run with the evaluation, and held-out questions if it is to have some."""
        offer = offer_of(self.plugin, "evaluation", self.name)
        plugin, *extras = self.plugin.split()
        answered = [{"role": "assistant", "content": "yes"}]
        asked = [[{"role": "user", "content": text}, *answered] for text in QUESTIONS]
        lines = "".join(json.dumps({"messages": turns}) + "\n" for turns in asked)
        (file := folder / "eval.jsonl").write_text(lines)
        sections: dict[str, Any] = {
            "target": {"path": bench.example.spec.path, "device": "cpu"},
            "data": {"eval": str(file)} if held_out else {},
            "eval": {**self.options, "name": offer.name, "plugin": plugin},
            "plugins": extras,
        }
        with open_run(bench.folder, folder, self.plugin, **sections) as run:
            yield Measuring(run, run.evaluation(), bench)

    @pytest.fixture
    def opened(self, bench: Bench, tmp_path: Path) -> Iterator[Measuring]:
        with self.measuring(bench, tmp_path) as opened:
            yield opened

    # ------------------------------------------------------------ by the verb

    def test_a_report_is_data_and_can_be_shown_and_written(
        self, opened: Measuring, tmp_path: Path
    ) -> None:
        report = opened.report(opened.bench.trained.draft)
        assert json.loads(json.dumps(report.to_json(), allow_nan=False)), "it says nothing"
        lines = report.lines()
        assert {isinstance(part, str) for line in lines for part in line} == {True}, lines
        report.write(tmp_path / "report")
        written = [json.loads(file.read_text()) for file in (tmp_path / "report").glob("*.json")]
        assert json.loads(json.dumps(report.to_json())) in written

    def test_output_that_is_not_the_targets_own_is_an_error(
        self, opened: Measuring, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of an evaluation that decodes, as an acceptance length says that it does."""
        draft, model = opened.bench.trained.draft, opened.run.target.load_model()
        if "acceptance_length" not in opened.report(draft).to_json():
            pytest.skip("it does not report an acceptance length: it need not decode")
        own = model.generate

        def another(prompts: Any, max_new_tokens: int) -> list[list[int]]:
            return [[(row[0] + 1) % 200, *row[1:]] for row in own(prompts, max_new_tokens)]

        monkeypatch.setattr(model, "generate", another)
        with pytest.raises(DraftcoreError):
            opened.report(draft)

    def test_a_draft_that_was_measured_is_as_it_was(self, opened: Measuring) -> None:
        draft = opened.bench.build()
        before = snapshot(draft)
        opened.report(draft)
        require_untouched(draft, before)

    def test_without_prompts_it_refuses(self, bench: Bench, tmp_path: Path) -> None:
        with self.measuring(bench, tmp_path, held_out=False) as opened, pytest.raises(UsageError):
            opened.report(bench.build())

    @slow
    def test_several_drafts_are_compared_by_label(self, opened: Measuring, tmp_path: Path) -> None:
        report = opened.report(opened.bench.trained.draft)
        lines = opened.evaluation.compare({"mine": report, "theirs": report}, tmp_path)
        missing = [label for label in ("mine", "theirs") if label not in "\n".join(lines)]
        assert not missing, f"{missing} is not in {lines}"

    # ------------------------------------------------------------ in training

    @slow
    def test_in_training_it_leaves_no_trace(self, opened: Measuring) -> None:
        """Of what the trainer does not put back itself: weights, gradients, the global random states."""
        draft = opened.bench.build()
        before, state = snapshot(draft), torch.get_rng_state()
        figures = opened.in_training()(draft)
        assert figures
        assert all(isinstance(value, float) for value in figures.values()), figures
        require_untouched(draft, before)
        assert torch.equal(torch.get_rng_state(), state), "it draws from torch's global generator"

    @slow
    def test_in_training_it_sees_weights_that_change_in_place(self, opened: Measuring) -> None:
        draft, trained = opened.bench.build(), opened.bench.trained.draft
        measure = opened.in_training()
        first = measure(draft)
        with torch.no_grad():
            for name, parameter in draft.module.named_parameters():
                parameter.copy_(trained.module.get_parameter(name))
        assert measure(draft) == opened.in_training()(trained) != first


def require_untouched(draft: Draft, before: Mapping[str, torch.Tensor]) -> None:
    require_same_bits(snapshot(draft), before, "measured, ")
    assert all(p.grad is None for p in draft.module.parameters()), "it leaves gradients"
