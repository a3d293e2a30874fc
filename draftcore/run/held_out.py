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
from draftcore.data.samples import batch_of
from draftcore.errors import UsageError
from draftcore.features.checks import require_finite
from draftcore.features.loader import samples_of
from draftcore.run import DraftRun, Run
from draftcore.run.features import Features, make_plan
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
    def batches(self) -> list[list[Sample]]:
        """The held-out batches; captured when they are first asked for."""
        rows, batches = self.rows, list[list[Sample]]()
        cut = enumerate(make_plan(self.run, rows).batches)
        with contextlib.closing(self.run.open_capture(self.request, rows)) as capture:
            for captured in capture.features(batch_of(*batch, rows) for batch in cut):
                try:
                    require_finite(captured)
                except BadRows as error:
                    raise UsageError(f"held-out rows of {self.run.data.eval}: {error}") from None
                batches.append(samples_of(captured, rows, 1))
        return batches

    def evaluate(self, draft: DraftRun, built: Draft, context: StepContext) -> dict[str, Any]:
        """Return held-out loss and metrics, what the evaluation found, and what plugins add to it.

        Works on rank 0 alone.
        """
        was_training, outputs = built.module.training, []
        hook, request = draft.algorithm.hook, draft.request()
        asked = {"draft": built, "context": context, "options": draft.options}
        devices = [self.device] if self.device.type == "cuda" else []
        for device in devices:
            torch.cuda.synchronize(device)  # a capture may be under way, by the same target
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            built.module.eval()
            with torch.compiler.set_stance("force_eager"):
                for samples in self.batches:
                    batch = collate(draft, request, samples, self.device)
                    outputs.append(hook.forward_loss(batch=batch, **asked))
            report = dict[str, Any](ratios([fetch(totals(outputs))()]))
            if measure := self.more.get(draft.label):
                report |= measure(built)
            report |= draft.more_metrics(built, report)
            built.module.train(was_training)
        return report
