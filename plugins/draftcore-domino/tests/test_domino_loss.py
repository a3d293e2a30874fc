"""The blended loss: recorded numbers, a naive head in fp64, the schedule, slices, bf16; the decoder.

The backbone's own naive reference is in draftcore-dflash's tests; here its states are given. Recorded
numbers are of DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`; every `domino*.json` there is
run, with shapes, options and anchors as its JSON says. The reference divides by the sum of weights
+ 1e-6, ours by the sum; the difference is far below the tolerance.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash.blocks import Blocks, draw_blocks
from draftcore_dflash.serving import config_fields
from draftcore_domino.algorithm import Domino
from draftcore_domino.config import DominoConfig
from draftcore_domino.loss import base_share
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from draftcore_domino.serving import head_fields
from draftcore_nn import losses
from draftcore_sdk import comparisons
from draftcore_sdk.algorithm_fixtures import MakeDraft, MakeSamples
from draftcore_sdk.comparisons import (
    check_close,
    require_naive,
    require_trained_drafts,
)
from torch import Tensor
from torch.nn import functional

from draftcore.contracts.algorithm import DraftBatch, Sample, StepContext, StepOutput
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

SEED = 11
CONTEXT = StepContext(step=4, total_steps=20, seed=SEED)  # lambda 0.7
OPTIONS = DominoOptions()


class Naive:
    """The head straight from its description: one block, one row, one gate at a time."""

    def __init__(self, module: DominoDraft) -> None:
        self.module, self.config = module, module.config
        self.w: dict[str, Tensor] = dict(module.named_parameters())

    def gru(self, tokens: Sequence[int]) -> list[Tensor]:
        """The state after each token; gates in the order r, z, n, without biases."""
        state = torch.zeros(self.config.gru_hidden_dim, dtype=torch.float64)
        states = []
        for token in tokens:
            x = self.module.embed_tokens[token].double()
            from_x = (self.w["prefix_gru.weight_ih_l0"] @ x).chunk(3)
            from_h = (self.w["prefix_gru.weight_hh_l0"] @ state).chunk(3)
            r, z = (torch.sigmoid(a + b) for a, b in zip(from_x[:2], from_h[:2], strict=True))
            n = torch.tanh(from_x[2] + r * from_h[2])
            state = (1 - z) * n + z * state
            states.append(state)
        return states

    def logits(self, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Base and final logits of a row; without a state they are the same."""
        base = self.module.head @ hidden
        if state is None:
            return base, base
        low = functional.silu(self.w["embed_proj.0.weight"] @ torch.cat([hidden, state]))
        return base, base + self.w["embed_proj.2.weight"] @ low

    def loss(self, batch: DraftBatch, blocks: Blocks, share: float, gamma: float | None) -> Tensor:
        above, below = torch.zeros((), dtype=torch.float64), 0.0
        hidden_MSH, shift = self.module.block_hidden(batch, blocks), self.config.shift_label
        for block in range(len(blocks.anchor_M)):
            row, a = int(blocks.sample_M[block]), int(blocks.anchor_M[block])
            tokens, mask = batch.token_ids_BT[row].tolist(), batch.loss_mask_BT[row].tolist()
            states = self.gru(tokens[a : a + self.config.block_size])
            for k in range(0 if shift else 1, self.config.block_size):
                at = a + k + int(shift)
                if at >= len(tokens) or not mask[at]:
                    continue
                corrected = k >= (1 if shift else 2)
                state = states[k if shift else k - 1] if corrected else None
                base, final = self.logits(hidden_MSH[block, k], state)
                crosses = [-x.log_softmax(0)[tokens[at]] for x in (base, final)]
                weight = math.exp(-(k if shift else k - 1) / (gamma or math.inf))
                above = above + weight * ((1 - share) * crosses[1] + share * crosses[0])
                below += weight
        return above / below


VARIANTS: dict[str, dict[str, Any]] = {
    "shifted": {},
    "not shifted": {"shift_label": False},
    "no decay": {"loss_decay_gamma": None, "block_size": 6},
    "sliding": {"sliding_window": 3, "shift_label": False, "num_layers": 1, "layers": (4,)},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_loss_and_gradients_in_slices_equal_a_naive_head(
    options: dict[str, Any], make_draft: MakeDraft, make_samples: MakeSamples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(losses, "LOGIT_ELEMENTS", 3 * 270)
    draft, samples = make_draft(**options), make_samples(11, 6, 9)
    module = draft.module
    assert isinstance(module, DominoDraft)
    batch = Domino(OPTIONS).collate(samples)
    output = Domino(OPTIONS).forward_loss(draft, batch, CONTEXT)
    blocks, gamma = draw_blocks(batch, 5, SEED), options.get("loss_decay_gamma", 7.0)
    theirs = Naive(module).loss(batch, blocks, share=0.7, gamma=gamma)
    require_naive(draft, output, theirs, rtol=1e-9)


# ------------------------------------------------------------ the schedule


def test_a_schedule_lasts_whole_steps_and_at_least_one_of_a_known_number() -> None:
    long, none = (
        DominoOptions(lambda_start=s, lambda_ratio=r) for s, r in ((0.8, 0.5), (1.0, 0.0))
    )
    shares = [base_share(long, StepContext(step, 9, 0)) for step in range(1, 10)]
    assert shares == pytest.approx([0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0, 0])  # int(4.5) = 4 steps
    assert [base_share(none, StepContext(step, 9, 0)) for step in (1, 2)] == [1.0, 0.0]
    with pytest.raises(UsageError, match=r"number of steps is unknown(.|\n)*train.max_steps"):
        base_share(long, StepContext(step=1, total_steps=0, seed=0))


def test_the_context_decides_what_is_trained(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    """At the start the head gets no gradient; the loss is the base loss, and later the final."""
    batch = Domino(OPTIONS).collate(make_samples(11, 9))
    for step, share, name in ((1, 1.0, "base_loss"), (16, 0.0, "final_loss")):
        draft = make_draft()
        output = Domino(OPTIONS).forward_loss(draft, batch, StepContext(step, 20, SEED))
        assert output.counts["lambda"][0] == share
        check_close(output.numerator, output.counts[name][0])
        output.numerator.backward()  # type: ignore[no-untyped-call]
        for parameter in ("embed_proj.0", "embed_proj.2"):
            gradient = draft.module.get_parameter(f"{parameter}.weight").grad
            assert gradient is not None
            assert bool(gradient.any()) is (share < 1)


# ------------------------------------------------------------ bf16


def test_bf16_compute_keeps_the_gru_in_fp32(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    module, batch = make_draft(dtype=torch.float32).module, Domino(OPTIONS).collate(make_samples(9))
    assert isinstance(module, DominoDraft)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, _ = module.read(batch.token_ids_BT)
    assert states.dtype == torch.float32


# ------------------------------------------------------------ decoding


@pytest.mark.parametrize("shift", [True, False])
def test_proposals_equal_one_teacher_forced_pass_over_ragged_rounds(
    shift: bool, make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft = make_draft(shift_label=shift)
    module: Any = draft.module

    def trained(sample: Sample, known: int) -> Tensor:
        batch = Domino(OPTIONS).collate([sample])
        blocks = Blocks.of(torch.tensor([[known - 1]]), torch.tensor([[True]]))
        hidden = module.block_hidden(batch, blocks)
        correction = module.up(module.low_rank(hidden, module.prefix_states(batch, blocks)))
        correction[:, : module.config.first_corrected_row] = 0.0
        first = module.config.first_row
        logits_KV: Tensor = (hidden @ module.head.T + correction)[0, first : first + 3]
        return logits_KV

    drafter = Domino(DominoOptions(block_size=4)).drafter(draft, target.load_model())
    assert drafter.num_drafts == 3
    require_trained_drafts(drafter, 250, 0.5, trained)


# ------------------------------------------------------------ recorded numbers

OWN = Path(__file__).parents[3] / "tests" / "goldens"
METRICS = {name: name for name in ("accuracy", "base_accuracy", "base_loss", "final_loss")}
METRICS |= {"accept_len": "acceptance_length", "base_accept_len": "base_acceptance_length"}
METRICS |= {"lambda_base": "lambda"}


class Golden(comparisons.Golden):
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
        batch = Domino(OPTIONS).collate(self.samples(draft.config.layers))
        return draft.loss_of(batch, blocks, share)


@pytest.fixture(params=comparisons.cases(OWN, "domino"), ids=lambda file: file.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def check_values(golden: Golden, output: StepOutput, expected: Mapping[str, Any]) -> None:
    golden.check(float((output.numerator / output.denominator).detach()), expected["loss"])
    for theirs, ours in METRICS.items():
        above, below = map(float, output.counts[ours])
        wanted = pytest.approx(expected[theirs], rel=golden.loss_rtol, abs=1e-7)
        assert above / max(below, 1e-30) == wanted, ours
    assert float(output.counts["accuracy"][1]) == expected["accuracy_denom"]


def test_golden_loss_metrics_and_every_gradient(golden: Golden) -> None:
    draft = golden.draft(golden.data["loss_decay_gamma"])
    output = golden.run(draft, golden.share)
    check_values(golden, output, golden.data["expected"])
    (output.numerator / output.denominator).backward()  # type: ignore[no-untyped-call]
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
            (output.numerator / output.denominator).backward()  # type: ignore[no-untyped-call]
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
