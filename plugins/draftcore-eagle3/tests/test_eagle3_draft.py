"""What a draft takes from its target and what is refused, and the decoder against training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from draftcore_eagle3.algorithm import Eagle3
from draftcore_eagle3.config import captured_layers, from_target
from draftcore_eagle3.loss import Rows
from draftcore_eagle3.model import Eagle3Draft
from draftcore_eagle3.options import Eagle3Options
from draftcore_eagle3.vocabulary import select_tokens
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.algorithm_checks import ragged_rounds
from draftcore_sdk.algorithm_fixtures import WIDTH, MakeDraft, MakeTarget
from draftcore_sdk.algorithm_reference import require_recordable
from draftcore_sdk.exports import change
from torch import Tensor

from draftcore.contracts.algorithm import DataSummary, Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

SEEN = DataSummary("", 1, 6, 6, 6, {5: 3, 40: 2, 7: 1})


def build(target: TargetSpec, **options: Any) -> Any:
    torch.manual_seed(0)
    return Eagle3(Eagle3Options(**options)).build_draft(target, SEEN)


def test_a_fresh_draft_starts_from_its_target(target: TargetSpec) -> None:
    draft = build(target, draft_vocab_size=6, fc_norm=True)
    module = draft.module
    ids = torch.tensor([0, 1, 2, 5, 7, 40])
    assert torch.equal(module.token_ids(), ids)
    assert torch.equal(module.lm_head.weight, target.head()[ids])
    assert torch.equal(module.embed_tokens, target.embedding())
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name != "lm_head.weight":
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1), name
    assert module.midlayer.self_attn.k_proj.weight.shape == (16, 64)
    defaults = draft.defaults
    assert (defaults.lr, defaults.warmup_ratio, defaults.clip) == (1e-4, 0.015, 0.5)


def test_a_draft_for_scaled_logits_starts_at_their_scale(make_target: MakeTarget) -> None:
    target = make_target()
    target.logit_scale = 0.25
    assert torch.equal(build(target).module.lm_head.weight, 0.25 * target.head())


def test_a_tied_target_is_held_once(make_target: MakeTarget) -> None:
    def to_bfloat16(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["dtype"] = "bfloat16"
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    folder = make_target(tie_word_embeddings=True).path
    change(Path(folder), to_bfloat16)
    target = TransformersTarget(folder)
    module = build(target).module
    assert isinstance(module, Eagle3Draft)
    assert module.target_head is None
    assert module.embed_tokens.dtype == torch.bfloat16
    assert Eagle3(Eagle3Options()).feature_request(target).dtype == "bfloat16"


# Each target's config.json: its kind, widths of state and MLP, heads, those of keys and values, and more.
MOE = "moe_intermediate_size"
TARGETS: dict[str, tuple[str, tuple[int, int, int, int], dict[str, int]]] = {
    "Llama-3.1-8B": ("Llama", (4096, 14336, 32, 8), {}),
    "Qwen3-8B": ("Qwen3", (4096, 12288, 32, 8), {"head_dim": 128}),
    "Gemma-3-1B": ("Gemma3Text", (1152, 6912, 4, 1), {"head_dim": 256}),
    "gpt-oss-20b, -120b": (
        "GptOss", (2880, 2880, 64, 8), {"head_dim": 64, "num_experts_per_tok": 4}),
    "Qwen3-30B-A3B": (
        "Qwen3Moe", (2048, 6144, 32, 4), {"head_dim": 128, MOE: 768, "num_experts_per_tok": 8}),
    "Qwen3-Coder-480B-A35B": (
        "Qwen3Moe", (6144, 8192, 96, 8), {"head_dim": 128, MOE: 2560, "num_experts_per_tok": 8}),
    "Qwen3-Next-80B-A3B": (
        "Qwen3Next", (2048, 5120, 16, 2),
        {"head_dim": 256, MOE: 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10}),
    "Llama-4-Scout": (
        "Llama4Text", (5120, 8192, 40, 8),
        {"head_dim": 128, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1}),
    "DeepSeek-V2-Lite": (
        "DeepseekV2", (2048, 10944, 16, 16),
        {MOE: 1408, "n_shared_experts": 2, "num_experts_per_tok": 6, "kv_lora_rank": 512, "v_head_dim": 128}),
    "DeepSeek-V3": (
        "DeepseekV3", (7168, 18432, 128, 128),
        {MOE: 2048, "n_shared_experts": 1, "num_experts_per_tok": 8, "kv_lora_rank": 512, "v_head_dim": 128}),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_the_readme_says_how_large_a_draft_is_for_known_targets(name: str) -> None:
    kind, sizes, more = TARGETS[name]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    text = getattr(transformers, f"{kind}Config")(**dict(zip(names, sizes, strict=True)), **more)
    target: Any = SimpleNamespace(text_config=text, vocab_size=text.vocab_size, num_layers=24)
    found = from_target(target, Eagle3Options())
    heads = f"{found.num_attention_heads} / {found.num_key_value_heads} x {found.head_dim}"
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"| {name} | {heads} | {found.intermediate_size:,} |" in readme


def test_what_a_draft_is_made_of_is_said(target: TargetSpec) -> None:
    assert build(target).about == (
        "1 layer of width 32, 4 query and 2 key/value heads of 8, MLP of 40, "
        "RoPE default of base 10000"
    )
    assert ", MLP of 7, RoPE default of base 500000" in (
        build(target, intermediate_size=7, rope_theta=5e5).about
    )


# ------------------------------------------------------------ captured layers


@pytest.mark.parametrize(("depth", "layers"), [(36, (1, 17, 32)), (8, (1, 3, 4)), (7, (1, 2, 3))])
def test_default_layers(depth: int, layers: tuple[int, ...]) -> None:
    assert captured_layers(None, depth) == layers


def test_request_names_the_layers_and_the_last_hidden_state(target: TargetSpec) -> None:
    request = Eagle3(Eagle3Options(layers=(6, 0, 2))).feature_request(target)
    assert request.names == ("hidden.0", "hidden.2", "hidden.6", "last_hidden")


@pytest.mark.parametrize(
    ("asked", "depth", "message"),
    [
        (None, 6, r"collide: \[1, 2, 2\](.|\n)*for example \[0, 2, 4\]"),
        (None, 4, r"for example \[0, 1, 2\]"),
        ((1, 3, 7), 8, "layer 7 is the last one; servers"),
        (None, 3, "at least 4 layers"),
    ],
)
def test_layers_that_cannot_be_captured(
    asked: tuple[int, ...] | None, depth: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        captured_layers(asked, depth)


# ------------------------------------------------------------ options and vocabulary


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 49}, "draft_vocab_size 49(.|\n)*at most 48"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "divisor of 32"),
    ],
)
def test_shapes_that_cannot_be(options: dict[str, Any], message: str, target: TargetSpec) -> None:
    with pytest.raises(UsageError, match=message):
        build(target, **options)


def test_draft_vocabulary_is_the_most_frequent_tokens_ascending() -> None:
    counts = {9: 5, 3: 5, 7: 5, 1: 9}
    assert select_tokens(counts, 3, 12).tolist() == [1, 3, 7]
    assert select_tokens({}, 3, 12).tolist() == [0, 1, 2]


# ------------------------------------------------------------ decoding


VOCAB, DRAFTS = 48, 4


def teacher_forced(
    draft: Draft, tokens_T: Tensor, features: dict[str, Tensor], drafts_K: Tensor
) -> Tensor:
    """Probabilities of all drafts [K, V] by training: the row of the last features at each step."""
    module, row = draft.module, len(tokens_T) - 2  # the first draft's row reads the last token
    assert isinstance(module, Eagle3Draft)
    known = torch.cat([tokens_T, drafts_K])
    unseen = torch.zeros(len(known) - row - 1, WIDTH)
    named = {name: torch.cat([x, unseen]) for name, x in features.items()}
    sample = Sample(SampleId("", 1), known, torch.ones(len(known), dtype=torch.bool), named)
    batch = Eagle3(Eagle3Options()).collate([sample])
    every = Rows.of(torch.ones_like(batch.loss_mask_BT), DRAFTS)
    probs_KV = torch.zeros(len(drafts_K), VOCAB, dtype=torch.float64)
    ids = module.token_ids()
    for step, normed_NH in enumerate(module.unroll(batch, every)):
        found = module.lm_head(normed_NH[row]).softmax(-1)
        probs_KV[step, slice(None) if ids is None else ids] = found
    return probs_KV


@pytest.mark.parametrize(
    "options",
    [{"draft_vocab_size": 24}, {"norm_output": True}, {"fc_norm": True, "num_key_value_heads": 1}],
    ids=str,
)
@torch.no_grad()
def test_proposals_equal_training_over_ragged_rounds(
    options: dict[str, Any], make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft = make_draft(ttt_length=DRAFTS, **options)
    drafter = Eagle3(Eagle3Options(num_drafts=DRAFTS)).drafter(draft, target.load_model())
    for tokens_T, features, greedy_K, drawn_K, probs_KV in ragged_rounds(drafter, VOCAB, 0.7):
        greedy_KV = teacher_forced(draft, tokens_T, features, greedy_K)
        assert greedy_K.tolist() == greedy_KV.argmax(-1).tolist()
        sharp_KV = teacher_forced(draft, tokens_T, features, drawn_K) ** (1 / 0.7)
        expected_KV = sharp_KV / sharp_KV.sum(-1, keepdim=True)
        torch.testing.assert_close(probs_KV, expected_KV, rtol=1e-9, atol=1e-12)
    require_recordable(drafter)
