"""The shape of a draft, and how it follows from the target.

A draft copies what its server will assume of the target: hidden size, vocabulary, rms eps, RoPE.
Layer ids are 0-based outputs; the last layer's is refused, since no server can capture it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftcore.errors import UsageError

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_dflash.options import BackboneOptions

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Sections of a multimodal RoPE coincide for text, so they are dropped.
TEXT_IRRELEVANT = ("mrope_section", "mrope_interleaved", "type")


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes a draft's tensors and its forward; JSON data with tuples as lists.

    `rope` has the keys of transformers' `rope_parameters`; `layers` are the captured ones, in the
    order of `fc`'s columns; `is_causal` overrides every layer type's own rule inside a block.
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
    layers: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None

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
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UsageError(
                f"mask_token_id {self.mask_token_id} has no row in the target's embedding of "
                f"{self.vocab_size} tokens\n"
                f"  set mask_token_id to an id from 0 to {self.vocab_size - 1}"
            )
        if unknown := set(self.layer_types) - {FULL, SLIDING}:
            raise UsageError(
                f"layer_types names {sorted(unknown)}\n  a draft layer is {FULL} or {SLIDING}"
            )
        if (SLIDING in self.layer_types) != (self.sliding_window is not None):
            raise UsageError(
                f"layer_types are {list(self.layer_types)}, sliding_window is "
                f"{self.sliding_window}\n  set both or neither: a window belongs to {SLIDING} layers"
            )

    def causal(self, layer_type: str) -> bool:
        """Say whether layers of this type are causal inside a block."""
        return layer_type == SLIDING if self.is_causal is None else self.is_causal


def shape_from_target(target: TargetSpec, options: BackboneOptions) -> dict[str, Any]:
    """Return the fields of a DraftConfig, with the target's sizes where the options set none.

    Raises UsageError where the target lacks a size, has no supported RoPE, or is too shallow.
    """
    text = target.text_config
    heads = _size(text, "num_attention_heads")
    return {
        "hidden_size": _size(text, "hidden_size"),
        "intermediate_size": options.intermediate_size or _size(text, "intermediate_size"),
        "num_attention_heads": options.num_attention_heads or heads,
        "num_key_value_heads": options.num_key_value_heads
        or _size(text, "num_key_value_heads", heads),
        "head_dim": options.head_dim
        or _size(text, "head_dim", _size(text, "hidden_size") // heads),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": float(getattr(text, "rms_norm_eps", 1e-6)),
        "max_position_embeddings": _size(text, "max_position_embeddings"),
        "rope": rope_of(text),
        "layers": captured_layers(options.layers, options.num_layers, target.num_layers),
        "num_target_layers": target.num_layers,
        "block_size": options.block_size,
        "mask_token_id": mask_token(target, options.mask_token_id),
        "layer_types": layer_types(options),
        "sliding_window": options.sliding_window,
        "is_causal": options.is_causal,
    }


def _size(text: Any, name: str, fallback: int | None = None) -> int:
    value = getattr(text, name, None) or fallback
    if value is None:
        raise UsageError(
            f"the target's config ({text.model_type}) has no {name}\n"
            f"  set the option {name}, if there is one; other targets are not supported"
        )
    return int(value)


def rope_of(text: Any) -> dict[str, Any]:
    """Return a config's RoPE parameters; those of full attention where layers differ.

    Raises UsageError for positions that are not rotary or change with the sequence's length.
    """
    rope = dict(getattr(text, "rope_parameters", None) or {})
    rope = dict(rope.get(FULL) or rope)
    kind = rope.setdefault("rope_type", "default")
    if "rope_theta" not in rope or kind not in ROPE_TYPES:
        found = f"RoPE type {kind!r}" if "rope_theta" in rope else "no rotary positions"
        raise UsageError(
            f"the target's config ({text.model_type}) has {found}\n"
            f"  a DFlash draft copies its target's RoPE; supported: {', '.join(ROPE_TYPES)}"
        )
    rope.setdefault("partial_rotary_factor", getattr(text, "partial_rotary_factor", None) or 1.0)
    if rope["partial_rotary_factor"] == 1:
        del rope["partial_rotary_factor"]
    return {key: value for key, value in rope.items() if key not in TEXT_IRRELEVANT}


def layer_types(options: BackboneOptions) -> tuple[str, ...]:
    """Return the type of each draft layer; raises UsageError where their number is another."""
    if options.layer_types is None:
        return (FULL if options.sliding_window is None else SLIDING,) * options.num_layers
    if len(options.layer_types) != options.num_layers:
        raise UsageError(
            f"layer_types names {len(options.layer_types)} layers, num_layers is "
            f"{options.num_layers}\n  give one type per draft layer"
        )
    return options.layer_types


def captured_layers(
    asked: tuple[int, ...] | None, num_draft_layers: int, num_target_layers: int
) -> tuple[int, ...]:
    """Return the captured layers: those asked for, or as many as the draft has, evenly spaced.

    By default the outputs round-half-to-even(1 + i(L-4)/(K-1)), or L/2 for K = 1. Raises UsageError
    for ids that are out of range or equal, and where the default ones collide.
    """
    last, count = num_target_layers - 1, num_draft_layers
    if asked is not None:
        chosen = asked
    elif count == 1:
        chosen = (num_target_layers // 2,)
    else:
        step = (num_target_layers - 4) / (count - 1)
        chosen = tuple(round(1 + i * step) for i in range(count))
    distinct = len(set(chosen)) == len(chosen)
    if distinct and all(0 <= layer < last for layer in chosen):
        return chosen
    if asked is None:
        problem = f"the default captured layers of {count} draft layers collide: {list(chosen)}"
    elif not distinct:
        problem = f"layers {list(chosen)} are not distinct"
    elif last in chosen:
        problem = (
            f"layer {last} is the last one; servers capture a layer at the input of the next, "
            "so its output cannot be had"
        )
    else:
        problem = f"layers {list(chosen)} are out of range"
    raise UsageError(
        f"{problem}\n"
        f"  the target has {num_target_layers} layers: ids 0 to {last - 1} can be captured\n"
        f"  {_remedy(min(len(chosen), last), last)}"
    )


def _remedy(count: int, available: int) -> str:
    if available < 1:
        return "use a deeper target"
    spread = [i * (available - 1) // max(1, count - 1) for i in range(count)]
    return f"set layers to distinct ids, for example {spread}"


def mask_token(target: TargetSpec, asked: int | None) -> int:
    """Choose the token that stands for one to be drafted.

    The one asked for; the tokenizer's mask token; a row of the embedding that no token uses; the
    pad, end or unknown token. Of these the first whose embedding is not zero, as a padding row's
    often is: rows of zeros have no queries, so the first layer could not tell positions apart.
    Raises UsageError where there is none.
    """
    if asked is not None:
        return asked
    tokenizer, embedding_VH = target.tokenizer, target.embedding()
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
