"""The reference implementation's numbers, met case by case.

The folder is DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`; every `eagle3*.json` there
is run, with shapes and options as its JSON says. The reference divides by all rows of a batch,
padding included; ours by real rows, so the tests divide our numerator by the reference's count.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_eagle3 import plugin
from draftcore_eagle3.loss import Objective, Rows, simulated_acceptance_length
from draftcore_eagle3.model import Eagle3Draft
from draftcore_eagle3.options import Eagle3Options
from draftcore_eagle3.serving import parse_config
from draftcore_eagle3.vocabulary import select_tokens, to_ids, to_offsets
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.algorithm import DraftBatch, Sample, SampleId, StepContext, StepOutput

OWN = Path(__file__).parents[3] / "tests" / "goldens"
FOLDER = Path(os.environ.get("DRAFTCORE_GOLDENS", OWN))
CONTEXT = StepContext(step=0, total_steps=1, seed=0)
NAMES = sorted(path.stem for path in FOLDER.glob("eagle3*.json")) or ["eagle3"]


class Golden:
    """One case: its JSON, its tensors, and our objects made of them."""

    def __init__(self, name: str) -> None:
        self.data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        self.tensors = load_file(FOLDER / f"{name}.safetensors")
        self.num_rows = self.tensors["batch.input_ids"].numel()
        bounds = {kind: float(re.search(rf"{kind} ([\de.-]+)", self.data["tolerance"])[1])  # type: ignore[index]
                  for kind in ("loss rtol", "grads rtol", "atol")}  # fmt: skip
        self.loss_rtol, self.grad_rtol, self.grad_atol = bounds.values()

    def draft(self, **changes: Any) -> Eagle3Draft:
        config = parse_config(self.data["draft_config"], FOLDER, num_target_layers=32)
        config = dataclasses.replace(config, layers=(0, 1, 2))
        objective = Objective(
            ttt_length=self.data["ttt_length"], step_decay=self.data["ploss_decay"]
        )
        d2t = self.tensors.get("draft.d2t")
        draft = Eagle3Draft(
            config,
            dataclasses.replace(objective, **changes),
            self.tensors["draft.embed_tokens.weight"],
            self.tensors["target.lm_head.weight"],
            None if d2t is None or config.full_vocabulary else to_ids(d2t),
        )
        draft.load_state_dict(
            {n: self.tensors[f"draft.{n}"] for n in draft.state_dict()}, strict=True
        )
        return draft

    def samples(self) -> list[Sample]:
        count = sum(name.endswith(".input_ids") for name in self.tensors if name[:4] == "raw.")
        return [self.sample(index) for index in range(count)]

    def sample(self, index: int) -> Sample:
        raw = {n: self.tensors[f"raw.{index}.{n}"] for n in ("input_ids", "loss_mask")}
        aux = self.tensors[f"raw.{index}.aux_hidden_state"][0].chunk(3, -1)
        features = {f"hidden.{layer}": part for layer, part in enumerate(aux)}
        features["last_hidden"] = self.tensors[f"raw.{index}.hidden_state"][0]
        return Sample(SampleId(str(index), 0), raw["input_ids"], raw["loss_mask"].bool(), features)

    def batch(self) -> DraftBatch:
        return plugin.collate(self.samples(), Eagle3Options())


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def ratios(output: StepOutput) -> dict[str, float]:
    return {n: float(a) / max(1.0, float(b)) for n, (a, b) in output.counts.items()}


def check_gradients(golden: Golden, draft: Eagle3Draft, norms: Mapping[str, float]) -> None:
    assert set(norms) == {name for name, _ in draft.named_parameters()}
    for name, parameter in draft.named_parameters():
        found = float(parameter.grad.norm())  # type: ignore[union-attr]
        assert found == pytest.approx(norms[name], rel=golden.grad_rtol, abs=golden.grad_atol), name


def test_golden_batch_is_collated_alike(golden: Golden) -> None:
    batch, tensors = golden.batch(), golden.tensors
    assert torch.equal(batch.token_ids_BT, tensors["batch.input_ids"])
    assert torch.equal(batch.loss_mask_BT, tensors["batch.loss_mask"].bool())
    assert torch.equal(batch.attention_mask_BT, tensors["batch.attention_mask"].bool())
    aux = torch.cat([batch.features[f"hidden.{layer}"] for layer in range(3)], -1)
    assert torch.equal(aux, tensors["batch.hidden_state"])


def test_golden_loss_metrics_and_every_gradient(golden: Golden) -> None:
    draft, expected = golden.draft(), golden.data["expected"]
    output = draft(golden.batch(), CONTEXT)
    loss = output.numerator / golden.num_rows
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=golden.loss_rtol)
    for step in range(golden.data["ttt_length"]):
        correct, seen = output.counts[f"accuracy_{step}"]
        assert float(correct) == expected["acc_corrects"][step]
        assert float(seen) == expected["acc_denoms"][step]
        rate = ratios(output)[f"acceptance_rate_{step}"]
        assert rate == pytest.approx(expected["acceptance_rates"][step], rel=golden.loss_rtol)
        ours = float(output.counts[f"loss_{step}"][0]) / expected["metric_loss_denoms"][step]
        assert ours == pytest.approx(expected["metric_losses"][step], rel=golden.loss_rtol)
        assert ours == pytest.approx(expected["plosses"][step], rel=golden.loss_rtol)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            golden.tensors[f"grad.{name}"],
            rtol=golden.grad_rtol,
            atol=golden.grad_atol,
        )
    check_gradients(golden, draft, golden.data["grad_norms"])


def test_golden_metrics_as_a_trainer_reduces_them(golden: Golden) -> None:
    output, reduced = (
        golden.draft()(golden.batch(), CONTEXT),
        golden.data["trainer_reduced_metrics"],
    )
    metrics, steps = ratios(output), range(golden.data["ttt_length"])
    right, seen = (sum(float(output.counts[f"accuracy_{k}"][i]) for k in steps) for i in (0, 1))
    rates = [metrics[f"acceptance_rate_{k}"] for k in steps]
    ours = {
        "loss": float(output.numerator.detach()) / golden.num_rows,
        "acc": right / max(1.0, seen),
    }
    ours |= {"acceptance_rate": sum(rates) / len(rates)}
    ours |= {f"acceptance_rate_{k}": rates[k] for k in steps}
    ours |= {f"acc_{k}": metrics[f"accuracy_{k}"] for k in steps}
    ours |= {f"ploss_{k}": float(output.counts[f"loss_{k}"][0]) / golden.num_rows for k in steps}
    assert ours == pytest.approx(reduced, rel=golden.loss_rtol)


def test_golden_evaluation_over_single_samples(golden: Golden) -> None:
    """Real rows are the reference's rows here: a single sample has no padding.

    `eval/avg_acc` is left out: in the one case at hand two different averages give its value.
    """
    draft, expected = golden.draft(), golden.data["evaluator_metrics_over_single_sample_batches"]
    outputs = [draft(plugin.collate([s], Eagle3Options()), CONTEXT) for s in golden.samples()]
    rows = [float(output.denominator) for output in outputs]
    total: dict[str, list[float]] = {}
    for output in outputs:
        for name, (above, below) in output.counts.items():
            pair = total.setdefault(name, [0.0, 0.0])
            pair[0], pair[1] = pair[0] + float(above), pair[1] + float(below)
    metrics = {name: above / max(1.0, below) for name, (above, below) in total.items()}
    steps = range(golden.data["ttt_length"])
    for k in steps:
        # The reference averages acceptance rates over batches, weighted by rows.
        shares = [n * ratios(o)[f"acceptance_rate_{k}"] for n, o in zip(rows, outputs, strict=True)]
        rate = sum(shares) / sum(rows)
        assert rate == pytest.approx(expected[f"eval/acceptance_rate_{k}"], rel=golden.loss_rtol)
        loss = metrics[f"loss_{k}"]
        assert loss == pytest.approx(expected[f"eval/ploss_{k}"], rel=golden.loss_rtol)
    accuracy = [metrics[f"accuracy_{k}"] for k in steps]
    assert accuracy == pytest.approx(expected["eval/per_position_acc"])
    loss = sum(float(output.numerator.detach()) for output in outputs) / sum(rows)
    assert loss == pytest.approx(expected["eval/avg_loss"], rel=golden.loss_rtol)
    length = simulated_acceptance_length(metrics)
    assert length - 1 == pytest.approx(expected["eval/simulated_acc_len"])


def test_golden_intermediates_of_every_step(golden: Golden) -> None:
    draft, batch = golden.draft(), golden.batch()
    rows = Rows.of(batch.loss_mask_BT, golden.data["ttt_length"])
    with torch.no_grad():
        for step, normed_NH in enumerate(draft.unroll(batch, rows)):
            found = draft.lm_head(normed_NH)
            expected = golden.tensors[f"expected.step{step}.logits"].flatten(0, 1)[rows.active_N]
            # A row that has run past its sample is padding in the reference, never supervised.
            lengths_B1 = batch.attention_mask_BT.sum(1, keepdim=True)
            times_BT = torch.arange(batch.token_ids_BT.shape[1]) + step + 1
            inside_N = (times_BT < lengths_B1).flatten()[rows.active_N]
            assert inside_N.any() or step > 0
            torch.testing.assert_close(found[inside_N], expected[inside_N], rtol=1e-4, atol=1e-5)


def test_golden_alternatives_on_the_same_inputs(golden: Golden) -> None:
    for name, expected in golden.data["alternatives_same_inputs"].items():
        draft = golden.draft(**alternative(name))
        # The LK losses mix two normalisations: have padding counted, as the reference does.
        batch = golden.batch()
        batch = dataclasses.replace(
            batch, attention_mask_BT=torch.ones_like(batch.attention_mask_BT)
        )
        output = draft(batch, CONTEXT)
        loss = output.numerator / output.denominator
        assert float(loss.detach()) == pytest.approx(expected["loss"], rel=golden.loss_rtol), name
        steps = [ratios(output)[f"loss_{k}"] for k in range(golden.data["ttt_length"])]
        assert steps == pytest.approx(expected["plosses"], rel=golden.loss_rtol), name
        if "grad_norms" in expected:
            loss.backward()
            check_gradients(golden, draft, expected["grad_norms"])


def alternative(name: str) -> dict[str, Any]:
    """What a golden's alternative changes; memory and kernel variants change no number."""
    if found := re.fullmatch(r"lk_lambda_scale([\d.e-]+)_decay([\d.e-]+)", name):
        return {"loss": "lk_lambda", "kl_scale": float(found[1]), "kl_decay": float(found[2])}
    if name == "lk_alpha":
        return {"loss": "lk_alpha"}
    assert name.startswith(("compact_teacher", "flex_attention")), f"unknown alternative {name}"
    return {}


def test_golden_accumulation_window_equals_one_batch(golden: Golden) -> None:
    whole, parts = golden.draft(), golden.draft()
    output = whole(golden.batch(), CONTEXT)
    output.numerator.backward()
    pieces = [parts(plugin.collate([s], Eagle3Options()), CONTEXT) for s in golden.samples()]
    torch.autograd.backward([piece.numerator for piece in pieces])
    assert float(output.denominator) == sum(float(piece.denominator) for piece in pieces)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(
            parts.get_parameter(name).grad,
            parameter.grad,
            rtol=golden.grad_rtol,
            atol=golden.grad_atol * golden.num_rows,
        )


def vocabulary_cases() -> dict[str, Any]:
    data = json.loads((OWN / "misc.json").read_text())
    return {name: case for name, case in data.items() if name.startswith("vocab_mapping")}


@pytest.mark.parametrize("case", vocabulary_cases().values(), ids=vocabulary_cases().keys())
def test_golden_vocabulary_mapping(case: dict[str, Any]) -> None:
    counts = {int(token): count for token, count in case["counts"].items()}
    ids: Tensor = select_tokens(counts, len(case["d2t"]), case["target_vocab"])
    assert ids.tolist() == case["kept_ids"]
    assert to_offsets(ids).tolist() == case["d2t"]
    assert to_ids(torch.tensor(case["d2t"])).tolist() == case["kept_ids"]
