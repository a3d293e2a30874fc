"""The loss of held-out rows, measured in training, and beside it what an evaluation finds.

It leaves no trace: no random state moves and no later bit of the training loss changes. Held-out
features are captured once, in batches of their own, and kept in memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from draftcore.contracts.algorithm import Draft, Sample, SampleId, StepContext
from draftcore.contracts.capture import BadRows
from draftcore.contracts.run import PlannedBatch
from draftcore.data.plan import Plan
from draftcore.data.samples import batch_of
from draftcore.errors import UsageError
from draftcore.features.checks import require_finite
from draftcore.run import DraftRun, Run
from draftcore.run.features import Features
from draftcore.training.loop import DraftSetup
from draftcore.training.metrics import fetch, ratios, totals


def open_held_out(run: Run, features: Features, date: str) -> Callable[..., HeldOut]:
    """Read the held-out rows; return what measures a draft on them, which all drafts share."""
    train = run.config.train
    if run.data.eval is None:
        raise UsageError("train.eval_every needs held-out rows: set data.eval")
    data = run.data.samples("eval", date, train.eval_samples)
    plan = Plan(data.feature_ids, data.lengths.tolist(), batch=train.batch, accumulate=1, seed=0)

    @functools.cache
    def samples() -> list[Sample]:
        by_row = dict[int, Sample]()
        batches = (
            batch_of(PlannedBatch(index, 0, 0, 0, index, rows), data, data.feature_ids, {})
            for index, rows in enumerate(plan.batches)
        )
        with contextlib.closing(run.open_capture(features.request, data)) as capture:
            for captured in capture.features(batches):
                try:
                    require_finite(captured)
                except BadRows as error:
                    raise UsageError(f"held-out rows of {run.data.eval}: {error}") from None
                for row, values in zip(captured.batch.rows, captured.features, strict=True):
                    sample_id = SampleId(data.feature_ids[row], 1)
                    tokens_T = torch.from_numpy(data.tokens(row))
                    mask_T = torch.from_numpy(data.loss_mask(row))
                    by_row[row] = Sample(sample_id, tokens_T, mask_T, values)
        return [by_row[row] for row in sorted(by_row)]

    evaluation, more = run.evaluation() if train.eval_prompts else None, {}
    if evaluation is not None:
        more = {draft.label: evaluation.in_training(draft) for draft in run.drafts}
    device = run.ranks.device(train.device)

    def of_draft(setup: DraftSetup, draft: DraftRun) -> HeldOut:
        return HeldOut(samples, device, setup, draft, more.get(draft.label, lambda built: {}))

    return of_draft


@dataclass
class HeldOut:
    """Measures one draft in training every `train.eval_every` steps; works on rank 0 alone.

    `samples` returns the held-out ones, which are captured at the first call; `more` is an evaluation's.
    """

    samples: Callable[[], list[Sample]]
    device: torch.device
    setup: DraftSetup
    draft: DraftRun
    more: Callable[[Draft], dict[str, float]]

    def evaluate(self, built: Draft, context: StepContext) -> dict[str, Any]:
        """Return held-out loss and metrics, what the evaluation found, and what plugins add to it."""
        was_training = built.module.training
        devices = [self.device] if self.device.type == "cuda" else []
        for device in devices:
            torch.cuda.synchronize(device)  # a capture may be under way, by the same target
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            built.module.eval()
            with torch.compiler.set_stance("force_eager"):
                report: dict[str, Any] = self._losses(built, context)
            report |= self.more(built)
            report |= self.draft.more_metrics(built, report)
            built.module.train(was_training)
        return report

    def _losses(self, built: Draft, context: StepContext) -> dict[str, float]:
        size, samples = self.setup.config.train.batch, self.samples()
        outputs = []
        for start in range(0, len(samples), size):
            batch = self.setup.collate(samples[start : start + size], self.device)
            outputs.append(
                self.setup.hook.forward_loss(
                    draft=built, batch=batch, context=context, options=self.setup.options
                )
            )
        return ratios([fetch(totals(outputs))()])
