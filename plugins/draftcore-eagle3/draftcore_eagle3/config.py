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
    from draftcore_eagle3.options import Eagle3Options

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Sections of a multimodal RoPE coincide for text, so they are dropped.
TEXT_IRRELEVANT = ("mrope_section", "mrope_interleaved", "type")


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes a draft's tensors and its forward; JSON data with tuples as lists.

    `rope` has the keys of transformers' `rope_parameters`.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Mapping[str, Any]
    layers: tuple[int, int, int]
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            # Also where head_dim is given: transformers' LlamaConfig, which servers read, insists.
            raise UsageError(
                f"servers refuse a hidden size of {self.hidden_size} with "
                f"{self.num_attention_heads} attention heads\n"
                f"  set num_attention_heads to a divisor of {self.hidden_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"{self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key-value heads evenly\n"
                "  set num_attention_heads to a multiple of num_key_value_heads"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise UsageError(
                f"draft_vocab_size {self.draft_vocab_size} is larger than the target's vocabulary "
                f"of {self.vocab_size} tokens\n"
                f"  set draft_vocab_size to at most {self.vocab_size}, or leave it out for all"
            )

    @property
    def full_vocabulary(self) -> bool:
        return self.draft_vocab_size == self.vocab_size


def from_target(target: TargetSpec, options: Eagle3Options) -> DraftConfig:
    """Return a draft's shape: the target's sizes where the options set none.

    Raises UsageError where the target lacks a size, has no supported RoPE, or is too shallow.
    """
    text = target.config.get_text_config()
    heads = _size(text, "num_attention_heads")
    return DraftConfig(
        hidden_size=_size(text, "hidden_size"),
        intermediate_size=options.intermediate_size or _size(text, "intermediate_size"),
        num_attention_heads=options.num_attention_heads or heads,
        num_key_value_heads=options.num_key_value_heads
        or _size(text, "num_key_value_heads", heads),
        head_dim=options.head_dim or _size(text, "head_dim", _size(text, "hidden_size") // heads),
        vocab_size=_size(text, "vocab_size"),
        draft_vocab_size=options.draft_vocab_size or _size(text, "vocab_size"),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        max_position_embeddings=_size(text, "max_position_embeddings"),
        rope=rope_of(text),
        layers=captured_layers(options.layers, int(text.num_hidden_layers)),
        fc_norm=options.fc_norm,
        norm_output=options.norm_output,
    )


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
    rope = dict(rope.get("full_attention") or rope)
    kind = rope.setdefault("rope_type", "default")
    if "rope_theta" not in rope or kind not in ROPE_TYPES:
        found = f"RoPE type {kind!r}" if "rope_theta" in rope else "no rotary positions"
        raise UsageError(
            f"the target's config ({text.model_type}) has {found}\n"
            f"  an EAGLE-3 draft copies its target's RoPE; supported: {', '.join(ROPE_TYPES)}"
        )
    rope.setdefault("partial_rotary_factor", getattr(text, "partial_rotary_factor", None) or 1.0)
    if rope["partial_rotary_factor"] == 1:
        del rope["partial_rotary_factor"]
    return {key: value for key, value in rope.items() if key not in TEXT_IRRELEVANT}


def captured_layers(asked: tuple[int, ...] | None, num_layers: int) -> tuple[int, int, int]:
    """Return three ascending layer ids: those asked for, or 1, L/2-1, L-4.

    Raises UsageError for ids that are out of range or equal, or when the default ones collide.
    """
    if num_layers < 4:
        raise UsageError(
            f"EAGLE-3 captures three layers below the last; the target has {num_layers} layers\n"
            "  use a target of at least 4 layers"
        )
    chosen = asked or (1, num_layers // 2 - 1, num_layers - 4)
    first, second, third = sorted(chosen) if asked else chosen
    if 0 <= first < second < third < num_layers - 1:
        return first, second, third
    if asked is None:
        problem = f"the default layers 1, L/2-1, L-4 collide: {list(chosen)}"
    elif len(set(chosen)) < 3:
        problem = f"layers {list(asked)} are not distinct"
    elif third == num_layers - 1:
        problem = (
            f"layer {third} is the last one; servers capture a layer at the input of the next, "
            "so its output cannot be had"
        )
    else:
        problem = f"layers {list(asked)} are out of range"
    raise UsageError(
        f"{problem}\n"
        f"  the target has {num_layers} layers: ids 0 to {num_layers - 2} can be captured\n"
        f"  set layers to three distinct ids, for example "
        f"{[0, (num_layers - 2) // 2, num_layers - 2]}"
    )
