"""The reference implementation's numbers, met case by case.

The folder is DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`; every `domino*.json` there is
run, with shapes and options as its JSON says and the anchors that it gives. The reference divides
by the sum of weights + 1e-6, ours by the sum; the difference is far below the tolerance.
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
from draftcore_dflash.loss import Sampling
from draftcore_dflash.serving import config_fields
from draftcore_domino.config import DominoConfig
from draftcore_domino.loss import Schedule
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from draftcore_domino.serving import head_fields
from safetensors.torch import load_file

from draftcore.contracts.algorithm import Sample, SampleId, StepContext, StepOutput

OWN = Path(__file__).parents[3] / "tests" / "goldens"
FOLDER = Path(os.environ.get("DRAFTCORE_GOLDENS", OWN))
NAMES = sorted(path.stem for path in FOLDER.glob("domino*.json")) or ["domino"]
METRICS = {
    "accuracy": "accuracy",
    "base_accuracy": "base_accuracy",
    "base_loss": "base_loss",
    "final_loss": "final_loss",
    "accept_len": "acceptance_length",
    "base_accept_len": "base_acceptance_length",
    "lambda_base": "lambda",
}


class Golden:
    """One case: its JSON, its tensors, and our objects made of them."""

    def __init__(self, name: str) -> None:
        self.data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        self.tensors = load_file(FOLDER / f"{name}.safetensors")
        bounds = {kind: float(re.search(rf"{kind} ([\de.-]+)", self.data["tolerance"])[1])  # type: ignore[index]
                  for kind in ("loss rtol", "grads rtol", "atol")}  # fmt: skip
        self.loss_rtol, self.grad_rtol, self.grad_atol = bounds.values()
        config = self.data["draft_config"]
        self.config = DominoConfig(**config_fields(config, FOLDER), **head_fields(config, FOLDER))
        given = self.data["lambda_schedule"]
        self.schedule = Schedule(given["start"], given["ratio"])
        self.share = self.schedule.base_share(StepContext(given["step"] + 1, given["total"], 0))

    def draft(self, gamma: float | None) -> DominoDraft:
        draft = DominoDraft(
            self.config,
            Sampling(self.data["num_anchors"], gamma),
            self.schedule,
            self.tensors["target.embed_tokens.weight"],
            self.tensors["target.lm_head.weight"],
        )
        weights = {name[6:]: t for name, t in self.tensors.items() if name.startswith("draft.")}
        draft.load_state_dict(weights, strict=True)
        return draft

    def run(self, draft: DominoDraft, share: float) -> StepOutput:
        count = sum(name.endswith(".input_ids") for name in self.tensors if name[:4] == "raw.")
        samples = []
        for index in range(count):
            raw = {n: self.tensors[f"raw.{index}.{n}"] for n in ("input_ids", "loss_mask")}
            hidden = self.tensors[f"raw.{index}.hidden_states"][0]
            parts = zip(self.config.layers, hidden.chunk(len(self.config.layers), -1), strict=True)
            features = {f"hidden.{layer}": part for layer, part in parts}
            identity, mask = SampleId(str(index), 1), raw["loss_mask"].bool()
            samples.append(Sample(identity, raw["input_ids"], mask, features))
        blocks = Blocks.of(self.tensors["anchors"], self.tensors["anchor_keep"].bool())
        return draft.loss(DFlash(DominoOptions()).collate(samples), blocks, share)


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def check_values(golden: Golden, output: StepOutput, expected: Mapping[str, Any]) -> None:
    loss = float((output.numerator / output.denominator).detach())
    assert loss == pytest.approx(expected["loss"], rel=golden.loss_rtol)
    for theirs, ours in METRICS.items():
        above, below = map(float, output.counts[ours])
        found = above / max(below, 1e-30)
        assert found == pytest.approx(expected[theirs], rel=golden.loss_rtol, abs=1e-7), ours
    assert float(output.counts["accuracy"][1]) == expected["accuracy_denom"]


def check_gradients(golden: Golden, draft: DominoDraft, norms: Mapping[str, float]) -> None:
    found = {name: float(p.grad.norm()) for name, p in draft.named_parameters()}  # type: ignore[union-attr]
    assert found == pytest.approx(norms, rel=golden.grad_rtol, abs=golden.grad_atol)


def test_golden_loss_metrics_and_every_gradient(golden: Golden) -> None:
    draft = golden.draft(golden.data["loss_decay_gamma"])
    output = golden.run(draft, golden.share)
    check_values(golden, output, golden.data["expected"])
    (output.numerator / output.denominator).backward()
    bounds = {"rtol": golden.grad_rtol, "atol": golden.grad_atol}
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.grad, golden.tensors[f"grad.{name}"], **bounds)
    check_gradients(golden, draft, golden.data["grad_norms"])


def test_golden_alternatives_on_the_same_inputs(golden: Golden) -> None:
    """They change gamma or lambda; memory and kernel variants change no number."""
    known = r"no_decay|lambda_.*|(eager|sdpa|flex)_backend.*|(un)?chunked.*|chunk.*"
    for name, expected in golden.data["alternatives_same_inputs_and_anchors"].items():
        gamma = None if name == "no_decay" else golden.data["loss_decay_gamma"]
        if found := re.fullmatch(r"gamma_([\d.e-]+)", name):
            gamma = float(found[1])
        else:
            assert re.fullmatch(known, name), f"unknown alternative {name}"
        draft = golden.draft(gamma)
        output = golden.run(draft, expected["lambda_base"])
        check_values(golden, output, expected)
        if expected.get("grad_norms"):
            (output.numerator / output.denominator).backward()
            check_gradients(golden, draft, expected["grad_norms"])


SCHEDULES = json.loads((OWN / "misc.json").read_text())["domino_lambda_base"]


@pytest.mark.parametrize(("case", "table"), SCHEDULES.items(), ids=SCHEDULES.keys())
def test_golden_lambda_schedule(case: str, table: list[float]) -> None:
    """Eleven steps from the first to the last, evenly spaced."""
    start, ratio, total = (float(value.split("=")[1]) for value in case.split(","))
    steps = [round(i * total / (len(table) - 1)) for i in range(len(table))]
    found = [Schedule(start, ratio).base_share(StepContext(s + 1, int(total), 0)) for s in steps]
    assert found == pytest.approx(table, abs=1e-12)
