"""What a draft takes from its target and what is refused, and the decoder against training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.blocks import Blocks
from draftcore_dflash.config import captured_layers, mask_token
from draftcore_dflash.model import Backbone
from draftcore_dflash.options import DFlashOptions
from draftcore_sdk.algorithm_checks import ragged_rounds
from draftcore_sdk.algorithm_fixtures import NO_DATA, MakeDraft, MakeTarget
from draftcore_sdk.algorithm_reference import require_recordable
from draftcore_sdk.exports import change
from torch import Tensor

from draftcore.contracts.algorithm import Draft, Sample, SampleId
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError


def build(target: TargetSpec, **options: Any) -> Draft:
    torch.manual_seed(0)
    return DFlash(DFlashOptions(**{"num_layers": 2, **options})).build_draft(target, NO_DATA)


def test_a_fresh_draft_fits_its_target(target: TargetSpec) -> None:
    draft = build(target, head_dim=16, num_key_value_heads=1, intermediate_size=24)
    parameters = dict(draft.module.named_parameters())
    for name, parameter in parameters.items():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1), name
    shapes = {
        "fc": (32, 64),
        "layers.1.self_attn.q_proj": (64, 32),
        "layers.1.self_attn.v_proj": (16, 32),
        "layers.1.self_attn.k_norm": (16,),
        "layers.0.mlp.up_proj": (24, 32),
    }
    assert {name: tuple(parameters[f"{name}.weight"].shape) for name in shapes} == shapes
    defaults = draft.defaults
    assert (defaults.lr, defaults.warmup_ratio, defaults.clip) == (6e-4, 0.04, 1.0)


# ------------------------------------------------------------ captured layers


@pytest.mark.parametrize(
    ("depth", "count", "layers"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 5, (1, 7, 13, 19, 25)),
        (64, 5, (1, 16, 31, 46, 61)),
        (9, 3, (1, 4, 6)),  # 3.5 goes up to the even 4
        (11, 3, (1, 4, 8)),  # 4.5 down to the even 4
        (36, 1, (18,)),
        (36, 2, (1, 33)),
    ],
)
def test_default_layers_are_evenly_spaced_halves_going_to_even(
    depth: int, count: int, layers: tuple[int, ...]
) -> None:
    assert captured_layers(None, count, depth) == layers


@pytest.mark.parametrize(
    ("asked", "count", "depth", "message"),
    [
        (None, 5, 6, r"collide: \[1, 2, 2, 2, 3\](.|\n)*for example \[0, 1, 2, 3, 4\]"),
        (None, 5, 4, r"for example \[0, 1, 2\]"),
        ((1, 7), 5, 8, "layer 7 is the last one; servers"),
        (None, 1, 1, "deeper target"),
    ],
)
def test_layers_that_cannot_be_captured(
    asked: tuple[int, ...] | None, count: int, depth: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        captured_layers(asked, count, depth)


# ------------------------------------------------------------ the mask token


def test_the_mask_token_is_found_in_this_order(make_target: MakeTarget) -> None:
    target, full = make_target(), make_target(vocab_size=259)
    tokenizer = target.load_tokenizer()
    assert mask_token(target, 7) == 7
    assert mask_token(target, None) == 259 == len(tokenizer)  # the first unused row
    assert mask_token(full, None) == full.load_tokenizer().pad_token_id
    full.load_tokenizer().pad_token = None
    assert mask_token(full, None) == full.load_tokenizer().eos_token_id
    full.load_tokenizer().eos_token = None
    with pytest.raises(UsageError, match=r"no mask, unused, pad, end or unknown(.|\n)*set mask"):
        mask_token(full, None)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert mask_token(target, None) == tokenizer.mask_token_id


def test_a_mask_token_of_zeros_is_passed_over(make_target: MakeTarget) -> None:
    """Its rows would have no queries, so the first layer could not tell positions apart."""
    full = make_target(vocab_size=259)

    def blank(_: Any, tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][full.load_tokenizer().pad_token_id] = 0

    change(Path(full.path), blank)
    assert mask_token(full, None) == full.load_tokenizer().eos_token_id


# ------------------------------------------------------------ options

MIXED = ("full_attention", "sliding_attention")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_types": ("full_attention",)}, "1 layers, num_layers is 2"),
        ({"layer_types": MIXED}, "set both or neither"),
        ({"layer_types": ("full_attention",) * 2, "sliding_window": 4}, "set both or neither"),
        ({"mask_token_id": 270}, r"mask_token_id 270 has no row(.|\n)*0 to 269"),
    ],
)
def test_shapes_that_cannot_be(options: dict[str, Any], message: str, target: TargetSpec) -> None:
    with pytest.raises(UsageError, match=message):
        build(target, **options)


def test_a_draft_for_scaled_logits_starts_at_their_scale(make_target: MakeTarget) -> None:
    target = make_target()
    target.logit_scale = 0.25
    norms = {
        name: weight.detach()
        for name, weight in build(target).module.named_parameters()
        if weight.ndim == 1
    }
    for name, weight in norms.items():
        assert weight.equal(torch.full_like(weight, 0.25 if name == "norm.weight" else 1.0)), name


def test_positions_that_change_with_length_are_refused_before_a_capture(
    make_target: MakeTarget,
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UsageError, match=r"'dynamic'(.|\n)*default, linear, llama3, yarn"):
        DFlash(DFlashOptions()).feature_request(make_target(rope_parameters=rope))


# ------------------------------------------------------------ decoding


VOCAB = 270


def trained(draft: Draft, tokens_T: Tensor, features: dict[str, Tensor]) -> Tensor:
    """Logits [S, V] of the block at the last token, by training's forward."""
    module, anchor = draft.module, len(tokens_T) - 1
    assert isinstance(module, Backbone)
    # The anchor's own features are never seen.
    read = {name: torch.cat([x, torch.full_like(x[:1], 1e3)]) for name, x in features.items()}
    sample = Sample(SampleId("", 1), tokens_T, torch.ones(anchor + 1).bool(), read)
    blocks = Blocks.of(torch.tensor([[anchor]]), torch.tensor([[True]]))
    with torch.no_grad():
        hidden = module.block_hidden(DFlash(DFlashOptions()).collate([sample]), blocks)[0]
        return hidden @ module.head.T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 3},
        {"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")},
        {"is_causal": True, "num_key_value_heads": 1, "head_dim": 12},
    ],
    ids=str,
)
def test_proposals_equal_training_over_ragged_rounds(
    options: dict[str, Any], make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft = make_draft(**options)
    drafter = DFlash(DFlashOptions(block_size=4)).drafter(draft, target.load_model())
    for tokens_T, features, greedy_K, _, probs_KV in ragged_rounds(drafter, VOCAB, 1.0):
        logits_KV = trained(draft, tokens_T, features)[1:]
        assert greedy_K.tolist() == logits_KV.argmax(-1).tolist()
        torch.testing.assert_close(probs_KV, logits_KV.softmax(-1), rtol=1e-9, atol=1e-12)
    require_recordable(drafter)


def test_a_block_drafts_no_more_than_it_holds(make_draft: MakeDraft, target: TargetSpec) -> None:
    with pytest.raises(UsageError, match="a block of 4 drafts 3 tokens"):
        DFlash(DFlashOptions(block_size=4, num_drafts=4)).drafter(make_draft(), target.load_model())
