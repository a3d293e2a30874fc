"""The reference implementation's numbers, met case by case.

The folder is DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`; every `domino*.json` there is
run, with shapes and options as its JSON says and the anchors that it gives. The reference divides
by the sum of weights + 1e-6, ours by the sum; the difference is far below the tolerance.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.serving import config_fields
from draftcore_domino.config import DominoConfig
from draftcore_domino.loss import base_share
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from draftcore_domino.serving import head_fields
from draftcore_sdk import algorithm_checks

from draftcore.contracts.algorithm import StepContext, StepOutput

OWN = Path(__file__).parents[3] / "tests" / "goldens"
METRICS = {
    "accuracy": "accuracy",
    "base_accuracy": "base_accuracy",
    "base_loss": "base_loss",
    "final_loss": "final_loss",
    "accept_len": "acceptance_length",
    "base_accept_len": "base_acceptance_length",
    "lambda_base": "lambda",
}


class Golden(algorithm_checks.Golden):
    """One case, with our objects made of it."""

    @property
    def share(self) -> float:
        given = self.data["lambda_schedule"]
        options = DominoOptions(lambda_start=given["start"], lambda_ratio=given["ratio"])
        return base_share(options, StepContext(given["step"] + 1, given["total"], 0))

    def draft(self, gamma: float | None) -> DominoDraft:
        data = self.data["draft_config"]
        draft = DominoDraft(
            DominoConfig(**config_fields(data, self.folder), **head_fields(data, self.folder)),
            DominoOptions(num_anchors=self.data["num_anchors"], loss_decay_gamma=gamma),
            self.tensors["target.embed_tokens.weight"],
            self.tensors["target.lm_head.weight"],
        )
        self.fill(draft)
        return draft

    def run(self, draft: DominoDraft, share: float) -> StepOutput:
        blocks = Blocks.of(self.tensors["anchors"], self.tensors["anchor_keep"].bool())
        batch = DFlash(DominoOptions()).collate(self.samples(draft.config.layers))
        return draft.loss_of(batch, blocks, share)


@pytest.fixture(params=algorithm_checks.cases(OWN, "domino"), ids=lambda file: file.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def check_values(golden: Golden, output: StepOutput, expected: Mapping[str, Any]) -> None:
    golden.check(float((output.numerator / output.denominator).detach()), expected["loss"])
    for theirs, ours in METRICS.items():
        above, below = map(float, output.counts[ours])
        wanted = pytest.approx(expected[theirs], rel=golden.loss_rtol, abs=1e-7)
        assert above / max(below, 1e-30) == wanted, ours
    assert float(output.counts["accuracy"][1]) == expected["accuracy_denom"]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_golden_loss_metrics_and_every_gradient(golden: Golden, compiled: bool) -> None:
    draft = golden.draft(golden.data["loss_decay_gamma"])
    if compiled:
        draft.compile(dynamic=True)
    output = golden.run(draft, golden.share)
    check_values(golden, output, golden.data["expected"])
    (output.numerator / output.denominator).backward()
    golden.check_gradients(draft, golden.data["grad_norms"], "grad.")


def test_golden_alternatives_on_the_same_inputs(golden: Golden) -> None:
    """They change gamma or lambda; memory and kernel variants change no number."""
    known = r"no_decay|lambda_.*|(eager|sdpa|flex)_backend.*|(un)?chunked.*|chunk.*"
    for name, expected in golden.data["alternatives_same_inputs_and_anchors"].items():
        gamma = None if name == "no_decay" else golden.data["loss_decay_gamma"]
        if found := re.fullmatch(r"gamma_([\de.-]+)", name):
            gamma = float(found[1])
        else:
            assert re.fullmatch(known, name), f"unknown alternative {name}"
        draft = golden.draft(gamma)
        output = golden.run(draft, expected["lambda_base"])
        check_values(golden, output, expected)
        if expected.get("grad_norms"):
            (output.numerator / output.denominator).backward()
            golden.check_gradients(draft, expected["grad_norms"])


SCHEDULES = json.loads((OWN / "misc.json").read_text())["domino_lambda_base"]


@pytest.mark.parametrize(("case", "table"), SCHEDULES.items(), ids=SCHEDULES.keys())
def test_golden_lambda_schedule(case: str, table: list[float]) -> None:
    """Eleven steps from the first to the last, evenly spaced."""
    start, ratio, total = (float(value.split("=")[1]) for value in case.split(","))
    steps = [round(i * total / (len(table) - 1)) for i in range(len(table))]
    options = DominoOptions(lambda_start=start, lambda_ratio=ratio)
    found = [base_share(options, StepContext(s + 1, int(total), 0)) for s in steps]
    assert found == pytest.approx(table, abs=1e-12)
