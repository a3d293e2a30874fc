"""A running target of transformers', for what reaches into its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from draftcore.contracts.target import TargetModel
from draftcore.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from draftcore.contracts.capture import FeatureRequest


@runtime_checkable
class DecoderModel(TargetModel, Protocol):
    """A running target of transformers', for runners and captures that reach into its layers.

    `model` is the whole transformers model; `decoder` its stack of `layers` with the final norm.
    """

    model: Any
    decoder: nn.Module
    layers: nn.ModuleList

    def run(self, request: FeatureRequest, **inputs: Any) -> dict[str, Tensor]:
        """Run `decoder` on its inputs; return as `forward` does."""

    def forward_images(self, inputs: Any, request: FeatureRequest) -> dict[str, Tensor]:
        """Run the full multimodal model on one row; returns the same features as `features()`.

        `inputs` are a BatchFeature of the target's processor. Of a layer it takes what the next is given.
        """

    def masks(self, positions_BT: Tensor, span: int, seen_BTT: Tensor | None = None) -> Any:
        """Return additive masks [B, 1, T, S]: the slots that `forward` says, within the window."""


def decoder_model(model: TargetModel, wanted: str) -> DecoderModel:
    """Return a target as a DecoderModel; raises UsageError where it is none, naming who wanted it."""
    if not isinstance(model, DecoderModel):
        raise UsageError(
            f"{wanted} reaches into the layers of transformers' models, and target {model.spec.path!r} "
            "is none\n  choose another, or leave it out"
        )
    return model
