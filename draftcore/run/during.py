"""Evaluation during training: held-out loss, and real decoding with the draft as it stands.

It leaves no trace: no random state moves and no later bit of the training loss changes. Held-out
features are captured once, in groups of their own, and kept in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from draftcore.contracts.algorithm import Draft, Sample, SampleId, StepContext
from draftcore.contracts.capture import CapturedGroup, CaptureGroup, CaptureInput
from draftcore.contracts.runner import DecodeRunner
from draftcore.data.dataset import Dataset, read_prompts
from draftcore.data.plan import Plan
from draftcore.errors import UsageError
from draftcore.evaluation.decode import evaluate_prompts
from draftcore.run.parts import DraftRun, Run
from draftcore.tensors import require_finite
from draftcore.training.metrics import ratios, totals


class HeldOut:
    """The held-out samples and prompts of a run, shared by its drafts."""

    def __init__(self, run: Run) -> None:
        self.run, self.config = run, run.config
        run.runners["decode"].check(run.target)  # what it refuses is refused before training
        if self.config.data.eval is None:
            raise UsageError(
                "train.eval_every is set, but data.eval is not\n  set data.eval to held-out conversations"
            )

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        data, count = self.config.data, self.config.train.eval_prompts
        found, _ = read_prompts(str(data.eval), self.run.target.tokenizer, count, data.max_length)
        return [list(prompt.token_ids) for prompt in found]

    @functools.cached_property
    def samples(self) -> Sequence[Sample]:
        """The held-out samples with all the features that the run captures."""
        config = self.config
        dataset = self.run.dataset(str(config.data.eval), "eval", limit=config.train.eval_samples)
        plan = Plan(
            dataset.feature_ids,
            dataset.lengths.tolist(),
            capture_batch=config.capture.batch,
            batch=1,
            seed=0,
        )
        captured = self.run.feed.beside(lambda: self._captured(dataset, plan.groups))
        return [
            Sample(
                SampleId(feature_id, 0),
                torch.from_numpy(dataset.tokens(row)),
                torch.from_numpy(dataset.loss_mask(row)),
                features,
            )
            for one in captured
            for row, feature_id, features in zip(
                one.group.rows, one.group.feature_ids, one.features, strict=True
            )
        ]

    def _captured(self, dataset: Dataset, groups: Iterable[CaptureGroup]) -> list[CapturedGroup]:
        capture = self.run.open_capture()
        given = (
            CaptureInput(group, tuple(dataset.tokens(row).tolist() for row in group.rows))
            for group in groups
        )
        found = list(capture.features(given))
        for one in found:
            require_finite(one)
        capture.close()
        return found


class Probe:
    """Measures one draft in training every `train.eval_every` steps; works on rank 0 alone.

    What decodes is kept from one evaluation to the next: weights are updated in place, so graphs
    that were captured once serve all of them.
    """

    def __init__(self, draft: DraftRun, held_out: HeldOut, device: torch.device) -> None:
        self.draft, self.held_out, self.device = draft, held_out, device
        self.config = draft.config
        self.runner: DecodeRunner | None = None
        self.decoded: Draft | None = None

    def evaluate(self, built: Draft, step: int, total_steps: int) -> dict[str, Any]:
        """Return held-out loss and metrics and, with train.eval_prompts, the acceptance length."""
        module = built.module
        was_training = module.training
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            module.eval()
            report = self._losses(built, StepContext(step, total_steps, self.config.train.seed))
            if self.config.train.eval_prompts:
                report |= self._decoded(built)
            module.train(was_training)
        return report

    def _losses(self, built: Draft, context: StepContext) -> dict[str, float]:
        hook, size, samples = (
            self.draft.algorithm.hook,
            self.config.train.batch,
            self.held_out.samples,
        )
        outputs = []
        for start in range(0, len(samples), size):
            batch = self.draft.collate(samples[start : start + size], self.device)
            outputs.append(hook.forward_loss(draft=built, batch=batch, context=context))
        loss = totals({"loss": (output.numerator, output.denominator)} for output in outputs)
        return {**ratios(*loss), **ratios(*totals(output.counts for output in outputs))}

    def _decoded(self, built: Draft) -> dict[str, float]:
        if self.runner is None or self.decoded is not built:
            self.runner, self.decoded = self.draft.decoder(built), built
        report = evaluate_prompts(self.runner, self.held_out.prompts, self.config.eval)
        return {"acceptance_length": report.acceptance_length}
