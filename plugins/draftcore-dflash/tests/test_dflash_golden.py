"""The reference implementation's numbers, met case by case.

The folder is DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`; every `dflash*.json` there is
run, with shapes and options as its JSON says and the anchors that it gives.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.config import DraftConfig
from draftcore_dflash.model import DFlashDraft
from draftcore_dflash.options import DFlashOptions
from draftcore_dflash.serving import config_fields
from draftcore_sdk import algorithm_checks

from draftcore.contracts.algorithm import DraftBatch, Sample, StepOutput

OWN = Path(__file__).parents[3] / "tests" / "goldens"


class Golden(algorithm_checks.Golden):
    """One case, with our objects made of it."""

    @property
    def config(self) -> DraftConfig:
        return DraftConfig(**config_fields(self.data["draft_config"], self.folder))

    def draft(self, **changes: Any) -> DFlashDraft:
        names = ("num_anchors", "loss_decay_gamma", "dpace_alpha")
        given = {name: self.data[name] for name in names if name in self.data}
        draft = DFlashDraft(
            self.config,
            DFlashOptions(**{**given, **changes}),
            self.tensors["target.embed_tokens.weight"],
            self.tensors["target.lm_head.weight"],
        )
        self.fill(draft)
        return draft

    def batch(self, *samples: Sample) -> DraftBatch:
        return DFlash(DFlashOptions()).collate(samples or self.samples(self.config.layers))

    def blocks(self, prefix: str = "") -> Blocks:
        keep_BN = self.tensors[f"{prefix}anchor_keep"].bool()
        return Blocks.of(self.tensors[f"{prefix}anchors"], keep_BN)


@pytest.fixture(params=algorithm_checks.cases(OWN, "dflash"), ids=lambda file: file.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def check_accuracy(output: StepOutput, expected: float) -> None:
    above, below = map(float, output.counts["accuracy"])
    assert above / max(1.0, below) == pytest.approx(expected)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_golden_loss_metrics_and_every_gradient(golden: Golden, compiled: bool) -> None:
    draft, expected = golden.draft(), golden.data["expected"]
    if compiled:
        draft.compile(dynamic=True)
    output = draft.loss_of(golden.batch(), golden.blocks())
    loss = output.numerator / output.denominator
    loss.backward()
    golden.check(float(loss.detach()), expected["loss"])
    terms = [float(output.numerator.detach()), float(output.denominator)]
    golden.check(terms, expected["loss_terms"])
    hits = expected["ratio_metrics"]["acc"]
    assert tuple(map(float, output.counts["accuracy"])) == (hits["num"], hits["den"])
    check_accuracy(output, expected["accuracy"])
    golden.check_gradients(draft, golden.data["grad_norms"], "grad.")


def test_golden_alternatives_on_the_same_inputs(golden: Golden) -> None:
    for name, expected in golden.data["alternatives_same_inputs_and_anchors"].items():
        draft = golden.draft(**alternative(name))
        output = draft.loss_of(golden.batch(), golden.blocks())
        numerator, denominator = expected["loss_terms"]
        found = float(output.numerator.detach())
        golden.check(found, numerator, name)
        # The reference's D-PACE counts every sample, ours those with something to learn.
        if draft.options.loss == "ce":
            golden.check(float(output.denominator), denominator, name)
        golden.check(found / denominator, expected["loss"], name)
        check_accuracy(output, expected["accuracy"])
        if expected.get("grad_norms"):
            (output.numerator / denominator).backward()
            golden.check_gradients(draft, expected["grad_norms"])


def alternative(name: str) -> dict[str, Any]:
    """What a golden's alternative changes; memory and kernel variants change no number."""
    if found := re.fullmatch(r"gamma_([\d.e-]+)", name):
        return {"loss_decay_gamma": float(found[1])}
    if found := re.fullmatch(r"(dpace(?:_[a-z_]+?)?)(?:_alpha_([\d.e-]+))?", name):
        alpha = {"dpace_alpha": float(found[2])} if found[2] else {}
        return {"loss": found[1], **alpha}
    if name == "no_decay":
        return {"loss_decay_gamma": None}
    known = r"(eager|sdpa|flex)_backend.*|(un)?chunked.*|chunk.*"
    assert re.fullmatch(known, name), f"unknown alternative {name}"
    return {}


def test_golden_accumulation_window(golden: Golden) -> None:
    """Micro-batches of one sample each, with anchors of their own, normalised once."""
    draft = golden.draft()
    outputs = [
        draft.loss_of(golden.batch(sample), golden.blocks(f"window.{index}."))
        for index, sample in enumerate(golden.samples(golden.config.layers))
    ]
    numerator = torch.stack([output.numerator for output in outputs]).sum()
    denominator = torch.stack([output.denominator for output in outputs]).sum()
    (numerator / denominator).backward()
    (window,) = (v for n, v in golden.data.items() if n.startswith("accumulation_window"))
    metrics = window["trainer_metrics"]
    golden.check(float((numerator / denominator).detach()), metrics["loss"])
    hits, seen = (sum(float(o.counts["accuracy"][i]) for o in outputs) for i in (0, 1))
    assert hits / seen == pytest.approx(metrics["acc"])
    norms = window["grad_norms_after_global_normalization"]
    golden.check_gradients(draft, norms, "window.grad.")
