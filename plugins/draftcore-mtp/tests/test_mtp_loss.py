"""The chain: speculators' recorded numbers, a naive one in fp64, and drafts equal to training's.

Recorded numbers are of DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`: `mtp*.json` have the layer
in several forms, under speculators' names. Its loss divides each step by its own count, ours all by that of
step 0; so sums and counts are compared, and put together as it does.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftcore_eagle3.loss import Rows
from draftcore_mtp.algorithm import Mtp
from draftcore_mtp.config import from_target
from draftcore_mtp.drafter import MtpDrafter
from draftcore_mtp.model import MtpDraft
from draftcore_mtp.options import MtpOptions
from draftcore_sdk import comparisons
from draftcore_sdk.algorithm_fixtures import (
    MakeDraft,
    MakeSamples,
    MakeTarget,
    use_exact_frequencies,
)
from draftcore_sdk.comparisons import require_naive, require_trained_drafts
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.algorithm import DraftBatch, Sample, SampleId, StepContext
from draftcore.contracts.target import TargetSpec

CONTEXT = StepContext(step=1, total_steps=1, seed=0)
LAYER = "layers.0"
Row = tuple[Tensor, list[Tensor], list[Tensor], list[Tensor], Tensor | None]


class Naive(comparisons.Naive):
    """The algorithm straight from its description: one row and one step at a time."""

    def __init__(self, module: MtpDraft) -> None:
        super().__init__(module)
        self.module, self.kind, self.options = module, module.config.kind, module.options

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.w.get(f"mtp.{name}.bias")
        return self.w[f"mtp.{name}.weight"] @ x + (0 if bias is None else bias)

    def rms(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[f"mtp.{name}.weight"] + int(self.kind.offset_norms)
        factor: Tensor = (x.pow(2).mean() + self.config.rms_norm_eps).rsqrt() * weight
        return x * factor

    def row(self, token: int, hidden: Tensor, position: int, blank: bool) -> Row:
        """The layer's input, its queries, keys and values, and the gate."""
        embedding = self.module.embed_tokens[token].to(hidden.dtype) * (not blank)
        parts = [self.rms(embedding, "pre_fc_norm_embedding")]
        parts.insert(not self.kind.hidden_first, self.rms(hidden, "pre_fc_norm_hidden"))
        x, width, gate = self.linear("fc", torch.cat(parts)), self.config.head_dim, None
        normed = self.rms(x, f"{LAYER}.input_layernorm")
        q, k, v = (self.linear(f"{LAYER}.self_attn.{n}_proj", normed) for n in "qkv")
        if self.kind.gated:
            both = q.view(-1, 2, width)
            q, gate = both[:, 0].flatten(), both[:, 1].flatten()
        heads = {"q": list(q.view(-1, width)), "k": list(k.view(-1, width))}
        for name in heads if self.config.head_norms else ():
            heads[name] = [self.rms(h, f"{LAYER}.self_attn.{name}_norm") for h in heads[name]]
        turned = {name: [self.rope(h, position) for h in hs] for name, hs in heads.items()}
        return x, turned["q"], turned["k"], list(v.view(-1, width)), gate

    def output(self, row: Row, seen: Sequence[Row]) -> Tensor:
        x, queries, _, _, gate = row
        attended = self.attention(queries, [k for _, _, k, _, _ in seen], [v for *_, v, _ in seen])
        attended = attended if gate is None else attended * gate.sigmoid()
        x = x + self.linear(f"{LAYER}.self_attn.o_proj", attended)
        x = x + self.mlp(f"{LAYER}.mlp", self.rms(x, f"{LAYER}.post_attention_layernorm"))
        return self.rms(x, "norm")

    def outputs(self, sample: Sample) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (step, row, normed output)."""
        served, n = self.options.chain == "served", len(sample.token_ids_T)
        tokens = [*sample.token_ids_T.tolist(), *[0] * (self.options.steps + 1)]
        hidden, steps = list(sample.features["last_hidden"]), list[list[Row]]()
        for k in range(self.options.steps):
            rows = [
                self.row(
                    tokens[t + 1 + k], hidden[t], t + k * served, t + k == 0 and self.kind.bias
                )
                for t in range(n)
            ]
            steps.append(rows)
            for t in range(n):
                own = [step[t] for step in steps[1:]]
                seen = [*steps[0][: t + 1], *own] if served else rows[: t + 1]
                hidden[t] = self.output(rows[t], seen)
                yield k, t, hidden[t]

    def loss(self, samples: Sequence[Sample]) -> Tensor:
        powers = [self.options.beta**k for k in range(self.options.steps)]
        above, below = torch.zeros((), dtype=torch.float64), 0
        for sample in samples:
            tokens, mask = sample.token_ids_T.tolist(), sample.loss_mask_T.tolist()
            for k, t, output in self.outputs(sample):
                if t + 2 + k < len(tokens) and mask[t + 2 + k]:
                    cross = -(self.module.head @ output).log_softmax(0)[tokens[t + 2 + k]]
                    above, below = above + powers[k] / sum(powers) * cross, below + (k == 0)
        return above / below


# Options, and what the target is if it is no Qwen3.5.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "served, Qwen3.5": ({}, {}, ""),
    "served, MiMo": ({"beta": 1.0}, {"family": "qwen2"}, "mimo"),
    "rerun, Qwen3.5": ({"chain": "rerun"}, {}, ""),
    "rerun, MiMo": ({"chain": "rerun", "steps": 2}, {"family": "qwen2"}, "mimo"),
    "one step, of no kind": ({"steps": 1}, {"family": "qwen3"}, ""),
}


@pytest.mark.parametrize(("options", "shape", "kind"), VARIANTS.values(), ids=VARIANTS.keys())
def test_loss_and_gradients_equal_a_naive_chain(
    options: Any,
    shape: Any,
    kind: str,
    make_target: MakeTarget,
    make_draft: MakeDraft,
    make_samples: MakeSamples,
) -> None:
    target = make_target(**shape)
    target.text_config.model_type = kind or target.text_config.model_type
    draft, samples = make_draft(of=target, **options), make_samples(9, 5, 7)
    assert isinstance(draft.module, MtpDraft)
    use_exact_frequencies(draft.module)
    output = Mtp(MtpOptions()).forward_loss(draft, Mtp(MtpOptions()).collate(samples), CONTEXT)
    require_naive(draft, output, Naive(draft.module).loss(samples), rtol=1e-9)


def test_proposals_equal_training_over_ragged_rounds(
    make_draft: MakeDraft, target: TargetSpec
) -> None:
    """The row of the last state, at each step: it reads the last known token first."""
    draft = make_draft(steps=4)
    module: Any = draft.module

    def trained(sample: Sample, known: int) -> Tensor:
        batch = Mtp(MtpOptions()).collate([sample])
        every = Rows.of(torch.ones_like(batch.loss_mask_BT), 4)
        outputs = [hidden_NH[known - 2] for hidden_NH in module.unroll(batch, every)]
        logits_KV: Tensor = module.lm_head(torch.stack(outputs))
        return logits_KV

    drafter = Mtp(MtpOptions(num_drafts=4)).drafter(draft, target.load_model())
    require_trained_drafts(drafter, 250, 0.7, trained)


# ------------------------------------------------------------ recorded numbers

SPECULATORS = {
    "fc.": "input_proj.", "pre_fc_norm_embedding.": "token_layernorm.", "norm.": "final_layernorm.",
    "pre_fc_norm_hidden.": "hidden_layernorm.", "layers.0.": "",
}  # fmt: skip


class Golden(comparisons.Golden):
    """One form of the layer, with our objects made of it."""

    def __init__(self, file: Path, form: str) -> None:
        self.data = json.loads(file.read_text(encoding="utf-8"))["cases"][form]
        self.form, self.tensors = form, load_file(file.with_suffix(".safetensors"))
        self.loss_rtol = 1e-5
        layer = self.data["layer_config"]
        self.target: Any = SimpleNamespace(
            text_config=SimpleNamespace(**layer), vocab_size=layer["vocab_size"], num_layers=1
        )

    def draft(self, steps: int = 3) -> MtpDraft:
        options = MtpOptions(chain="rerun", steps=steps)
        given = (self.tensors[f"target.{name}.weight"] for name in ("embed_tokens", "lm_head"))
        module = MtpDraft(from_target(self.target, new=True), options, *given)
        with torch.no_grad():
            for name, parameter in module.mtp.named_parameters():
                parameter.copy_(self.tensors[f"{self.form}.draft.{theirs(name)}"])
        return module

    def batch(self, which: Sequence[int]) -> DraftBatch:
        """Put the rows of some samples together."""
        samples = []
        for i in which:
            tokens_T, mask_T, hidden_TH = (
                self.tensors[f"raw.{i}.{name}"]
                for name in ("input_ids", "loss_mask", "target_last_hidden_states")
            )
            identity, features = SampleId(str(i), 1), {"last_hidden": hidden_TH}
            samples.append(Sample(identity, tokens_T, mask_T.bool(), features))
        return Mtp(MtpOptions()).collate(samples)

    def check_case(self, case: Mapping[str, Any], which: Sequence[int]) -> MtpDraft:
        """Compare each step's sum, count and hits, the loss of these, and every gradient's norm."""
        steps = case["num_speculative_steps"]
        draft, batch, loss = self.draft(steps=steps), self.batch(which), torch.zeros(())
        weights, rows = case["step_weights"] or [1.0] * steps, Rows.of(batch.loss_mask_BT, steps)
        hidden_KMH, there_KM = draft.outputs(batch, rows)
        label_M = batch.token_ids_BT.flatten()[(rows.supervised_M + 2).clamp_max(68)]
        counts = draft.loss(batch).counts
        for k, terms in enumerate(case["terms_per_step"]):
            cross_M = torch.nn.functional.cross_entropy(
                draft.lm_head(hidden_KMH[k]), label_M, reduction="none"
            )
            self.check(float(counts[f"loss_{k}"][0]), terms["num"])
            assert float(counts[f"loss_{k}"][1]) == terms["den"]
            assert float(counts[f"accuracy_{k}"][0]) == terms["correct"]
            loss = loss + weights[k] * (cross_M * there_KM[k]).sum() / terms["den"]
        self.check(float(loss.detach()), case["loss"])
        loss.backward()  # type: ignore[no-untyped-call]
        norms = {
            n: float(p.grad.norm()) for n, p in draft.mtp.named_parameters() if p.grad is not None
        }
        named = {theirs(name): norm for name, norm in norms.items()}
        assert named == pytest.approx(case["grad_norms"], rel=1e-4)
        return draft


def theirs(name: str) -> str:
    ours = next(ours for ours in SPECULATORS if name.startswith(ours))
    return f"mtp_layers.0.{SPECULATORS[ours]}{name.removeprefix(ours)}"


OWN = Path(__file__).parents[3] / "tests" / "goldens"
FORMS = [
    pytest.param(file, form, id=f"{file.stem} {form}")
    for file in comparisons.cases(OWN, "mtp")
    for form in json.loads(file.read_text(encoding="utf-8"))["cases"]
]


@pytest.mark.parametrize(("file", "form"), FORMS)
def test_golden_sums_losses_outputs_and_gradients(file: Path, form: str) -> None:
    """But for speculators' truncation of a sample that is not padded, which is not ours."""
    golden = Golden(file, form)
    draft = golden.check_case(golden.data["expected"], range(3))
    for name, parameter in draft.mtp.named_parameters():
        recorded, found = golden.tensors[f"{form}.grad.{theirs(name)}"], parameter.grad
        assert found is not None
        assert float((found - recorded).norm() / recorded.norm()) < 1e-4, name
    outputs = draft.rerun(golden.batch(range(3)))
    for k, hidden_NH in enumerate(outputs):
        recorded = golden.tensors[f"{form}.expected.step_{k}.output"]
        ours = hidden_NH.view(3, -1, 48)
        for row, length in enumerate((23, 17, 12)):  # the rest is padding, or reads some
            rows = slice(length - 2 - k)
            torch.testing.assert_close(ours[row, rows], recorded[row, rows], rtol=0, atol=2e-5)
    for name, case in golden.data["alternatives_same_inputs"].items():
        if "truncated" not in name:
            one = re.fullmatch(r"sample_(\d)_alone_padded", name)
            golden.check_case(case, [int(one[1])] if one else range(3))


@pytest.mark.parametrize(("file", "form"), FORMS)
def test_golden_drafts_of_the_serving_form(file: Path, form: str) -> None:
    golden = Golden(file, form)
    drafter, tensors = MtpDrafter(golden.draft(), 3, "float32"), golden.tensors
    read_B = tensors[f"{form}.decode.row"] + 1
    tokens_BT = tensors["batch.input_ids"]
    state = drafter.allocate(3, 30)
    features = {"last_hidden": tensors["batch.target_last_hidden_states"]}
    drafter.prefill(state, tokens_BT, read_B, features, tokens_BT[torch.arange(3), read_B])
    drafts_BK = drafter.propose(state).tokens_BK
    assert torch.equal(drafts_BK, tensors[f"{form}.decode.greedy_tokens"])
