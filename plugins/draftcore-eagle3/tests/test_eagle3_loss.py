"""The training-time test against a naive one in fp64, and what is promised of odd batches."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.attention import attend
from draftcore_eagle3.model import Eagle3Draft
from draftcore_eagle3.options import Eagle3Options
from draftcore_sdk import algorithm_reference
from draftcore_sdk.algorithm_checks import check_bf16
from draftcore_sdk.algorithm_fixtures import (
    MakeDraft,
    MakeSamples,
    MakeTarget,
    accumulate,
    use_exact_frequencies,
)
from draftcore_sdk.algorithm_reference import Heads, require_attention, require_naive
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample, StepContext, StepOutput

CONTEXT = StepContext(step=1, total_steps=1, seed=0)
OPTIONS = Eagle3Options()
Logits = tuple[float, float | None]  # scale and soft cap
PLAIN: Logits = (1.0, None)


class Naive(algorithm_reference.Naive):
    """The algorithm straight from its description: one row and one step at a time."""

    def __init__(self, draft: Draft, theta: float, target_logits: Logits) -> None:
        assert isinstance(draft.module, Eagle3Draft)
        super().__init__(draft.module, theta)
        self.module, (self.scale, self.cap) = draft.module, target_logits

    def qkv(self, token: int, hidden: Tensor, position: int) -> tuple[Heads, Heads, Heads]:
        embedding = self.module.embed_tokens[token].to(hidden.dtype)
        normed = self.rms(hidden, "midlayer.hidden_norm")
        x = torch.cat([self.rms(embedding, "midlayer.input_layernorm"), normed])
        q, k, v = (
            list(self.linear(f"midlayer.self_attn.{n}_proj", x).view(-1, self.config.head_dim))
            for n in "qkv"
        )
        return [self.rope(head, position) for head in q], [self.rope(h, position) for h in k], v

    def layer(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.linear("midlayer.self_attn.o_proj", attended)
        x = self.rms(hidden, "midlayer.post_attention_layernorm")
        return hidden + self.mlp("midlayer.mlp", x)

    def start(self, sample: Sample, t: int) -> Tensor:
        parts = [sample.features[f"hidden.{layer}"][t] for layer in self.config.layers]
        if self.config.fc_norm:
            parts = [self.rms(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        return self.linear("fc", torch.cat(parts))

    def logits(self, sample: Sample, steps: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (step, row, draft logits)."""
        tokens = [*sample.token_ids_T.tolist(), *[0] * (steps + 1)]
        length = len(sample.token_ids_T)
        hidden = [self.start(sample, t) for t in range(length)]
        keys: list[list[Heads]] = [[] for _ in range(length)]
        values: list[list[Heads]] = [[] for _ in range(length)]
        for k in range(steps):
            queries = []
            for t in range(length):
                q, key, value = self.qkv(tokens[t + 1 + k], hidden[t], t + k)
                queries.append(q)
                keys[t].append(key)
                values[t].append(value)
            for t in range(length):
                seen_keys = [keys[j][0] for j in range(t + 1)] + keys[t][1:]
                seen_values = [values[j][0] for j in range(t + 1)] + values[t][1:]
                attended = self.attention(queries[t], seen_keys, seen_values)
                output = self.layer(hidden[t], attended)
                normed = self.rms(output, "norm")
                hidden[t] = normed if self.config.norm_output else output
                yield k, t, self.linear("lm_head", normed)

    def loss(self, samples: Sequence[Sample], options: Eagle3Options) -> Tensor:
        """Return the loss as `numerator / denominator`, over all samples as one batch."""
        steps, rows = options.ttt_length, sum(len(s.token_ids_T) for s in samples)
        ids = self.module.token_ids()
        ids = torch.arange(self.config.vocab_size) if ids is None else ids
        terms: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(steps)]
        for sample in samples:
            weights, length = self.weights(sample, options), len(sample.token_ids_T)
            for k, t, logits in self.logits(sample, steps):
                if t + k >= length - 1 or not weights[t + k]:
                    continue
                z = self.scale * (self.module.head @ sample.features["last_hidden"][t + k + 1])
                z = z if self.cap is None else self.cap * (z / self.cap).tanh()
                if int(z.argmax()) in ids.tolist():
                    q = logits.softmax(0)
                    cross = -(z[ids].softmax(0) * q.log()).sum()
                    terms[k].append((cross, torch.minimum(z.softmax(0)[ids], q).sum()))
        total = torch.zeros((), dtype=torch.float64)
        for k, step in enumerate(terms):
            cross, overlap = (torch.stack(column) for column in zip(*step, strict=True))
            alpha = overlap.mean()
            blend = options.kl_scale * math.exp(-options.kl_decay * float(alpha.detach()))
            value = {
                "kl": cross.sum() / rows,
                "lk_alpha": -overlap.log().mean(),
                "lk_lambda": blend * cross.sum() / rows + (1 - blend) * (1 - alpha),
            }[options.loss]
            total = total + options.step_decay**k * value
        return total

    def weights(self, sample: Sample, options: Eagle3Options) -> list[bool]:
        mask = sample.loss_mask_T.tolist()
        if options.supervise == "predicted":
            return [*mask[2:], False, False]
        return [*mask[:-1], False]


# Options of the draft, the RoPE of its target, and what the target does to its logits.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], Logits]] = {
    "plain": ({"draft_vocab_size": 24}, {}, PLAIN),
    "full vocabulary, fc_norm": ({"fc_norm": True}, {}, PLAIN),
    "norm_output, one kv head": ({"norm_output": True, "num_key_value_heads": 1}, {}, PLAIN),
    "no grouping": (
        {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12},
        {},
        PLAIN,
    ),
    "predicted": ({"supervise": "predicted", "draft_vocab_size": 24, "step_decay": 0.5}, {}, PLAIN),
    "one step": ({"ttt_length": 1}, {}, PLAIN),
    "alpha": ({"loss": "lk_alpha", "draft_vocab_size": 24}, {}, PLAIN),
    "lambda": (
        {"loss": "lk_lambda", "kl_scale": 0.7, "kl_decay": 2.0, "draft_vocab_size": 24},
        {},
        PLAIN,
    ),
    "partial RoPE": ({}, {"rope_theta": 500.0, "partial_rotary_factor": 0.5}, PLAIN),
    "scaled": ({"draft_vocab_size": 24}, {}, (0.25, None)),
    "capped": ({}, {}, (1.0, 0.5)),
    "scaled and capped, lambda": ({"loss": "lk_lambda", "draft_vocab_size": 24}, {}, (3.0, 0.7)),
}


@pytest.mark.parametrize(("options", "rope", "logits"), VARIANTS.values(), ids=VARIANTS.keys())
def test_loss_and_gradients_equal_a_naive_draft(
    options: dict[str, Any],
    rope: dict[str, Any],
    logits: Logits,
    make_target: MakeTarget,
    make_draft: MakeDraft,
    make_samples: MakeSamples,
) -> None:
    target = make_target(**({"rope_parameters": rope} if rope else {}))
    target.logit_scale, target.logit_softcap = logits
    draft = make_draft(of=target, **options)
    samples, theta = make_samples(9, 5, 7), rope.get("rope_theta", 10000.0)
    use_exact_frequencies(draft.module, theta)
    settings = Eagle3Options(**{"ttt_length": 3, **options})
    output = Eagle3(OPTIONS).forward_loss(draft, Eagle3(settings).collate(samples), CONTEXT)
    require_naive(draft, output, Naive(draft, theta, logits).loss(samples, settings), rtol=1e-10)


# ------------------------------------------------------------ batches


@pytest.mark.parametrize("loss", ["kl", "lk_alpha", "lk_lambda"])
def test_what_meets_no_supervised_row_adds_nothing(
    loss: str, make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    """Neither a batch without such rows, nor a later step, which has passed the only one."""

    def measure(steps: int, first: bool) -> tuple[Draft, StepOutput]:
        draft, (sample,) = make_draft(loss=loss, ttt_length=steps, kl_scale=0.5), make_samples(5)
        mask = torch.tensor([first, False, False, False, False])
        batch = Eagle3(OPTIONS).collate([dataclasses.replace(sample, loss_mask_T=mask)])
        return draft, Eagle3(OPTIONS).forward_loss(draft, batch, CONTEXT)

    draft, output = measure(3, first=False)
    output.numerator.backward()  # type: ignore[no-untyped-call]
    assert float(output.numerator.detach()) == 0
    assert float(output.denominator) == (5 if loss == "kl" else 0)
    assert all(p.grad is None or not p.grad.any() for p in draft.module.parameters())
    (_, one), (_, three) = measure(1, first=True), measure(3, first=True)
    assert one.numerator > 0
    torch.testing.assert_close(one.numerator, three.numerator, rtol=1e-10, atol=1e-12)


def test_a_teacher_who_knows_no_draft_token_is_finite(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    """All draft tokens' probabilities underflow: the row has no weight and must not be NaN."""
    samples = [
        dataclasses.replace(s, features={n: 1e4 * x for n, x in s.features.items()})
        for s in make_samples(9, 9)
    ]
    batch = Eagle3(OPTIONS).collate(samples)
    output, gradients = accumulate(
        Eagle3(OPTIONS), make_draft(draft_vocab_size=24), [batch], CONTEXT
    )
    assert output.numerator.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_bf16_compute_keeps_the_loss_in_fp32(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    draft = make_draft(dtype=torch.float32, draft_vocab_size=24)
    check_bf16(Eagle3(OPTIONS), draft, Eagle3(OPTIONS).collate(make_samples(30, 20)), CONTEXT)


@pytest.mark.parametrize("supervise", ["reference", "predicted"])
def test_a_sample_too_short_to_predict_anything_is_no_error(
    supervise: str, make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    for length in (1, 2):
        batch = Eagle3(Eagle3Options(supervise=supervise)).collate(make_samples(length))
        assert Eagle3(OPTIONS).forward_loss(make_draft(), batch, CONTEXT).numerator.isfinite()


# ------------------------------------------------------------ the fused attention


def plain_attention(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """The same as one softmax over a score matrix."""
    query, key, value, extra_key, extra_value = tensors
    length, share = key.shape[2], query.shape[1] // extra_key.shape[1]
    sample, time = rows // length, rows % length
    scores = torch.einsum("nad,natd->nat", query, key[sample])
    hidden = torch.arange(length, device=rows.device) > time[:, None, None]
    own_keys, own_values = (x.repeat_interleave(share, 1) for x in (extra_key, extra_value))
    own = torch.einsum("nad,naxd->nax", query, own_keys)
    scores = torch.cat([scores.masked_fill(hidden, -math.inf), own], -1) * query.shape[-1] ** -0.5
    values = torch.cat([value[sample], own_values], 2)
    return torch.einsum("nas,nasd->nad", scores.softmax(-1), values)


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float64, 1e-12),
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 0.05),
        pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 0.05, marks=pytest.mark.gpu),
    ],
)
def test_fused_attention_equals_one_softmax(
    device: str, dtype: torch.dtype, tolerance: float
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    batch, heads, groups, length, width, extra = 2, 4, 2, 33, 16, 3
    rows = torch.tensor([t for t in range(batch * length) if t % 5], device=device)
    shapes = [(len(rows), heads, width), *[(batch, heads, length, width)] * 2]
    shapes += [(len(rows), groups, extra, width)] * 2
    made = [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]
    require_attention(
        [tensor.requires_grad_() for tensor in made],
        lambda t: attend(t[0], t[1], t[2], t[3], t[4], rows),
        lambda tensors: plain_attention(tensors, rows),
        tolerance,
    )
