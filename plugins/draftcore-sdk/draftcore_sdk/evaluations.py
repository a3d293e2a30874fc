"""What every evaluation must do: measure drafts. See `draftcore_sdk` for how to use it.

It measures the small algorithm that `new-plugin` writes, trained on the answers of a tiny target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from draftcore.contracts.run import Evaluation, OpenRun
from draftcore.errors import DraftcoreError, UsageError
from draftcore_sdk.algorithm_training import require_same_bits
from draftcore_sdk.example import QUESTIONS, Example
from draftcore_sdk.running import open_run, small_algorithm
from draftcore_sdk.suite import Suite, bound, offer_of
from draftcore_sdk.workbench import Bench, snapshot

ORIGIN = {"step": 3}  # of a draft that is measured


class EvaluationSuite(Suite):
    """Standard tests of an evaluation: its reports, and that measuring changes nothing."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: Any) -> Bench:
        base = tmp_path_factory.getbasetemp()
        own = bound(small_algorithm(base).stem, "algorithm")
        example = Example.of(base / "algorithm-suite")
        folder = tmp_path_factory.mktemp("runs")
        return Bench(own.hook, own.offer, own.options, example, folder, {}, [])

    @contextmanager
    def opened_with(
        self, bench: Bench, folder: Path, held_out: bool = True
    ) -> Iterator[tuple[OpenRun, Evaluation]]:
        """Open a run with the evaluation, and held-out questions if it is to have some."""
        offer, (plugin, *extras) = (
            offer_of(self.plugin, "evaluation", self.name),
            self.plugin.split(),
        )
        file = folder / "eval.jsonl"
        answered = [{"role": "assistant", "content": "yes"}]
        asked = [[{"role": "user", "content": text}, *answered] for text in QUESTIONS]
        file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in asked))
        sections: dict[str, Any] = {
            "target": {"path": bench.example.spec.path, "device": "cpu"},
            "data": {"eval": str(file)} if held_out else {},
            "eval": {**self.options, "name": offer.name, "plugin": plugin},
            "plugins": extras,
        }
        base = Path(bench.example.spec.path).parents[1]
        with open_run(base, folder, self.plugin, **sections) as run:
            yield run, run.evaluation()

    @pytest.fixture
    def opened(self, bench: Bench, tmp_path: Path) -> Iterator[tuple[OpenRun, Evaluation]]:
        with self.opened_with(bench, tmp_path) as opened:
            yield opened

    # ------------------------------------------------------------ by the verb

    def test_a_report_is_data_and_can_be_shown_and_written(
        self, bench: Bench, opened: tuple[OpenRun, Evaluation], tmp_path: Path
    ) -> None:
        run, evaluation = opened
        report = evaluation.evaluate(run.drafts[0], bench.trained.draft, ORIGIN)
        assert json.loads(json.dumps(report.to_json(), allow_nan=False)), "it says nothing"
        lines = report.lines()
        assert lines
        assert all(isinstance(part, str) for line in lines for part in line), lines
        report.write(tmp_path / "report")
        written = [json.loads(file.read_text()) for file in (tmp_path / "report").glob("*.json")]
        assert json.loads(json.dumps(report.to_json())) in written

    def test_output_that_is_not_the_targets_own_is_an_error(
        self, bench: Bench, opened: tuple[OpenRun, Evaluation], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of an evaluation that decodes, as an acceptance length says that it does."""
        run, evaluation = opened
        draft, model = bench.trained.draft, run.target.load_model()
        if "acceptance_length" not in evaluation.evaluate(run.drafts[0], draft, ORIGIN).to_json():
            pytest.skip("it does not report an acceptance length: it need not decode")
        own = model.generate

        def another(prompts: Any, max_new_tokens: int) -> list[list[int]]:
            return [[(row[0] + 1) % 200, *row[1:]] for row in own(prompts, max_new_tokens)]

        monkeypatch.setattr(model, "generate", another)
        with pytest.raises(DraftcoreError):
            evaluation.evaluate(run.drafts[0], draft, ORIGIN)

    def test_a_draft_that_was_measured_is_as_it_was(
        self, bench: Bench, opened: tuple[OpenRun, Evaluation]
    ) -> None:
        run, evaluation = opened
        draft = bench.build()
        before = snapshot(draft)
        evaluation.evaluate(run.drafts[0], draft, ORIGIN)
        require_same_bits(snapshot(draft), before, "measured, ")
        assert all(p.grad is None for p in draft.module.parameters()), "it leaves gradients"

    def test_without_prompts_it_refuses(self, bench: Bench, tmp_path: Path) -> None:
        opened = self.opened_with(bench, tmp_path, held_out=False)
        with opened as (run, evaluation), pytest.raises(UsageError):
            evaluation.evaluate(run.drafts[0], bench.build(), ORIGIN)

    def test_several_drafts_are_compared_by_label(
        self, bench: Bench, opened: tuple[OpenRun, Evaluation], tmp_path: Path
    ) -> None:
        run, evaluation = opened
        report = evaluation.evaluate(run.drafts[0], bench.trained.draft, ORIGIN)
        text = "\n".join(evaluation.compare({"mine": report, "theirs": report}, tmp_path))
        assert "mine" in text
        assert "theirs" in text

    # ------------------------------------------------------------ in training

    def test_in_training_it_leaves_no_trace(
        self, bench: Bench, opened: tuple[OpenRun, Evaluation]
    ) -> None:
        """Of what the trainer does not put back itself: weights, gradients, the global random states."""
        run, evaluation = opened
        draft = bench.build()
        before, state = snapshot(draft), torch.get_rng_state()
        figures = in_training(evaluation.in_training(run.drafts[0]), draft)
        assert figures
        assert all(isinstance(value, float) for value in figures.values()), figures
        require_same_bits(snapshot(draft), before, "measured, ")
        assert all(p.grad is None for p in draft.module.parameters()), "it leaves gradients"
        assert torch.equal(torch.get_rng_state(), state), "it draws from torch's global generator"

    def test_in_training_it_sees_weights_that_change_in_place(
        self, bench: Bench, opened: tuple[OpenRun, Evaluation]
    ) -> None:
        run, evaluation = opened
        draft, trained = bench.build(), snapshot(bench.trained.draft)
        measure = evaluation.in_training(run.drafts[0])
        first = in_training(measure, draft)
        with torch.no_grad():
            for name, parameter in draft.module.named_parameters():
                parameter.copy_(trained[name])
        then = in_training(measure, draft)
        fresh = evaluation.in_training(run.drafts[0])
        assert then == in_training(fresh, bench.trained.draft) != first


def in_training(measure: Any, draft: Any) -> Mapping[str, float]:
    """Measure a draft as the trainer does."""
    with torch.no_grad():
        draft.module.eval()
        found: Mapping[str, float] = measure(draft)
        draft.module.train()
    return found
