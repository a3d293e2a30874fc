"""The block loss: the reference implementation's numbers, a naive one in fp64, odd batches, attention.

Recorded numbers are of DRAFTCORE_GOLDENS, or the project's own `tests/goldens/`; every `dflash*.json`
there is run, with shapes and options as its JSON says and the anchors that it gives.
"""

import dataclasses
import functools
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.attention import AttentionMask, Tiles, attend
from draftcore_dflash.blocks import Blocks, draw_anchors
from draftcore_dflash.config import DraftConfig
from draftcore_dflash.model import DFlashDraft
from draftcore_dflash.options import DFlashOptions
from draftcore_dflash.serving import config_fields
from draftcore_sdk import comparisons
from draftcore_sdk.algorithm_fixtures import (
    MakeDraft,
    MakeSamples,
    MakeTarget,
    accumulate,
    use_exact_frequencies,
)
from draftcore_sdk.comparisons import Heads, require_attention, require_naive, require_same_update
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from draftcore.contracts.algorithm import DraftBatch, Sample, SampleId, StepContext, StepOutput

SEED = 11
CONTEXT = StepContext(step=1, total_steps=1, seed=SEED)
OPTIONS = DFlashOptions()


def anchors_of(sample: Sample, count: int) -> Tensor:
    """The anchors that a run of seed SEED draws for a sample."""
    mask = sample.loss_mask_T
    eligible = torch.tensor([t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]])
    return draw_anchors(eligible.long(), count, SEED, sample.id)


# ------------------------------------------------------------ a naive draft


class Naive(comparisons.Naive):
    """The algorithm straight from its description: one block, one row, one head at a time."""

    def __init__(self, module: DFlashDraft, theta: float = 10000.0) -> None:
        super().__init__(module, theta)
        self.embedding = module.embed_tokens.double()
        head = module.target_head
        self.head = self.embedding if head is None else head.double()
        self.target_logits = module.target_logits

    def heads(self, layer: int, name: str, x: Tensor, position: int) -> Heads:
        projected = self.linear(f"layers.{layer}.self_attn.{name}_proj", x)
        heads = list(projected.view(-1, self.config.head_dim))
        if name == "v":
            return heads
        norm = f"layers.{layer}.self_attn.{name}_norm"
        return [self.rope(self.rms(head, norm), position) for head in heads]

    def context(self, features: Mapping[str, Tensor], position: int) -> Tensor:
        parts = [features[f"hidden.{layer}"][position] for layer in self.config.layers]
        return self.rms(self.linear("fc", torch.cat(parts)), "hidden_norm")

    def sees(self, kind: str, query: int, key: int, anchor: int) -> bool:
        """Whether the row at position `query` of the block at `anchor` sees the key at `key`."""
        sliding, causal = kind == "sliding_attention", self.config.is_causal
        if key >= anchor:
            return key <= query if (sliding if causal is None else causal) else True
        return not sliding or key >= query - ((self.config.sliding_window or 0) - 1)

    def block(self, token: int, anchor: int, features: Mapping[str, Tensor]) -> list[Tensor]:
        """Normed states of the block that starts with `token` at `anchor`, row by row."""
        size, mask = self.config.block_size, self.config.mask_token_id
        states = [self.embedding[token] for token in [token] + [mask] * (size - 1)]
        context = [self.context(features, j) for j in range(anchor)]
        for index, kind in enumerate(self.config.layer_types):
            name = f"layers.{index}"
            normed = [self.rms(x, f"{name}.input_layernorm") for x in states]
            read = [*context, *normed]  # at positions 0, 1, ..., anchor + size - 1
            keys = [self.heads(index, "k", x, p) for p, x in enumerate(read)]
            values = [self.heads(index, "v", x, p) for p, x in enumerate(read)]
            for row in range(size):
                query = anchor + row
                seen = [p for p in range(len(read)) if self.sees(kind, query, p, anchor)]
                queries = self.heads(index, "q", normed[row], query)
                heads = self.attention(queries, [keys[p] for p in seen], [values[p] for p in seen])
                x = states[row] + self.linear(f"{name}.self_attn.o_proj", heads)
                after = self.rms(x, f"{name}.post_attention_layernorm")
                states[row] = x + self.mlp(f"{name}.mlp", after)
        return [self.rms(x, "norm") for x in states]

    def loss(self, samples: Sequence[Sample], options: DFlashOptions) -> Tensor:
        """The loss as one ratio over all blocks of all samples, with the anchors of a run."""
        above, below = torch.zeros((), dtype=torch.float64), 0.0
        for sample in samples:
            anchors = anchors_of(sample, options.num_anchors)
            blocks = [self.terms(sample, int(a), options.loss) for a in anchors]
            for terms in blocks:
                for k, (weight, cross) in self.weigh(terms, options).items():
                    above = above + weight * cross
                    decay = math.exp(-(k - 1) / (options.loss_decay_gamma or math.inf))
                    below += 0.0 if "dpace" in options.loss else decay
            below += float("dpace" in options.loss and any(blocks))
        return above / below

    def distance(self, state: Tensor, sample: Sample, at: int, loss: str) -> Tensor:
        """Cross entropy with the token at a place, or how far q is from what the target says there."""
        q = (self.head @ state).softmax(0)
        if loss == "ce" or "dpace" in loss:
            return -q[sample.token_ids_T[at]].log()
        scale, cap = self.target_logits
        logits = self.head @ sample.features["last_hidden"][at - 1] * scale
        p = (cap * torch.tanh(logits / cap) if cap else logits).softmax(0)
        kl, overlap = (p * (p / q).log()).sum(), torch.minimum(p, q).sum()
        kept = torch.exp(-3 * overlap.detach())
        return {
            "kl": kl,
            "tv": (p - q).abs().sum() / 2,
            "lk_alpha": -overlap.log(),
            "lk_lambda": kept * kl + (1 - kept) * (1 - overlap),
        }[loss]

    def terms(self, sample: Sample, anchor: int, loss: str) -> dict[int, Tensor]:
        """The loss by offset, of offsets that count."""
        states = self.block(int(sample.token_ids_T[anchor]), anchor, sample.features)
        length = len(sample.token_ids_T)
        return {
            k: self.distance(states[k], sample, anchor + k, loss)
            for k in range(1, self.config.block_size)
            if anchor + k < length and sample.loss_mask_T[anchor + k]
        }

    def weigh(
        self, terms: Mapping[int, Tensor], options: DFlashOptions
    ) -> dict[int, tuple[float, Tensor]]:
        """Pair each offset's cross entropy with its weight."""
        if "dpace" not in options.loss:
            gamma = options.loss_decay_gamma or math.inf
            return {k: (math.exp(-(k - 1) / gamma), cross) for k, cross in terms.items()}
        alpha, prefix, prefixes = options.dpace_alpha, 1.0, {}
        for k in range(1, self.config.block_size):
            if k in terms:
                prefix *= (1 - alpha) * math.exp(-float(terms[k].detach())) + alpha
            prefixes[k] = prefix
        weights = {}
        for k in terms:
            onward = sum(prefixes[j] for j in terms if j >= k)
            weights[k] = {
                "dpace": onward,
                "dpace_cumulative_confidence_only": prefixes[k],
                "dpace_continuation_value_only": onward / prefixes[k],
            }[options.loss]
        return {k: (weights[k], cross) for k, cross in terms.items()}


SLIDING = "sliding_attention"
# Options of the draft, and how its target differs.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no decay, one layer": ({"loss_decay_gamma": None, "num_layers": 1, "layers": (4,)}, {}),
    "sliding": ({"sliding_window": 3}, {}),
    "mixed, wide": ({"sliding_window": 5, "layer_types": ("full_attention", SLIDING)}, {}),
    "sliding, both directions": ({"sliding_window": 3, "is_causal": False}, {}),
    "full, causal": ({"is_causal": True}, {}),
    "one kv head, wide heads": ({"num_key_value_heads": 1, "head_dim": 12}, {}),
    "no grouping": ({"num_key_value_heads": 4, "num_layers": 3, "block_size": 6}, {}),
    "dpace": ({"loss": "dpace", "dpace_alpha": 0.3}, {}),
    "dpace, confidence": ({"loss": "dpace_cumulative_confidence_only"}, {}),
    "dpace, value": ({"loss": "dpace_continuation_value_only"}, {}),
    "kl": ({"loss": "kl"}, {}),
    "tv": ({"loss": "tv", "loss_decay_gamma": None}, {}),
    "lk_alpha": ({"loss": "lk_alpha"}, {}),
    "lk_lambda": ({"loss": "lk_lambda"}, {}),
    "tied target": ({}, {"tie_word_embeddings": True}),
    "partial RoPE": ({}, {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
}


@pytest.mark.parametrize(("options", "shape"), VARIANTS.values(), ids=VARIANTS.keys())
def test_loss_and_gradients_equal_a_naive_draft(
    options: Any,
    shape: Any,
    make_target: MakeTarget,
    make_draft: MakeDraft,
    make_samples: MakeSamples,
) -> None:
    draft = make_draft(of=(target := make_target(**shape)), **options)
    module, samples = draft.module, make_samples(11, 6, 9)
    assert isinstance(module, DFlashDraft)
    assert (module.target_head is None) is ("tie_word_embeddings" in shape)
    theta = shape.get("rope_parameters", {}).get("rope_theta", 10000.0)
    use_exact_frequencies(module, theta)
    module.target_logits = (0.5, 4.0)  # of a target that scales and caps
    settings = DFlashOptions(**{"block_size": 4, "num_anchors": 5, **options})
    distils = settings.loss in ("kl", "tv", "lk_alpha", "lk_lambda")
    assert DFlash(settings).feature_request(target).last_hidden is distils
    output = DFlash(OPTIONS).forward_loss(draft, DFlash(settings).collate(samples), CONTEXT)
    require_naive(draft, output, Naive(module, theta).loss(samples, settings), rtol=1e-9)


# ------------------------------------------------------------ anchors


def test_anchors_are_uniform_without_replacement_and_of_the_samples_own_generator() -> None:
    eligible, counts = torch.arange(3, 13), torch.zeros(16)
    for index in range(600):
        counts[draw_anchors(eligible, 4, SEED, SampleId(str(index), 1))] += 1
    assert counts.sum() == 2400
    # Each of 10 positions is drawn with probability 0.4: 240 +- 12 of 600; four deviations.
    assert torch.all((counts[3:13] - 240).abs() < 48)
    state = torch.get_rng_state()
    first = draw_anchors(torch.arange(100), 5, SEED, SampleId("a", 1))
    assert first.equal(draw_anchors(torch.arange(100), 5, SEED, SampleId("a", 1)))
    assert torch.get_rng_state().equal(state)


# ------------------------------------------------------------ batches


def test_dpace_gives_one_update_however_a_batch_is_split(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    """Also with a sample that has nothing to learn, alone or among others."""
    draft, samples = make_draft(loss="dpace"), make_samples(9, 5, 7, 3)
    nothing = torch.zeros_like(samples[0].loss_mask_T)
    samples[0] = dataclasses.replace(samples[0], loss_mask_T=nothing)
    whole = accumulate(DFlash(OPTIONS), draft, [DFlash(OPTIONS).collate(samples)], CONTEXT)
    assert float(whole[0].denominator)
    for cut in (1, 2, 3):
        parts = [DFlash(OPTIONS).collate(part) for part in (samples[:cut], samples[cut:])]
        require_same_update(accumulate(DFlash(OPTIONS), draft, parts, CONTEXT), whole)


@pytest.mark.parametrize("length", [1, 2])
def test_a_sample_too_short_for_its_block_is_no_error(
    length: int, make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    """Of two tokens to learn the first is an anchor without any context."""
    (sample,) = make_samples(length)
    sample = dataclasses.replace(sample, loss_mask_T=torch.ones(length, dtype=torch.bool))
    batches = [DFlash(OPTIONS).collate(part) for part in ([sample], make_samples(9))]
    output, gradients = accumulate(DFlash(OPTIONS), make_draft(), batches, CONTEXT)
    alone = DFlash(OPTIONS).forward_loss(make_draft(), batches[0], CONTEXT)
    assert float(alone.denominator) == length - 1
    assert output.numerator.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_metrics_count_leading_hits(make_draft: MakeDraft, make_samples: MakeSamples) -> None:
    """A draft whose labels are what it proposes hits everywhere: blocks of 4 yield 4 tokens."""
    draft, (sample,) = make_draft(num_anchors=1), make_samples(9)
    module = draft.module
    assert isinstance(module, DFlashDraft)
    sample = dataclasses.replace(sample, loss_mask_T=torch.ones(9, dtype=torch.bool))
    blocks = Blocks.of(torch.tensor([[3]]), torch.tensor([[True]]))
    with torch.no_grad():
        hidden = module.block_hidden(DFlash(OPTIONS).collate([sample]), blocks)
        proposed = (hidden @ module.head.T).argmax(-1)[0]
    sample.token_ids_T[4:7] = proposed[1:4]

    def measure() -> dict[str, tuple[float, float]]:
        output = module.loss_of(DFlash(OPTIONS).collate([sample]), blocks)
        return {name: (float(a), float(b)) for name, (a, b) in output.counts.items()}

    assert measure() == {"accuracy": (3, 3), "acceptance_length": (4, 1)}
    sample.token_ids_T[5] = (proposed[2] + 1) % 250
    assert measure() == {"accuracy": (2, 3), "acceptance_length": (2, 1)}


# ------------------------------------------------------------ the attention


def attention_inputs(dtype: torch.dtype, device: str) -> tuple[list[Tensor], Blocks]:
    torch.manual_seed(0)
    anchors = torch.tensor([[0, 5, 9, 30], [2, 0, 17, 0]])
    keep = torch.tensor([[True, True, True, True], [True, False, True, False]])
    blocks, heads, length, size, width = Blocks.of(anchors, keep), 4, 33, 5, 16
    shapes = [(6, size, heads, width)] * 3 + [(2, heads, length, width)] * 2
    tensors = [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]
    return [t.requires_grad_() for t in tensors], blocks.to(torch.device(device))


def plain_attention(
    tensors: Sequence[Tensor], blocks: Blocks, window: int | None, causal: bool
) -> Tensor:
    """The same as one softmax over a score matrix per block."""
    query, key, value, context_key, context_value = tensors
    size, width, length = query.shape[1], query.shape[-1], context_key.shape[2]
    keys = torch.cat([context_key[blocks.sample_M], key.transpose(1, 2)], 2)
    values = torch.cat([context_value[blocks.sample_M], value.transpose(1, 2)], 2)
    scores = torch.einsum("msad,macd->masc", query, keys) * width**-0.5
    positions, time = blocks.positions(size)[..., None], torch.arange(length, device=query.device)
    seen = (time < blocks.anchor_M[:, None, None]).expand(-1, size, -1)
    seen = seen if window is None else seen & (time >= positions - (window - 1))
    own = torch.ones(len(query), size, size, dtype=torch.bool, device=query.device)
    seen = torch.cat([seen, own.tril() if causal else own], 2)
    shares = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("masc,macd->msad", shares, values)


@pytest.mark.parametrize(("window", "causal"), [(None, False), (4, True)])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float64, 1e-12),
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 0.05),
        pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 0.05, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 0.01, marks=pytest.mark.gpu),
    ],
)
def test_joined_attention_equals_one_softmax(
    device: str, dtype: torch.dtype, tolerance: float, window: int | None, causal: bool
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    given, blocks = attention_inputs(dtype, device)
    mask = AttentionMask.of(blocks, (2, 33), 5, window=window, causal=causal, dtype=dtype)

    def attended(tensors: Sequence[Tensor]) -> Tensor:
        query, key, value, *context_BATD = tensors
        context_key, context_value = (x.transpose(1, 2) for x in context_BATD)
        return attend(query, (key, value), (context_key, context_value), mask)

    plain = functools.partial(plain_attention, blocks=blocks, window=window, causal=causal)
    require_attention(given, attended, plain, tolerance)


@pytest.mark.parametrize(("window", "causal"), [(None, False), (4, True)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_blocks_attend_by_flex_attention_as_by_one_softmax(
    window: int | None, causal: bool, device: str
) -> None:
    tensors, blocks = attention_inputs(torch.float32, device)
    shape, size = (2, tensors[3].shape[2]), tensors[0].shape[1]
    tiles = Tiles.of_blocks(blocks.to(torch.device("cpu")), shape, size, window)

    def attended(given: list[Tensor], blocks: Blocks, tiles: Tiles) -> Tensor:
        query, key, value, *context_BATD = given
        mask = AttentionMask.of(
            blocks, shape, size, window=window, causal=causal, dtype=query.dtype, tiles=tiles
        )
        assert isinstance(mask.seen, BlockMask)
        context_key, context_value = (x.transpose(1, 2) for x in context_BATD)
        return attend(query, (key, value), (context_key, context_value), mask)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(attended, backend=backend, dynamic=True, fullgraph=True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # "high" has products in tf32: 2e-3
    try:
        with torch.no_grad():
            found = compiled([t.detach() for t in tensors], blocks, tiles.to(torch.device(device)))
    finally:
        torch.set_float32_matmul_precision(before)
    expected = plain_attention([t.double() for t in tensors], blocks, window, causal)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_batch_as_long_as_the_model_is_wide_is_compiled() -> None:
    """Which fixes its length, that FlexAttention's rule reads."""
    (length, slots), weight = (64, 64), torch.randn(64, 64)
    anchors = torch.randint(1, length, (1, slots)).sort().values
    blocks = Blocks.of(anchors, torch.ones(1, slots, dtype=torch.bool))
    tiles = Tiles.of_blocks(blocks, (1, length), 4, None)
    own, context_BTH = torch.randn(slots, 4, 4, 16), torch.randn(1, length, 64)

    def attended(context_BTH: Tensor, own: Tensor, blocks: Blocks, tiles: Tiles) -> Tensor:
        shape = context_BTH.shape[0], context_BTH.shape[1]
        context = torch.unflatten(context_BTH @ weight, -1, (4, 16))
        known: dict[str, Any] = {"causal": False, "dtype": own.dtype, "tiles": tiles}
        mask = AttentionMask.of(blocks, shape, 4, window=None, **known)
        return attend(own, (own, own), (context, context), mask)

    with torch.no_grad():
        compiled = torch.compile(attended, dynamic=True, fullgraph=True)
        found, expected = (f(context_BTH, own, blocks, tiles) for f in (compiled, attended))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("window", "causal", "size"),
    [(None, False, 16), (40, True, 16), (300, True, 5), (None, True, 7)],
)
def test_listed_tiles_are_those_in_which_something_is_seen_and_whole_ones_hide_nothing(
    window: int | None, causal: bool, size: int
) -> None:
    samples, length, slots, tile = 2, 700, 40, 128
    chosen = [torch.randperm(length - 1)[:slots].sort().values for _ in range(samples)]
    blocks = Blocks.of(torch.stack(chosen), torch.rand(samples, slots) < 0.9)
    mask: Any = Tiles.of_blocks(blocks, (samples, length), size, window).of_rows(
        length, size, window, causal
    )
    queries = slots * size
    shape = [-(-count // tile) for count in (queries, length + queries)]
    for sample in range(samples):
        at = torch.tensor(sample), torch.tensor(0), torch.arange(queries)[:, None]
        seen = mask.mask_mod(*at, torch.arange(length + queries)[None])
        padded = torch.zeros(shape[0] * tile, shape[1] * tile, dtype=torch.bool)
        padded[:queries, : length + queries] = seen
        cells = padded.view(shape[0], tile, shape[1], tile).permute(0, 2, 1, 3).flatten(2)
        partly, whole = (
            listed(numbers[sample, 0], indices[sample, 0], shape)
            for numbers, indices in (
                (mask.kv_num_blocks, mask.kv_indices),
                (mask.full_kv_num_blocks, mask.full_kv_indices),
            )
        )
        assert not (whole & partly).any()
        assert not (whole & ~cells.all(-1)).any()
        assert not (cells.any(-1) & ~(partly | whole)).any()


def listed(numbers: Tensor, indices: Tensor, shape: list[int]) -> Tensor:
    """Turn a BlockMask's list of tiles into a table of them."""
    found = torch.zeros(shape, dtype=torch.bool)
    for row, number in enumerate(numbers.tolist()):
        found[row, indices[row, :number].long()] = True
    return found


# ------------------------------------------------------------ recorded numbers

OWN = Path(__file__).parents[3] / "tests" / "goldens"


class Golden(comparisons.Golden):
    """One case, with our objects made of it."""

    @property
    def config(self) -> DraftConfig:
        return DraftConfig(**config_fields(self.data["draft_config"], self.folder))

    def draft(self, **changes: Any) -> DFlashDraft:
        names = ("num_anchors", "loss_decay_gamma", "dpace_alpha")
        given = {name: self.data[name] for name in names if name in self.data}
        draft = DFlashDraft(
            self.config,
            DFlashOptions(**{**given, **changes}),
            self.tensors["target.embed_tokens.weight"],
            self.tensors["target.lm_head.weight"],
        )
        self.fill(draft)
        return draft

    def batch(self, *samples: Sample) -> DraftBatch:
        return DFlash(DFlashOptions()).collate(samples or self.samples(self.config.layers))

    def blocks(self, prefix: str = "") -> Blocks:
        keep_BN = self.tensors[f"{prefix}anchor_keep"].bool()
        return Blocks.of(self.tensors[f"{prefix}anchors"], keep_BN)


@pytest.fixture(params=comparisons.cases(OWN, "dflash"), ids=lambda file: file.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def check_accuracy(output: StepOutput, expected: float) -> None:
    above, below = map(float, output.counts["accuracy"])
    assert above / max(1.0, below) == pytest.approx(expected)


def test_golden_loss_metrics_and_every_gradient(golden: Golden) -> None:
    draft, expected = golden.draft(), golden.data["expected"]
    output = draft.loss_of(golden.batch(), golden.blocks())
    loss = output.numerator / output.denominator
    loss.backward()  # type: ignore[no-untyped-call]
    golden.check(float(loss.detach()), expected["loss"])
    terms = [float(output.numerator.detach()), float(output.denominator)]
    golden.check(terms, expected["loss_terms"])
    hits = expected["ratio_metrics"]["acc"]
    assert tuple(map(float, output.counts["accuracy"])) == (hits["num"], hits["den"])
    check_accuracy(output, expected["accuracy"])
    golden.check_gradients(draft, golden.data["grad_norms"], "grad.")


def test_golden_alternatives_on_the_same_inputs(golden: Golden) -> None:
    for name, expected in golden.data["alternatives_same_inputs_and_anchors"].items():
        draft = golden.draft(**alternative(name))
        output = draft.loss_of(golden.batch(), golden.blocks())
        numerator, denominator = expected["loss_terms"]
        found = float(output.numerator.detach())
        golden.check(found, numerator, name)
        # The reference's D-PACE counts every sample, ours those with something to learn.
        if draft.options.loss == "ce":
            golden.check(float(output.denominator), denominator, name)
        golden.check(found / denominator, expected["loss"], name)
        check_accuracy(output, expected["accuracy"])
        if expected.get("grad_norms"):
            (output.numerator / denominator).backward()
            golden.check_gradients(draft, expected["grad_norms"])


def alternative(name: str) -> dict[str, Any]:
    """What a golden's alternative changes; memory and kernel variants change no number."""
    if found := re.fullmatch(r"gamma_([\d.e-]+)", name):
        return {"loss_decay_gamma": float(found[1])}
    if found := re.fullmatch(r"(dpace(?:_[a-z_]+?)?)(?:_alpha_([\d.e-]+))?", name):
        alpha = {"dpace_alpha": float(found[2])} if found[2] else {}
        return {"loss": found[1], **alpha}
    if name == "no_decay":
        return {"loss_decay_gamma": None}
    known = r"(eager|sdpa|flex)_backend.*|(un)?chunked.*|chunk.*"
    assert re.fullmatch(known, name), f"unknown alternative {name}"
    return {}


def test_golden_accumulation_window(golden: Golden) -> None:
    """Micro-batches of one sample each, with anchors of their own, normalised once."""
    draft = golden.draft()
    outputs = [
        draft.loss_of(golden.batch(sample), golden.blocks(f"window.{index}."))
        for index, sample in enumerate(golden.samples(golden.config.layers))
    ]
    numerator = torch.stack([output.numerator for output in outputs]).sum()
    denominator = torch.stack([output.denominator for output in outputs]).sum()
    (numerator / denominator).backward()  # type: ignore[no-untyped-call]
    (window,) = (v for n, v in golden.data.items() if n.startswith("accumulation_window"))
    metrics = window["trainer_metrics"]
    golden.check(float((numerator / denominator).detach()), metrics["loss"])
    hits, seen = (sum(float(o.counts["accuracy"][i]) for o in outputs) for i in (0, 1))
    assert hits / seen == pytest.approx(metrics["acc"])
    norms = window["grad_norms_after_global_normalization"]
    golden.check_gradients(draft, norms, "window.grad.")
