"""Evaluation during training: held-out loss, and real decoding with the draft as it stands.

It leaves no trace: no random state moves and no later bit of the training loss changes. Held-out
features are captured once, in batches of their own, and kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from draftcore.config import RunConfig
from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, SampleId, StepContext
from draftcore.contracts.capture import Capture, CaptureBatch
from draftcore.contracts.runner import DecodeRunner
from draftcore.data.dataset import Dataset, read_prompts
from draftcore.data.plan import Plan
from draftcore.errors import UsageError
from draftcore.evaluation.decode import evaluate_prompts
from draftcore.tensors import all_finite
from draftcore.training.metrics import ratios, totals


class HeldOut:
    """The held-out samples and prompts of a run, shared by its drafts; read when first needed."""

    def __init__(
        self, config: RunConfig, tokenizer: Any, data: Dataset, open_capture: Callable[[], Capture]
    ) -> None:
        self.config, self.tokenizer, self.data = config, tokenizer, data
        self.open_capture = open_capture
        self._samples: list[Sample] | None = None
        self._prompts: list[list[int]] | None = None

    def prompts(self) -> list[list[int]]:
        if self._prompts is None:
            data, count = self.config.data, self.config.train.eval_prompts
            found, _ = read_prompts(str(data.eval), self.tokenizer, count, data.max_length)
            self._prompts = [list(prompt.token_ids) for prompt in found]
        return self._prompts

    def samples(self) -> Sequence[Sample]:
        """The held-out samples with all the features that the run captures."""
        if self._samples is None:
            capture = self.open_capture()
            try:
                self._samples = self._captured(capture)
            finally:
                capture.close()
        return self._samples

    def _captured(self, capture: Capture) -> list[Sample]:
        data, found = self.data, dict[int, Sample]()
        ids = data.feature_ids
        plan = Plan(ids, data.lengths.tolist(), batch=self.config.train.batch, accumulate=1, seed=0)
        batches = (
            CaptureBatch(
                index,
                rows,
                tuple(ids[row] for row in rows),
                tuple(data.tokens(row).tolist() for row in rows),
            )
            for index, rows in enumerate(plan.batches)
        )
        for one in capture.features(batches):
            for row, features in zip(one.batch.rows, one.features, strict=True):
                if not all_finite(list(features.values())):
                    raise UsageError(
                        f"a feature of row {row} of {self.config.data.eval} holds inf or nan\n"
                        "  capture in a wider type (capture.dtype=float32), or leave the row out"
                    )
                found[row] = Sample(
                    SampleId(ids[row], 0),
                    torch.from_numpy(data.tokens(row)),
                    torch.from_numpy(data.loss_mask(row)),
                    features,
                )
        return [found[row] for row in sorted(found)]


class Probe:
    """Measures one draft in training every `train.eval_every` steps; works on rank 0 alone.

    What decodes is kept from one evaluation to the next: weights are updated in place, so graphs
    that were captured once serve all of them.
    """

    def __init__(
        self,
        held_out: HeldOut,
        config: RunConfig,
        hook: Any,
        collate: Callable[[Sequence[Sample], torch.device], DraftBatch],
        decoder: Callable[[Draft], DecodeRunner],
        device: torch.device,
    ) -> None:
        self.held_out, self.config, self.hook = held_out, config, hook
        self.collate, self.decoder, self.device = collate, decoder, device
        self.runner: DecodeRunner | None = None
        self.decoded: Draft | None = None

    def evaluate(self, built: Draft, step: int, total_steps: int) -> dict[str, Any]:
        """Return held-out loss and metrics and, with train.eval_prompts, the acceptance length."""
        module = built.module
        was_training = module.training
        devices = [self.device] if self.device.type == "cuda" else []
        for device in devices:
            torch.cuda.synchronize(device)  # a capture may be under way, by the same target
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            module.eval()
            report = self._losses(built, StepContext(step, total_steps, self.config.train.seed))
            if self.config.train.eval_prompts:
                report |= self._decoded(built)
            module.train(was_training)
        return report

    def _losses(self, built: Draft, context: StepContext) -> dict[str, float]:
        size, samples = self.config.train.batch, self.held_out.samples()
        outputs = []
        for start in range(0, len(samples), size):
            batch = self.collate(samples[start : start + size], self.device)
            outputs.append(self.hook.forward_loss(draft=built, batch=batch, context=context))
        loss = totals({"loss": (output.numerator, output.denominator)} for output in outputs)
        return {**ratios(*loss), **ratios(*totals(output.counts for output in outputs))}

    def _decoded(self, built: Draft) -> dict[str, float]:
        if self.runner is None or self.decoded is not built:
            self.runner, self.decoded = self.decoder(built), built
        report = evaluate_prompts(self.runner, self.held_out.prompts(), self.config.eval)
        return {"acceptance_length": report.acceptance_length}
