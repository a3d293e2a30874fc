"""The reference implementation's numbers, met case by case.

The folder is DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`; every `dflash*.json` there is
run, with shapes and options as its JSON says and the anchors that it gives.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.config import DraftConfig
from draftcore_dflash.loss import Objective, Sampling
from draftcore_dflash.model import DFlashDraft
from draftcore_dflash.options import DFlashOptions
from draftcore_dflash.serving import config_fields
from safetensors.torch import load_file

from draftcore.contracts.algorithm import DraftBatch, Sample, SampleId, StepOutput

OWN = Path(__file__).parents[3] / "tests" / "goldens"
FOLDER = Path(os.environ.get("DRAFTCORE_GOLDENS", OWN))
NAMES = sorted(path.stem for path in FOLDER.glob("dflash*.json")) or ["dflash"]


class Golden:
    """One case: its JSON, its tensors, and our objects made of them."""

    def __init__(self, name: str) -> None:
        self.data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        self.tensors = load_file(FOLDER / f"{name}.safetensors")
        bounds = {kind: float(re.search(rf"{kind} ([\de.-]+)", self.data["tolerance"])[1])  # type: ignore[index]
                  for kind in ("loss rtol", "grads rtol", "atol")}  # fmt: skip
        self.loss_rtol, self.grad_rtol, self.grad_atol = bounds.values()
        self.config = DraftConfig(**config_fields(self.data["draft_config"], FOLDER))

    def draft(self, **changes: Any) -> DFlashDraft:
        gamma = changes.pop("gamma", self.data["loss_decay_gamma"])
        alpha = changes.pop("dpace_alpha", self.data.get("dpace_alpha", 0.5))
        draft = DFlashDraft(
            self.config,
            Sampling(self.data["num_anchors"], gamma),
            Objective(changes.pop("loss", "ce"), alpha),
            self.tensors["target.embed_tokens.weight"],
            self.tensors["target.lm_head.weight"],
        )
        weights = {name[6:]: t for name, t in self.tensors.items() if name.startswith("draft.")}
        draft.load_state_dict(weights, strict=True)
        return draft

    def samples(self) -> list[Sample]:
        count = sum(name.endswith(".input_ids") for name in self.tensors if name[:4] == "raw.")
        return [self.sample(index) for index in range(count)]

    def sample(self, index: int) -> Sample:
        raw = {n: self.tensors[f"raw.{index}.{n}"] for n in ("input_ids", "loss_mask")}
        hidden = self.tensors[f"raw.{index}.hidden_states"][0].chunk(len(self.config.layers), -1)
        features = {f"hidden.{k}": h for k, h in zip(self.config.layers, hidden, strict=True)}
        return Sample(SampleId(str(index), 1), raw["input_ids"], raw["loss_mask"].bool(), features)

    def batch(self) -> DraftBatch:
        return DFlash(DFlashOptions()).collate(self.samples())

    def blocks(self, prefix: str = "") -> Blocks:
        return Blocks.of(
            self.tensors[f"{prefix}anchors"], self.tensors[f"{prefix}anchor_keep"].bool()
        )


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def check_accuracy(output: StepOutput, expected: float) -> None:
    above, below = map(float, output.counts["accuracy"])
    assert above / max(1.0, below) == pytest.approx(expected)


def check_gradients(
    golden: Golden, draft: DFlashDraft, norms: Mapping[str, float], prefix: str | None = None
) -> None:
    """Compare the norms of all, and element by element those that the golden has by this prefix."""
    found = {name: float(p.grad.norm()) for name, p in draft.named_parameters()}  # type: ignore[union-attr]
    assert found == pytest.approx(norms, rel=golden.grad_rtol, abs=golden.grad_atol)
    bounds = {"rtol": golden.grad_rtol, "atol": golden.grad_atol}
    for name, gradient in golden.tensors.items():
        if prefix is not None and name.startswith(prefix):
            found_grad = draft.get_parameter(name.removeprefix(prefix)).grad
            torch.testing.assert_close(found_grad, gradient, **bounds)


def test_golden_loss_metrics_and_every_gradient(golden: Golden) -> None:
    draft, expected = golden.draft(), golden.data["expected"]
    output = draft.loss(golden.batch(), golden.blocks())
    loss = output.numerator / output.denominator
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=golden.loss_rtol)
    terms = [float(output.numerator.detach()), float(output.denominator)]
    assert terms == pytest.approx(expected["loss_terms"], rel=golden.loss_rtol)
    hits = expected["ratio_metrics"]["acc"]
    assert tuple(map(float, output.counts["accuracy"])) == (hits["num"], hits["den"])
    check_accuracy(output, expected["accuracy"])
    check_gradients(golden, draft, golden.data["grad_norms"], "grad.")


def test_golden_alternatives_on_the_same_inputs(golden: Golden) -> None:
    for name, expected in golden.data["alternatives_same_inputs_and_anchors"].items():
        draft = golden.draft(**alternative(name))
        output = draft.loss(golden.batch(), golden.blocks())
        numerator, denominator = expected["loss_terms"]
        found = float(output.numerator.detach())
        assert found == pytest.approx(numerator, rel=golden.loss_rtol), name
        # The reference's D-PACE counts every sample, ours those with something to learn.
        counted = float(output.denominator)
        if draft.objective.loss == "ce":
            assert counted == pytest.approx(denominator, rel=golden.loss_rtol), name
        assert found / denominator == pytest.approx(expected["loss"], rel=golden.loss_rtol), name
        check_accuracy(output, expected["accuracy"])
        if expected.get("grad_norms"):
            (output.numerator / denominator).backward()
            check_gradients(golden, draft, expected["grad_norms"])


def alternative(name: str) -> dict[str, Any]:
    """What a golden's alternative changes; memory and kernel variants change no number."""
    if found := re.fullmatch(r"gamma_([\d.e-]+)", name):
        return {"gamma": float(found[1])}
    if found := re.fullmatch(r"(dpace(?:_[a-z_]+?)?)(?:_alpha_([\d.e-]+))?", name):
        alpha = {"dpace_alpha": float(found[2])} if found[2] else {}
        return {"loss": found[1], **alpha}
    if name == "no_decay":
        return {"gamma": None}
    known = r"(eager|sdpa|flex)_backend.*|(un)?chunked.*|chunk.*"
    assert re.fullmatch(known, name), f"unknown alternative {name}"
    return {}


def test_golden_accumulation_window(golden: Golden) -> None:
    """Micro-batches of one sample each, with anchors of their own, normalised once."""
    draft = golden.draft()
    outputs = [
        draft.loss(DFlash(DFlashOptions()).collate([sample]), golden.blocks(f"window.{index}."))
        for index, sample in enumerate(golden.samples())
    ]
    numerator = torch.stack([output.numerator for output in outputs]).sum()
    denominator = torch.stack([output.denominator for output in outputs]).sum()
    (numerator / denominator).backward()
    (window,) = (v for n, v in golden.data.items() if n.startswith("accumulation_window"))
    metrics, loss = window["trainer_metrics"], float((numerator / denominator).detach())
    assert loss == pytest.approx(metrics["loss"], rel=golden.loss_rtol)
    hits, seen = (sum(float(o.counts["accuracy"][i]) for o in outputs) for i in (0, 1))
    assert hits / seen == pytest.approx(metrics["acc"])
    norms = window["grad_norms_after_global_normalization"]
    check_gradients(golden, draft, norms, "window.grad.")
