"""The shape of a draft, and how it follows from the target. Layer ids are 0-based outputs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from draftcore_nn.target import DecoderShape, capturable, mask_token, shape_of_target

from draftcore.errors import UsageError

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_dflash.options import BackboneOptions

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DraftConfig(DecoderShape):
    """Everything that fixes a draft's tensors and its forward; JSON data with tuples as lists.

    `layers` are the captured ones, in the order of `fc`'s columns; `is_causal` overrides every layer
    type's own rule inside a block, and says it where that is the same for all layers.
    """

    layers: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None

    @classmethod
    def of(cls, target: TargetSpec, options: BackboneOptions) -> Self:
        """Take over what the options say, and of the target what they leave out.

        Raises UsageError where the target lacks a size, has no supported RoPE, or is too shallow.
        """
        names = {field.name for field in fields(cls)}
        return cls(
            **{name: value for name, value in options if name in names}
            | shape_of_target(target, options)
            | {
                "layers": captured_layers(options.layers, options.num_layers, target.num_layers),
                "num_target_layers": target.num_layers,
                "mask_token_id": mask_token(target, options.mask_token_id),
                "layer_types": layer_types(options),
            }
        )

    def __post_init__(self) -> None:
        super().__post_init__()
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
        rules = {layer_type == SLIDING for layer_type in self.layer_types}
        if self.is_causal is None and len(rules) == 1:
            object.__setattr__(self, "is_causal", rules.pop())
        if (SLIDING in self.layer_types) != (self.sliding_window is not None):
            raise UsageError(
                f"layer_types are {list(self.layer_types)}, sliding_window is "
                f"{self.sliding_window}\n  set both or neither: a window belongs to {SLIDING} layers"
            )

    def causal(self, layer_type: str) -> bool:
        """Say whether layers of this type are causal inside a block."""
        return layer_type == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer_type: str) -> int | None:
        """Return how far layers of this type look back into the context; None for all of it."""
        return self.sliding_window if layer_type == SLIDING else None


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
    default: tuple[int, ...] = (num_target_layers // 2,)
    if num_draft_layers > 1:
        step = (num_target_layers - 4) / (num_draft_layers - 1)
        default = tuple(round(1 + i * step) for i in range(num_draft_layers))
    return capturable(asked or default, num_target_layers, asked=asked is not None)
