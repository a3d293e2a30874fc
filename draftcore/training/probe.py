"""Evaluation during training: held-out loss, and real decoding with the draft as it stands.

It leaves no trace: no random state moves and no later bit of the training loss changes. Held-out
features are captured once, in groups of their own, and kept in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from draftcore.data.dataset import read_prompts
from draftcore.errors import UsageError
from draftcore.evaluation.decode import evaluate_prompts
from draftcore.plan import Plan
from draftcore.records import CaptureInput, Draft, Sample, SampleId, StepContext
from draftcore.run import Run
from draftcore.training.metrics import ratios


class Probe:
    """Measures a draft in training every `train.eval_every` steps."""

    def __init__(self, run: Run, draft: Draft, device: torch.device) -> None:
        self.run, self.draft, self.device = run, draft, device
        if run.config.data.eval is None:
            raise UsageError(
                "train.eval_every is set, but data.eval is not\n  set data.eval to held-out conversations"
            )

    def evaluate(self, step: int, total_steps: int) -> dict[str, Any]:
        """Return held-out loss and metrics and, with train.eval_prompts, the acceptance length."""
        module = self.draft.module
        was_training = module.training
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            module.eval()
            report = self._held_out(StepContext(step, total_steps, self.run.config.train.seed))
            if self.run.config.train.eval_prompts:
                report |= self._decoded()
            module.train(was_training)
        return report

    def _held_out(self, context: StepContext) -> dict[str, float]:
        hook, batch_size = self.run.algorithm.hook, self.run.config.train.batch
        outputs = []
        for start in range(0, len(self.samples), batch_size):
            samples = self.samples[start : start + batch_size]
            batch = hook.collate(samples=samples, options=self.run.options).to(self.device)
            outputs.append(hook.forward_loss(draft=self.draft, batch=batch, context=context))
        loss = [{"loss": (output.numerator, output.denominator)} for output in outputs]
        return {**ratios(loss), **ratios([output.counts for output in outputs])}

    def _decoded(self) -> dict[str, float]:
        config = self.run.config
        drafter = self.run.algorithm.hook.drafter(
            draft=self.draft, target=self.run.target.model, options=self.run.options
        )
        prompts = self.prompts[: config.train.eval_prompts]
        report = evaluate_prompts(self.run.target.model, drafter, prompts, config.eval)
        return {"acceptance_length": report.acceptance_length}

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        config = self.run.config
        found, _ = read_prompts(
            str(config.data.eval),
            self.run.target.tokenizer,
            config.train.eval_prompts,
            config.data.max_length,
        )
        return [list(prompt.token_ids) for prompt in found]

    @functools.cached_property
    def samples(self) -> Sequence[Sample]:
        """The held-out samples with their features."""
        config = self.run.config
        dataset = self.run.dataset(str(config.data.eval), "eval", limit=config.train.eval_samples)
        plan = Plan(
            dataset.feature_ids,
            dataset.lengths.tolist(),
            capture_batch=config.capture.batch,
            batch=1,
            seed=0,
        )
        capture = self.run.open_capture()
        groups = (
            CaptureInput(group, tuple(dataset.tokens(row).tolist() for row in group.rows))
            for group in plan.groups
        )
        samples = [
            Sample(
                SampleId(feature_id, 0),
                torch.from_numpy(dataset.tokens(row)),
                torch.from_numpy(dataset.loss_mask(row)),
                features,
            )
            for captured in capture.features(groups)
            for row, feature_id, features in zip(
                captured.group.rows, captured.group.feature_ids, captured.features, strict=True
            )
        ]
        capture.close()
        return samples
