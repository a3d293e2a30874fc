"""The loss and the convolutions: a naive draft in fp64, recorded numbers, the schedule, slices.

Recorded numbers are of DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`: `dflash2*.json`, whose main
case is the loss of speculators, with a teacher and replaced labels, and whose `strict` ones are the default.
The former divides by the number of rows that count, ours by their weights: numerators are compared, that
number, and gradients as it divides.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash.blocks import Blocks, draw_blocks
from draftcore_dflash.serving import config_fields
from draftcore_dflash2.algorithm import DFlash2
from draftcore_dflash2.config import DFlash2Config
from draftcore_dflash2.convolution import reset_convolutions
from draftcore_dflash2.loss import selector_weight
from draftcore_dflash2.model import DFlash2Draft
from draftcore_dflash2.options import DFlash2Options
from draftcore_dflash2.serving import SIZES, serving_config
from draftcore_nn import losses
from draftcore_nn.served import Host, Round
from draftcore_nn.serving import write_export
from draftcore_sdk import comparisons
from draftcore_sdk.algorithm_fixtures import (
    MakeDraft,
    MakeSamples,
    use_exact_frequencies,
)
from draftcore_sdk.comparisons import require_naive
from torch import Tensor

from draftcore.contracts.algorithm import DraftBatch, Sample, SampleId, StepContext, StepOutput
from draftcore.errors import UsageError

SEED = 11
CONTEXT = StepContext(step=7, total_steps=20, seed=SEED)
OPTIONS = DFlash2Options()
SPECULATORS: dict[str, Any] = {"labels": "teacher", "missing": "replace"}

# ------------------------------------------------------------ a naive draft


class Naive(comparisons.Naive):
    """The algorithm straight from its description: one block, one row, one candidate at a time."""

    def __init__(self, module: DFlash2Draft) -> None:
        super().__init__(module)
        self.module, self.options = module, module.options

    def convolve(self, name: str, side: int, inputs: list[Tensor], x: list[Tensor]) -> list[Tensor]:
        """Convolve rows with taps that follow from the sublayer's inputs."""
        base, size = self.w[f"{name}.base_kernel"][side], self.config.conv_kernel_size
        shape, group = (2, size, -1), self.config.conv_group_size
        found = []
        for row, own in enumerate(inputs):
            delta = self.linear(f"{name}.kernel_projection", own).view(shape)[side]
            taps = base + torch.stack([d.repeat_interleave(group) for d in delta])
            parts = [taps[j] * x[row - j] for j in range(size) if j <= row]
            found.append(torch.stack(parts).sum(0))
        return found

    def heads(self, layer: str, name: str, x: Tensor, position: int) -> list[Tensor]:
        heads = list(
            self.linear(f"{layer}.self_attn.{name}_proj", x).view(-1, self.config.head_dim)
        )
        norm = f"{layer}.self_attn.{name}_norm"
        return heads if name == "v" else [self.rope(self.rms(h, norm), position) for h in heads]

    def block(self, token: int, anchor: int, features: Mapping[str, Tensor]) -> list[Tensor]:
        """Normed states of the block that starts with `token` at `anchor`, row by row."""
        size, embedding = self.config.block_size, self.module.embed_tokens.double()
        states = [embedding[t] for t in [token] + [self.config.mask_token_id] * (size - 1)]
        joined = [
            torch.cat([features[f"hidden.{n}"][j] for n in self.config.layers])
            for j in range(anchor)
        ]
        context = [self.rms(self.linear("fc", x), "hidden_norm") for x in joined]
        for index in range(len(self.config.layer_types)):
            name = f"layers.{index}"
            normed = [self.rms(x, f"{name}.input_layernorm") for x in states]
            read = self.convolve(f"{name}.attention_conv", 0, normed, normed)
            places = list(enumerate([*context, *read]))
            keys, values = ([self.heads(name, n, x, p) for p, x in places] for n in ("k", "v"))
            queries = [self.heads(name, "q", x, anchor + row) for row, x in enumerate(read)]
            attended = [
                self.linear(f"{name}.self_attn.o_proj", self.attention(query, keys, values))
                for query in queries
            ]
            attended = self.convolve(f"{name}.attention_conv", 1, normed, attended)
            states = [x + y for x, y in zip(states, attended, strict=True)]
            normed = [self.rms(x, f"{name}.post_attention_layernorm") for x in states]
            read = self.convolve(f"{name}.mlp_conv", 0, normed, normed)
            inner = [self.mlp(f"{name}.mlp", x) for x in read]
            inner = self.convolve(f"{name}.mlp_conv", 1, normed, inner)
            states = [x + y for x, y in zip(states, inner, strict=True)]
        return [self.rms(x, "norm") for x in states]

    def row(self, sample: Sample, at: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """The unary loss and the selector's, of the row that predicts the token at a place."""
        options, name = self.options, "candidate_selector"
        unary, label = self.module.head @ state, int(sample.token_ids_T[at])
        shares, entropy = torch.eye(len(unary), dtype=torch.float64)[label], 0.0
        if options.labels == "teacher":
            logits = self.module.head.double() @ sample.features["last_hidden"][at - 1]
            scale, cap = self.module.target_logits
            logits = cap * torch.tanh(logits * scale / cap) if cap else logits * scale
            shares, label = logits.softmax(0), int(logits.argmax())
            entropy = -float((shares * shares.log()).sum())
        loss = -(shares * unary.log_softmax(0)).sum() - entropy
        best = unary.argsort(descending=True)[: self.config.selector_top_k].tolist()
        if label not in best:
            if options.missing == "skip":
                return loss, torch.zeros(())
            best[-1] = label
        if options.stop_gradient:
            unary, state = unary.detach(), state.detach()
        query = self.w[f"{name}.predecessor_codebook"][sample.token_ids_T[at - 1]]
        query = query * self.linear(f"{name}.hidden_projection", state)
        scores = [unary[c] + query @ self.w[f"{name}.successor_codebook"][c] for c in best]
        return loss, -torch.stack(scores).log_softmax(0)[best.index(label)]

    def loss(self, samples: Sequence[Sample], batch: DraftBatch, alpha: float) -> Tensor:
        above, below = torch.zeros((), dtype=torch.float64), 0.0
        blocks = draw_blocks(batch, self.options.num_anchors, SEED)
        for number, anchor in zip(blocks.sample_M.tolist(), blocks.anchor_M.tolist(), strict=True):
            sample = samples[number]
            states = self.block(int(sample.token_ids_T[anchor]), anchor, sample.features)
            for k in range(1, self.config.block_size):
                at = anchor + k
                if at < len(sample.token_ids_T) and sample.loss_mask_T[at]:
                    weight = math.exp(-(k - 1) / (self.options.loss_decay_gamma or math.inf))
                    unary, selector = self.row(sample, at, states[k])
                    above = above + weight * (unary + alpha * selector)
                    below += weight
        return above / below


VARIANTS: dict[str, dict[str, Any]] = {
    "data's labels, strict": {"selector_top_k": 90},
    "a teacher, replaced labels": {**SPECULATORS, "selector_loss_alpha": 0.3},
    "data's labels, replaced": {"missing": "replace", "conv_kernel_size": 4, "num_layers": 1},
    "a teacher, strict, stopped": {
        "labels": "teacher",
        "stop_gradient": True,
        "selector_top_k": 90,
    },
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_loss_and_gradients_in_slices_equal_a_naive_draft(
    options: dict[str, Any], make_draft: MakeDraft, make_samples: MakeSamples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(losses, "LOGIT_ELEMENTS", 3 * 270)
    draft, samples = make_draft(loss_decay_gamma=None, layers=(1, 3), **options), make_samples(9, 6)
    module: Any = draft.module
    module.target_logits = (0.7, 5.0)
    use_exact_frequencies(module)
    batch = DFlash2(OPTIONS).collate(samples)
    output = DFlash2(OPTIONS).forward_loss(draft, batch, CONTEXT)
    theirs = Naive(module).loss(samples, batch, module.options.selector_loss_alpha)
    require_naive(draft, output, theirs, rtol=1e-9)


# ------------------------------------------------------------ the schedule


def test_the_selector_waits_and_rises_over_a_share_of_a_known_number_of_steps() -> None:
    slow, none = (DFlash2Options(selector_warmup=w, selector_loss_alpha=0.5) for w in (0.2, 0.0))
    found = [selector_weight(slow, StepContext(step, 10, 0)) for step in range(1, 8)]
    assert found == pytest.approx([0, 0, 0, 0.25, 0.5, 0.5, 0.5])
    assert selector_weight(none, StepContext(1, 0, 0)) == 0.5
    with pytest.raises(UsageError, match=r"number of steps is unknown(.|\n)*train.max_steps"):
        selector_weight(OPTIONS, StepContext(1, 0, 0))


# ------------------------------------------------------------ recorded numbers

OWN = Path(__file__).parents[3] / "tests" / "goldens"


class Golden(comparisons.Golden):
    """One case of speculators' layout, with our objects made of it."""

    @property
    def config(self) -> DFlash2Config:
        data = self.data["draft_config"]
        layers = [layer - 1 for layer in data["aux_hidden_state_layer_ids"]]
        nested = {"target_layer_ids": layers, "mask_token_id": data["mask_token_id"]}
        plain = {**data["transformer_layer_config"], "block_size": data["block_size"]}
        plain |= {"num_target_layers": max(layers) + 2, "dflash_config": nested}
        sizes = {name: data[name] for name in SIZES}
        return DFlash2Config(**config_fields(plain, self.folder), **sizes)

    def draft(self, **options: Any) -> DFlash2Draft:
        gamma = {"loss_decay_gamma": self.data["expected"]["gamma"]}
        tables = (self.tensors[f"target.{n}.weight"] for n in ("embed_tokens", "lm_head"))
        draft = DFlash2Draft(self.config, DFlash2Options(**{**gamma, **options}), *tables)
        self.fill(draft)
        return draft

    def sample(self, index: int) -> Sample:
        names = ("input_ids", "loss_mask", "hidden_states", "target_last_hidden_states")
        ids, mask, states, last = (self.tensors[f"raw.{index}.{name}"] for name in names)
        parts = zip(self.config.layers, states.chunk(len(self.config.layers), -1), strict=True)
        features = {f"hidden.{layer}": part for layer, part in parts} | {"last_hidden": last}
        return Sample(SampleId(str(index), 1), ids, mask.bool(), features)

    def blocks(self) -> Blocks:
        return Blocks.of(self.tensors["anchors"], self.tensors["anchor_keep"])

    def batch(self) -> DraftBatch:
        return DFlash2(OPTIONS).collate(
            [self.sample(i) for i in range(len(self.tensors["anchors"]))]
        )

    def run(self, draft: DFlash2Draft, alpha: float) -> StepOutput:
        return draft.loss_of(self.batch(), self.blocks(), alpha)


@pytest.fixture(params=comparisons.cases(OWN, "dflash2"), ids=lambda file: file.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def sums(output: StepOutput) -> dict[str, tuple[float, float]]:
    return {name: (float(above), float(below)) for name, (above, below) in output.counts.items()}


def check_case(golden: Golden, draft: DFlash2Draft, expected: Mapping[str, Any], name: str) -> None:
    """Compare numerators, the rows that count, metrics and gradients."""
    output, terms = golden.run(draft, expected["selector_loss_alpha"]), expected["terms"]
    found = sums(output)
    golden.check(found["unary_loss"][0], terms["kl_div"]["num"], name)
    golden.check(found["selector_loss"][0], terms["selector"]["num"], name)
    assert found["accuracy"][1] == terms["selector"]["den"] == terms["kl_div"]["den"]
    loss = output.numerator / (terms["selector"]["den"] + 1e-5)
    golden.check(float(loss.detach()), expected["loss"], name)
    metrics, top = expected["metrics"], golden.config.selector_top_k
    for ours, theirs in (
        ("unary_accuracy", "full_acc"),
        ("accuracy", "teacher_forced_selector_acc"),
        ("oracle_accuracy", f"unary_candidate_recall_at_{top}"),
        ("oracle_acceptance_length", f"unary_top_{top}_oracle_accepted_length"),
    ):
        assert found[ours][0] == metrics[f"{theirs}_sum"], f"{name}: {ours}"
    loss.backward()
    golden.check_gradients(draft, expected["grad_norms"], "grad." if name == "main" else None)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_golden_states_terms_metrics_and_every_gradient(golden: Golden, compiled: bool) -> None:
    draft, expected = golden.draft(**SPECULATORS), golden.tensors["expected.block_hidden"]
    hidden_MSH = draft.block_hidden(golden.batch(), golden.blocks())
    blocks = golden.blocks()
    shape = (*golden.tensors["anchors"].shape, *hidden_MSH.shape[1:])
    theirs = expected.view(shape).flatten(0, 1)[blocks.slot_M]
    atol = golden.data["tolerance"]["intermediate_atol"]
    torch.testing.assert_close(hidden_MSH, theirs, rtol=0, atol=atol)
    if compiled:
        draft.compile(dynamic=True)
    check_case(golden, draft, golden.data["expected"], "main")


def test_golden_alternatives_on_the_same_inputs(golden: Golden) -> None:
    """Those of options that are not ours (other unary losses, windows, first rows) are left out."""
    alternatives = golden.data["alternatives_same_inputs_and_anchors"]
    for name, gamma in (
        ("gamma=7", 7.0), ("no_decay(gamma=1e9)", None), ("selector_loss_alpha=0.0", 4.0),
        ("selector_loss_alpha=0.3", 4.0), ("identity_convolutions", 4.0),
        ("zero_successor_codebook", 4.0),
    ):  # fmt: skip
        draft = golden.draft(**SPECULATORS, loss_decay_gamma=gamma)
        if name == "identity_convolutions":
            reset_convolutions(draft)
        if name == "zero_successor_codebook":
            draft.candidate_selector.successor_codebook.data.zero_()
        check_case(golden, draft, alternatives[name], name)


@pytest.mark.parametrize("stopped", [False, True])
def test_golden_strict_candidates_and_the_datas_labels(golden: Golden, stopped: bool) -> None:
    name = f"strict_top_k_data_labels(stop_gradient={stopped})"
    expected = golden.data["alternatives_same_inputs_and_anchors"][name]
    draft, terms = golden.draft(stop_gradient=stopped), expected["terms"]
    output = golden.run(draft, expected["selector_loss_alpha"])
    found = sums(output)
    golden.check(found["unary_loss"], (terms["unary_ce_num"], terms["weight_den"]))
    golden.check(found["selector_loss"], (terms["selector_ce_num"], terms["weight_den"]))
    assert found["oracle_accuracy"] == (terms["covered"], terms["supervised"])
    loss = output.numerator / output.denominator
    golden.check(float(loss.detach()), expected["loss"])
    loss.backward()  # type: ignore[no-untyped-call]
    golden.check_gradients(draft, expected["grad_norms"], None if stopped else "strict.grad.")


def test_golden_walks_of_the_drafter_and_of_the_servers_reader(
    golden: Golden, folder: Path
) -> None:
    """Greedy tokens, and along them the probabilities at 0.7, which a server would report."""
    draft = golden.draft()
    write_export(folder, "serving", serving_config(draft), dict(draft.named_parameters()))
    tables = [golden.tensors[f"target.{name}.weight"] for name in ("embed_tokens", "lm_head")]
    host = Host(99, len(tables[0]), tables[0].shape[1], {}, None, tables[0], tables[1])
    served, drafter = (
        DFlash2(OPTIONS).read_export(folder, "vllm"),
        DFlash2.decoder(draft, None, "float32"),
    )
    for index, anchors in enumerate(golden.tensors["anchors"].tolist()):
        sample = golden.sample(index)
        for slot, a in enumerate(anchors):
            token, tokens_T = sample.token_ids_T[a], sample.token_ids_T[:a]
            read = {name: x[:a] for name, x in sample.features.items()}
            state, batch = drafter.allocate(1, 40), {name: x[None] for name, x in read.items()}
            drafter.prefill(state, tokens_T[None], torch.tensor([a]), batch, token[None])
            recorded = {
                name: golden.tensors[f"decode.{name}"][index, slot]
                for name in ("greedy_tokens", "candidate_ids", "q_on_greedy_path_T0.7")
            }
            greedy_K, ids_KC, theirs_KC = recorded.values()
            assert drafter.propose(state).tokens_BK[0].tolist() == greedy_K.tolist()
            hidden = tuple(read[f"hidden.{layer}"] for layer in golden.config.layers)
            at = Round(host, tokens_T, int(token), hidden, read["last_hidden"])
            probs_KV = (served.logits(at, greedy_K[:-1]) / 0.7).softmax(-1)
            torch.testing.assert_close(probs_KV.gather(1, ids_KC), theirs_KC, rtol=1e-4, atol=1e-5)
            assert float(probs_KV.gather(1, ids_KC).sum(-1).min()) > 1 - 1e-5
