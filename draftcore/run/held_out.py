"""The loss of held-out rows, measured in training, and beside it what an evaluation finds.

It leaves no trace: no random state moves and no later bit of the training loss changes. Held-out
features are captured once, in batches of their own, and kept in memory.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from draftcore.contracts.algorithm import Draft, Sample, StepContext
from draftcore.contracts.capture import BadRows
from draftcore.data.plan import Plan
from draftcore.data.samples import batch_of
from draftcore.errors import UsageError
from draftcore.features.checks import require_finite
from draftcore.features.loader import samples_of
from draftcore.run import DraftRun, Run
from draftcore.run.features import Features
from draftcore.training.loop import collate
from draftcore.training.metrics import fetch, ratios, totals


class HeldOut:
    """Measures drafts in training as `train.eval_every` says; all drafts of a run share it.

    It is made before rows are rendered, and refuses what cannot be measured.
    """

    def __init__(self, run: Run, features: Features) -> None:
        train = run.config.train
        if run.data.eval is None:
            raise UsageError("train.eval_every needs held-out rows: set data.eval")
        self.run, self.request, self.device = run, features.request, run.ranks.device(train.device)
        decoding = run.drafts if train.eval_prompts else ()  # what an evaluation finds, beside
        self.more = {draft.label: run.evaluation().in_training(draft) for draft in decoding}

    def read(self, date: str) -> None:
        """Read the held-out rows; their template is told the date of those that are trained on."""
        try:
            self.rows = self.run.data.samples("eval", date, self.run.config.train.eval_samples)
        except UsageError as error:
            raise UsageError(f"{error}\n  train.eval_every=0 trains without these rows") from None

    @functools.cached_property
    def samples(self) -> list[Sample]:
        """The held-out samples; captured when they are first asked for."""
        rows, size = self.rows, self.run.config.train.batch
        plan = Plan(rows.feature_ids, rows.lengths.tolist(), batch=size, accumulate=1, seed=0)
        by_row = dict[int, Sample]()
        with contextlib.closing(self.run.open_capture(self.request, rows)) as capture:
            for captured in capture.features(batch_of(*b, rows) for b in enumerate(plan.batches)):
                try:
                    require_finite(captured)
                except BadRows as error:
                    raise UsageError(f"held-out rows of {self.run.data.eval}: {error}") from None
                by_row |= zip(captured.batch.rows, samples_of(captured, rows, 1), strict=True)
        return [by_row[row] for row in sorted(by_row)]

    def evaluate(self, draft: DraftRun, built: Draft, context: StepContext) -> dict[str, Any]:
        """Return held-out loss and metrics, what the evaluation found, and what plugins add to it.

        Works on rank 0 alone.
        """
        was_training, outputs, size = built.module.training, [], draft.config.train.batch
        hook, request = draft.algorithm.hook, draft.request()
        asked = {"draft": built, "context": context, "options": draft.options}
        devices = [self.device] if self.device.type == "cuda" else []
        for device in devices:
            torch.cuda.synchronize(device)  # a capture may be under way, by the same target
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            built.module.eval()
            with torch.compiler.set_stance("force_eager"):
                for start in range(0, len(self.samples), size):
                    batch = collate(draft, request, self.samples[start : start + size], self.device)
                    outputs.append(hook.forward_loss(batch=batch, **asked))
            report = dict[str, Any](ratios([fetch(totals(outputs))()]))
            if measure := self.more.get(draft.label):
                report |= measure(built)
            report |= draft.more_metrics(built, report)
            built.module.train(was_training)
        return report
