"""The chain: speculators' recorded numbers, a naive one in fp64, and drafts equal to training's.

Recorded numbers are of DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`: `mtp.json` has the layer in
two forms, under speculators' names. Its loss divides each step by its own count, ours all by that of step 0;
so numerators and counts are compared, and the quotients put together as it does.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftcore_eagle3.loss import Rows
from draftcore_mtp.algorithm import Mtp
from draftcore_mtp.config import MtpConfig, from_target
from draftcore_mtp.model import MtpDraft
from draftcore_mtp.options import MtpOptions
from draftcore_nn.target import rope_of
from draftcore_sdk import comparisons
from draftcore_sdk.algorithm_fixtures import MakeDraft, MakeSamples, use_exact_frequencies
from draftcore_sdk.comparisons import Heads, require_naive, require_trained_drafts
from safetensors.torch import load_file
from torch import Tensor, nn

from draftcore.contracts.algorithm import Draft, Sample, SampleId, StepContext, StepOutput
from draftcore.contracts.target import TargetSpec

CONTEXT = StepContext(step=1, total_steps=1, seed=0)
SPECULATORS = {
    "fc": "input_proj", "pre_fc_norm_embedding": "token_layernorm", "norm": "final_layernorm",
    "pre_fc_norm_hidden": "hidden_layernorm",
}  # fmt: skip


class Golden(comparisons.Golden):
    """One form of the layer, with our objects made of it."""

    def __init__(self, file: Path, form: str) -> None:
        self.data = comparisons.json.loads(file.read_text())["cases"][form]
        self.tensors, self.form = load_file(file.with_suffix(".safetensors")), form
        self.loss_rtol, self.grad_rtol, self.grad_atol = 1e-5, 1e-4, 1e-6

    def draft(self, **options: Any) -> MtpDraft:
        layer = self.data["layer_config"]
        text: Any = SimpleNamespace(**layer)
        target: Any = SimpleNamespace(
            text_config=text, num_layers=layer["num_hidden_layers"], vocab_size=layer["vocab_size"]
        )
        given = (self.tensors[f"target.{name}.weight"] for name in ("embed_tokens", "lm_head"))
        module = MtpDraft(from_target(target, new=True), MtpOptions(**options), *given)
        with torch.no_grad():
            for name, parameter in module.mtp.named_parameters():
                parameter.copy_(self.tensors[f"{self.form}.draft.{self.name_of(name)}"])
        return module

    def name_of(self, name: str) -> str:
        for ours, theirs in SPECULATORS.items():
            if name.startswith(f"{ours}."):
                return f"mtp_layers.0.{theirs}.weight"
        return name.replace("layers.0.", "mtp_layers.0.")

    def batch(self, *which: int) -> Any:
        samples = []
        for i in which or range(3):
            raw = {n: self.tensors[f"raw.{i}.{n}"] for n in ("input_ids", "loss_mask")}
            features = {"last_hidden": self.tensors[f"raw.{i}.target_last_hidden_states"]}
            samples.append(
                Sample(SampleId(str(i), 1), raw["input_ids"], raw["loss_mask"].bool(), features)
            )
        return Mtp(MtpOptions()).collate(samples)


OWN = Path(__file__).parents[3] / "tests" / "goldens"
FORMS = [(f, form) for f in comparisons.cases(OWN, "mtp") for form in ("qwen3", "qwen3_5_text")]


@pytest.fixture(params=FORMS, ids=str)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(*request.param)


def test_x(golden):
    d = golden.draft(chain="rerun")
    out = d.loss(golden.batch())
    e = golden.data["expected"]
    loss = 0
    for k, t in enumerate(e["terms_per_step"]):
        n, dd = out.counts[f"loss_{k}"]
        print(
            k,
            float(n),
            t["num"],
            float(dd),
            t["den"],
            float(out.counts[f"accuracy_{k}"][0]),
            t["correct"],
        )
        loss = loss + e["step_weights"][k] * float(n) / t["den"]
    print(loss, e["loss"], float(out.numerator / out.denominator))
