"""What a draft takes over from its target: tensors, a mask token, sizes, RoPE, captured layers.

A draft copies what its server will assume of the target: hidden size, vocabulary, rms eps, RoPE.
Layer ids are 0-based outputs, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from draftcore.errors import UsageError
from draftcore_nn.serving import required

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftcore.contracts.target import TargetSpec
    from draftcore_nn.options import DecoderOptions

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
YARN = (
    "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "truncate",
)  # fmt: skip
# Sections of a multimodal RoPE coincide for text, so they are dropped.
TEXT_IRRELEVANT = ("mrope_section", "mrope_interleaved", "type")
# What configs call the experts that a token takes, an expert's width, that of those which every token
# takes, and their number.
EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
LATENT_GROUPS = 8  # key/value heads, at most, where the target's share a latent state


def target_tensors(target: TargetSpec) -> tuple[Tensor, Tensor | None]:
    """Return the target's embedding and head, [V, H] each; None for a head that is the embedding."""
    embedding_VH, head_VH = target.embedding(), target.head()
    return embedding_VH, None if head_VH.equal(embedding_VH) else head_VH


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as configs and feature requests spell it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def capturable(
    layers: tuple[int, ...], num_target_layers: int, *, asked: bool = True
) -> tuple[int, ...]:
    """Return these layers if servers can capture them: distinct, in range, and not the last one.

    Raises UsageError for others; `asked` says that a user chose them.
    """
    last = num_target_layers - 1
    distinct = len(set(layers)) == len(layers)
    if distinct and all(0 <= layer < last for layer in layers):
        return layers
    if not asked:
        problem = f"the default captured layers collide: {list(layers)}"
    elif not distinct:
        problem = f"layers {list(layers)} are not distinct"
    elif last in layers:
        problem = (
            f"layer {last} is the last one; servers capture a layer at the input of the next, "
            "so its output cannot be had"
        )
    else:
        problem = f"layers {list(layers)} are out of range"
    count = min(len(layers), last)
    spread = [i * (last - 1) // max(1, count - 1) for i in range(count)]
    raise UsageError(
        f"{problem}\n"
        f"  the target has {num_target_layers} layers: ids 0 to {last - 1} can be captured\n"
        + (
            f"  set layers to distinct ids, for example {spread}"
            if last
            else "  use a deeper target"
        )
    )


def mask_token(target: TargetSpec, asked: int | None) -> int:
    """Choose the token that stands for one to be drafted.

    The one asked for; the tokenizer's mask token; a row of the embedding that no token uses; the
    pad, end or unknown token. Of these the first whose embedding is not zero, as a padding row's
    often is: rows of zeros have no queries, so the first layer could not tell positions apart.
    Raises UsageError where there is none.
    """
    if asked is not None:
        return asked
    tokenizer, embedding_VH = target.load_tokenizer(), target.embedding()
    used = set(tokenizer.get_vocab().values())
    unused = (token for token in range(target.vocab_size) if token not in used)
    special = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    for token in (tokenizer.mask_token_id, *unused, *special):
        if token is not None and embedding_VH[token : token + 1].any():  # none past the last row
            return int(token)
    raise UsageError(
        f"the tokenizer of {target.path!r} has no mask, unused, pad, end or unknown token whose "
        "embedding is not zero\n  set mask_token_id to a token that texts do not contain"
    )


# ---------------------------------------------------------------- sizes


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a draft that is made of transformer layers; a dataclass of JSON data.

    `rope` has the keys of transformers' `rope_parameters`. An algorithm's own fields are added by
    deriving from it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"{self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key-value heads evenly\n"
                "  set num_attention_heads to a multiple of num_key_value_heads"
            )
        if self.head_dim % 2:
            raise UsageError(
                f"head_dim {self.head_dim} is odd, and rotary positions turn pairs\n"
                "  set head_dim to an even number"
            )

    def text(self, layers: int) -> str:
        """Say what the draft is made of, in a line for `Draft.about`."""
        return (
            f"{layers} layer{'s' * (layers > 1)} of width {self.hidden_size}, "
            f"{self.num_attention_heads} query and {self.num_key_value_heads} key/value heads of "
            f"{self.head_dim}, MLP of {self.intermediate_size}, "
            f"RoPE {self.rope['rope_type']} of base {self.rope['rope_theta']:g}"
        )


def shape_of_target(target: TargetSpec, options: DecoderOptions) -> dict[str, Any]:
    """Return the fields of a DecoderShape, with the target's sizes where the options set none.

    The MLP is as wide as all that a token passes in one of the target's layers. Heads that the target
    reads from a latent state (MLA) would fill a draft's cache: it has fewer. Raises UsageError where
    the target lacks a size, or has no supported RoPE.
    """
    text = target.text_config
    text = getattr(text, "per_layer_config", [text])[0]  # of transformers', whose layers may differ

    def size(name: str, fallback: int | None = None) -> int:
        value = largest(text, name) or fallback
        if value is None:
            raise UsageError(
                f"the target's config ({text.model_type}) has no {name}\n"
                f"  set the option {name}, if there is one; other targets are not supported"
            )
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads", options.num_attention_heads)
    latent = largest(text, "kv_lora_rank") > 0
    width = options.head_dim or size("v_head_dim" if latent else "head_dim", hidden // heads)
    heads = options.num_attention_heads or (max(1, hidden // width) if latent else heads)
    groups = math.gcd(heads, LATENT_GROUPS) if latent else size("num_key_value_heads", heads)
    theta = options.rope_theta
    return {
        "hidden_size": hidden,
        "intermediate_size": options.intermediate_size
        or active_width(text)
        or size("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": options.num_key_value_heads or groups,
        "head_dim": width,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": float(getattr(text, "rms_norm_eps", None) or 1e-6),
        "max_position_embeddings": size("max_position_embeddings"),
        "rope": {"rope_type": "default", "rope_theta": theta} if theta else rope_of(text),
    }


def largest(text: Any, *names: str) -> int:
    """Return the first of these fields of a config that is set, of a list the largest; 0 without."""
    found = next((value for name in names if (value := getattr(text, name, None))), 0)
    return int(max(found) if isinstance(found, list) else found)


def active_width(text: Any) -> int:
    """Return how wide the MLPs are that a token passes in a layer: one, or its experts' together."""
    one = largest(text, *EXPERT_WIDTH)
    shared = largest(text, *SHARED_WIDTH) or one * largest(text, *SHARED)
    dense = largest(text, "intermediate_size_mlp", "intermediate_size")
    return max(dense, one * largest(text, *EXPERTS) + shared)


def rope_of(text: Any) -> dict[str, Any]:
    """Return a config's RoPE parameters; those of full attention where layers differ.

    The scale that YaRN gives cosines and sines is said in a way that all servers read alike:
    transformers and vLLM take `attention_factor`, where sglang, and vLLM of 2025, multiply what follows
    from `factor` by `attn_factor`, and the latter drops `mscale` and `mscale_all_dim`. Raises
    UsageError for positions that are not rotary or change with the sequence's length.
    """
    rope = dict(getattr(text, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention") or rope)
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if "rope_theta" not in rope or kind not in ROPE_TYPES:
        found = f"RoPE type {kind!r}" if "rope_theta" in rope else "no rotary positions"
        raise UsageError(
            f"the target's config ({text.model_type}) has {found}\n"
            f"  a draft copies its target's RoPE; supported: {', '.join(ROPE_TYPES)}\n"
            "  set the option rope_theta for plain rotary positions of the draft's own, for example "
            "rope_theta: 10000"
        )
    rope.setdefault("partial_rotary_factor", getattr(text, "partial_rotary_factor", None) or 1.0)
    if rope["partial_rotary_factor"] == 1:
        del rope["partial_rotary_factor"]
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", text.max_position_embeddings)
    if kind != "yarn":
        return {key: value for key, value in rope.items() if key not in TEXT_IRRELEVANT}
    length = rope["original_max_position_embeddings"]
    factor = float(rope.get("factor") or text.max_position_embeddings / length)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weights = [float(rope.get(name) or 0) for name in ("mscale", "mscale_all_dim")]
    own = scale(weights[0]) / scale(weights[1]) if all(weights) else scale(1)
    own = float(rope.get("attention_factor") or own)
    said = {name: rope[name] for name in YARN if rope.get(name) is not None}
    return {**said, "factor": factor, "attention_factor": own, "attn_factor": own / scale(1)}


# ---------------------------------------------------------------- sizes in config.json


def shape_in_config(shape: DecoderShape, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of config.json for a shape; servers compute in `dtype`, the target's."""
    rope = dict(shape.rope)
    return {
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        # Both spellings: transformers 5 reads the first, servers on transformers 4 the others.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "dtype": dtype_name(dtype),
        "torch_dtype": dtype_name(dtype),
    }


def shape_of_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a DecoderShape that config.json states, in either spelling of RoPE.

    Raises UsageError for a field that is missing, or a RoPE that is not supported.
    """
    hidden, heads, vocab, inner = (
        int(required(config, name, folder))
        for name in ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    )
    head_dim = int(config.get("head_dim") or hidden // heads)
    positions = int(config.get("max_position_embeddings") or 2048)
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if (dim := rope.pop("rope_dim", None)) is not None:  # sglang's name
        rope.setdefault("partial_rotary_factor", dim / head_dim)
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    if partial := config.get("partial_rotary_factor"):
        rope.setdefault("partial_rotary_factor", partial)
    stated = {"model_type": "draft", "max_position_embeddings": positions, "rope_parameters": rope}
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": float(required(config, "rms_norm_eps", folder)),
        "max_position_embeddings": positions,
        "rope": rope_of(SimpleNamespace(**stated)),
    }
