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
from draftcore_dflash import plugin as dflash
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.loss import Sampling
from draftcore_dflash.serving import config_fields
from draftcore_domino.config import DominoConfig
from draftcore_domino.loss import Schedule
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from draftcore_domino.serving import head_fields
from safetensors.torch import load_file

from draftcore.contracts.algorithm import DraftBatch, Sample, SampleId, StepContext, StepOutput

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
        self.context = StepContext(given["step"], given["total"], seed=0)

    def draft(self, **changes: Any) -> DominoDraft:
        gamma = changes.get("gamma", self.data["loss_decay_gamma"])
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

    def batch(self) -> DraftBatch:
        count = sum(name.endswith(".input_ids") for name in self.tensors if name[:4] == "raw.")
        samples = []
        for index in range(count):
            raw = {n: self.tensors[f"raw.{index}.{n}"] for n in ("input_ids", "loss_mask")}
            hidden = self.tensors[f"raw.{index}.hidden_states"][0]
            parts = zip(self.config.layers, hidden.chunk(len(self.config.layers), -1), strict=True)
            features = {f"hidden.{layer}": part for layer, part in parts}
            identity, mask = SampleId(str(index), 0), raw["loss_mask"].bool()
            samples.append(Sample(identity, raw["input_ids"], mask, features))
        return dflash.collate(samples, DominoOptions())

    def blocks(self) -> Blocks:
        return Blocks.of(self.tensors["anchors"], self.tensors["anchor_keep"].bool())

    def run(self, draft: DominoDraft, share: float | None = None) -> StepOutput:
        share = self.schedule.base_share(self.context) if share is None else share
        return draft.loss(self.batch(), self.blocks(), share)


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
    assert set(norms) == {name for name, _ in draft.named_parameters()}
    for name, parameter in draft.named_parameters():
        found = float(parameter.grad.norm())  # type: ignore[union-attr]
        assert found == pytest.approx(norms[name], rel=golden.grad_rtol, abs=golden.grad_atol), name


def test_golden_batch_is_collated_alike(golden: Golden) -> None:
    batch, tensors = golden.batch(), golden.tensors
    assert torch.equal(batch.token_ids_BT, tensors["batch.input_ids"])
    assert torch.equal(batch.loss_mask_BT, tensors["batch.loss_mask"].bool())
    hidden = torch.cat([batch.features[f"hidden.{layer}"] for layer in golden.config.layers], -1)
    assert torch.equal(hidden, tensors["batch.hidden_states"])


def test_golden_loss_metrics_and_every_gradient(golden: Golden) -> None:
    draft = golden.draft()
    output = golden.run(draft)
    check_values(golden, output, golden.data["expected"])
    (output.numerator / output.denominator).backward()
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            golden.tensors[f"grad.{name}"],
            rtol=golden.grad_rtol,
            atol=golden.grad_atol,
        )
    check_gradients(golden, draft, golden.data["grad_norms"])


def test_golden_base_and_final_logits(golden: Golden) -> None:
    draft, batch, blocks = golden.draft(), golden.batch(), golden.blocks()
    assert golden.config.first_corrected_row == golden.data["suffix_start"]
    with torch.no_grad():
        hidden = draft.block_hidden(batch, blocks)
        base = hidden @ draft.head.T
        correction = draft.up(draft.low_rank(hidden, draft.prefix_states(batch, blocks)))
        correction[:, : golden.config.first_corrected_row] = 0.0
    # States of rows past the end of the batch are nobody's: nothing is learned there.
    inside = blocks.positions(golden.config.block_size) < batch.token_ids_BT.shape[1]
    for name, found in (("base", base), ("final", base + correction)):
        expected = golden.tensors[f"expected.{name}_logits"].flatten(0, 1)[blocks.slot_M]
        torch.testing.assert_close(
            found[inside], expected[inside], rtol=golden.grad_rtol, atol=1e-5
        )


def test_golden_alternatives_on_the_same_inputs(golden: Golden) -> None:
    for name, expected in golden.data["alternatives_same_inputs_and_anchors"].items():
        draft = golden.draft(**alternative(name))
        output = golden.run(draft, expected["lambda_base"])
        check_values(golden, output, expected)
        if expected.get("grad_norms"):
            (output.numerator / output.denominator).backward()
            check_gradients(golden, draft, expected["grad_norms"])


def alternative(name: str) -> dict[str, Any]:
    """What a golden's alternative changes besides lambda; memory variants change no number."""
    if found := re.fullmatch(r"gamma_([\d.e-]+)", name):
        return {"gamma": float(found[1])}
    if name == "no_decay":
        return {"gamma": None}
    known = r"lambda_.*|(eager|sdpa|flex)_backend.*|(un)?chunked.*|chunk.*"
    assert re.fullmatch(known, name), f"unknown alternative {name}"
    return {}


def schedules() -> dict[str, list[float]]:
    tables: dict[str, list[float]] = json.loads((OWN / "misc.json").read_text())[
        "domino_lambda_base"
    ]
    return tables


@pytest.mark.parametrize("case", schedules())
def test_golden_lambda_schedule(case: str) -> None:
    """Eleven steps from the first to the last, evenly spaced."""
    start, ratio, total = (float(value.split("=")[1]) for value in case.split(","))
    table = schedules()[case]
    steps = [round(i * total / (len(table) - 1)) for i in range(len(table))]
    found = [Schedule(start, ratio).base_share(StepContext(s, int(total), 0)) for s in steps]
    assert found == pytest.approx(table, abs=1e-12)
