"""The shape of a draft, and how it follows from the target. Layer ids are 0-based outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftcore_nn.target import DecoderShape, capturable, shape_of_target

from draftcore.errors import UsageError

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_eagle3.options import BackboneOptions, Eagle3Options


@dataclass(frozen=True)
class DraftConfig(DecoderShape):
    """Everything that fixes a draft's tensors and its forward; JSON data with tuples as lists."""

    draft_vocab_size: int
    layers: tuple[int, ...]
    num_layers: int = 1
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_attention_heads:
            # Also where head_dim is given: transformers' LlamaConfig, which servers read, insists.
            raise UsageError(
                f"servers refuse a hidden size of {self.hidden_size} with "
                f"{self.num_attention_heads} attention heads\n"
                f"  set num_attention_heads to a divisor of {self.hidden_size}"
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
    return DraftConfig(**backbone(target, options), norm_output=options.norm_output)


def backbone(target: TargetSpec, options: BackboneOptions) -> dict[str, Any]:
    """Return the fields that any draft of this network has; raises as `from_target` does."""
    shape = shape_of_target(target, options)
    return {
        **shape,
        "draft_vocab_size": options.draft_vocab_size or shape["vocab_size"],
        "layers": captured_layers(options.layers, target.num_layers),
        "num_layers": options.num_layers,
        "fc_norm": options.fc_norm,
    }


def captured_layers(asked: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Return three ascending layer ids: those asked for, or 1, L/2-1, L-4.

    Raises UsageError for ids that are out of range or equal, or when the default ones collide.
    """
    if num_layers < 4:
        raise UsageError(
            f"EAGLE-3 captures three layers below the last; the target has {num_layers} layers\n"
            "  use a target of at least 4 layers"
        )
    default = (1, num_layers // 2 - 1, num_layers - 4)
    return capturable(tuple(sorted(asked or default)), num_layers, asked=bool(asked))
