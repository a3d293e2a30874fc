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
from draftcore_dflash import plugin
from draftcore_dflash.attention import Sight
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.config import SLIDING, DraftConfig
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
        return Sample(SampleId(str(index), 0), raw["input_ids"], raw["loss_mask"].bool(), features)

    def batch(self) -> DraftBatch:
        return plugin.collate(self.samples(), DFlashOptions())

    def blocks(self, prefix: str = "") -> Blocks:
        return Blocks.of(
            self.tensors[f"{prefix}anchors"], self.tensors[f"{prefix}anchor_keep"].bool()
        )


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def ratio(output: StepOutput, name: str) -> float:
    above, below = output.counts[name]
    return float(above) / max(1.0, float(below))


def check_gradients(golden: Golden, draft: DFlashDraft, norms: Mapping[str, float]) -> None:
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
    draft, expected = golden.draft(), golden.data["expected"]
    output = draft.loss(golden.batch(), golden.blocks())
    loss = output.numerator / output.denominator
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=golden.loss_rtol)
    terms = [float(output.numerator.detach()), float(output.denominator)]
    assert terms == pytest.approx(expected["loss_terms"], rel=golden.loss_rtol)
    hits = expected["ratio_metrics"]["acc"]
    assert tuple(map(float, output.counts["accuracy"])) == (hits["num"], hits["den"])
    assert ratio(output, "accuracy") == pytest.approx(expected["accuracy"])
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            golden.tensors[f"grad.{name}"],
            rtol=golden.grad_rtol,
            atol=golden.grad_atol,
        )
    check_gradients(golden, draft, golden.data["grad_norms"])


def test_golden_block_inputs_and_states(golden: Golden) -> None:
    draft, batch, blocks = golden.draft(), golden.batch(), golden.blocks()
    size, length = golden.config.block_size, batch.token_ids_BT.shape[1]

    def kept(name: str) -> torch.Tensor:
        return golden.tensors[name].unflatten(1, (-1, size)).flatten(0, 1)[blocks.slot_M]

    positions = golden.tensors["expected.position_ids"][:, length:].unflatten(1, (-1, size))
    assert torch.equal(blocks.positions(size), positions.flatten(0, 1)[blocks.slot_M])
    first_M = batch.token_ids_BT[blocks.sample_M, blocks.anchor_M]
    embedded = draft.embed(draft.masked_block(first_M))
    assert torch.equal(embedded, kept("expected.noise_embedding"))
    with torch.no_grad():
        hidden = draft.block_hidden(batch, blocks)
    bounds = {"rtol": golden.grad_rtol, "atol": 1e-5}
    torch.testing.assert_close(hidden, kept("expected.block_hidden"), **bounds)
    torch.testing.assert_close(hidden @ draft.head.T, kept("expected.block_logits"), **bounds)


def test_golden_attention_masks(golden: Golden) -> None:
    batch, blocks, config = golden.batch(), golden.blocks(), golden.config
    (rows, length), size = batch.token_ids_BT.shape, config.block_size
    for kind in set(config.layer_types):
        mask = golden.tensors[f"expected.attention_mask.{kind}"][:, 0].bool()
        mask = mask.unflatten(1, (-1, size)).flatten(0, 1)[blocks.slot_M]
        sight = Sight.of(
            blocks, (rows, length), size,
            window=config.sliding_window if kind == SLIDING else None,
            causal=config.causal(kind), dtype=torch.float32,
        )  # fmt: skip
        context = sight.bias_B1QT[:, 0].unflatten(1, (-1, size)).flatten(0, 1)[blocks.slot_M]
        assert torch.equal(context == 0, mask[..., :length])
        own = torch.ones(size, size, dtype=torch.bool)
        own = own.tril() if sight.causal else own
        expected = torch.zeros_like(mask[..., length:])
        for block, slot in enumerate((blocks.slot_M % blocks.per_sample).tolist()):
            expected[block, :, slot * size : (slot + 1) * size] = own
        assert torch.equal(mask[..., length:], expected)


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
        assert ratio(output, "accuracy") == pytest.approx(expected["accuracy"]), name
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
        draft.loss(plugin.collate([sample], DFlashOptions()), golden.blocks(f"window.{index}."))
        for index, sample in enumerate(golden.samples())
    ]
    numerator = torch.stack([output.numerator for output in outputs]).sum()
    denominator = torch.stack([output.denominator for output in outputs]).sum()
    (numerator / denominator).backward()
    (window,) = (
        value for name, value in golden.data.items() if name.startswith("accumulation_window")
    )
    metrics = window["trainer_metrics"]
    loss = float((numerator / denominator).detach())
    assert loss == pytest.approx(metrics["loss"], rel=golden.loss_rtol)
    hits, seen = (sum(float(o.counts["accuracy"][i]) for o in outputs) for i in (0, 1))
    assert hits / seen == pytest.approx(metrics["acc"])
    check_gradients(golden, draft, window["grad_norms_after_global_normalization"])
    for name, gradient in golden.tensors.items():
        if name.startswith("window.grad."):
            torch.testing.assert_close(
                draft.get_parameter(name.removeprefix("window.grad.")).grad,
                gradient,
                rtol=golden.grad_rtol,
                atol=golden.grad_atol,
            )
