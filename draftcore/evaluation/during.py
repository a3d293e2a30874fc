"""Evaluation during training: held-out loss, and real decoding with the draft as it stands.

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

from draftcore.config import RunConfig
from draftcore.contracts.algorithm import Draft, Sample, SampleId, StepContext
from draftcore.contracts.capture import Capture
from draftcore.contracts.runner import DecodeRunner
from draftcore.data.dataset import Dataset
from draftcore.data.plan import Plan, PlannedBatch
from draftcore.data.samples import batch_of
from draftcore.errors import UsageError
from draftcore.evaluation.decode import evaluate_prompts
from draftcore.evaluation.report import more_metrics
from draftcore.tensors import all_finite
from draftcore.training.loop import DraftSetup
from draftcore.training.metrics import fetch, ratios, totals


def held_out_samples(
    config: RunConfig, data: Dataset, open_capture: Callable[[], Capture]
) -> Callable[[], list[Sample]]:
    """Return a function that captures the held-out rows at its first call, and keeps their samples.

    They have all the features that the run captures. It raises UsageError for one that is not finite.
    """
    ids = data.feature_ids
    plan = Plan(ids, data.lengths.tolist(), batch=config.train.batch, accumulate=1, seed=0)

    @functools.cache
    def samples() -> list[Sample]:
        by_row = dict[int, Sample]()
        batches = (
            batch_of(PlannedBatch(index, 0, 0, 0, index, rows), data, ids, {})
            for index, rows in enumerate(plan.batches)
        )
        with contextlib.closing(open_capture()) as capture:
            for captured in capture.features(batches):
                for row, features in zip(captured.batch.rows, captured.features, strict=True):
                    if not all_finite(list(features.values())):
                        raise UsageError(
                            f"a feature of row {row} of {config.data.eval} holds inf or nan\n"
                            "  capture in a wider type (capture.dtype=float32), or leave the row out"
                        )
                    tokens_T = torch.from_numpy(data.tokens(row))
                    mask_T = torch.from_numpy(data.loss_mask(row))
                    by_row[row] = Sample(SampleId(ids[row], 1), tokens_T, mask_T, features)
        return [by_row[row] for row in sorted(by_row)]

    return samples


@dataclass
class Probe:
    """Measures one draft in training every `train.eval_every` steps; works on rank 0 alone.

    `samples` and `prompts` return the held-out ones, which are read at the first call. What decodes is
    kept from one evaluation to the next: weights are updated in place, so graphs that were captured once
    serve all of them.
    """

    samples: Callable[[], list[Sample]]
    prompts: Callable[[], list[list[int]]]
    device: torch.device
    setup: DraftSetup
    decoder: Callable[[Draft], DecodeRunner]
    runner: DecodeRunner | None = None
    decoded: Draft | None = None

    def evaluate(self, built: Draft, context: StepContext) -> dict[str, Any]:
        """Return held-out loss and metrics, with train.eval_prompts the acceptance length, and more.

        The rest is what the algorithm and the plugins of the run add by `eval_metrics`.
        """
        config, was_training = self.setup.config, built.module.training
        devices = [self.device] if self.device.type == "cuda" else []
        for device in devices:
            torch.cuda.synchronize(device)  # a capture may be under way, by the same target
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            built.module.eval()
            with torch.compiler.set_stance("force_eager"):
                report = self._losses(built, context)
            if config.train.eval_prompts:
                if self.runner is None or self.decoded is not built:
                    self.runner, self.decoded = self.decoder(built), built
                decoded = evaluate_prompts(self.runner, self.prompts(), config.eval)
                report["acceptance_length"] = decoded.acceptance_length
            report |= more_metrics(self.setup.hook, built, report, self.setup.options)
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
