"""What a run may set under `algorithm.options` for DFlash; unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from draftcore_nn.options import DecoderOptions, Size
from pydantic import Field

from draftcore.contracts.offers import Free

Loss = Literal[
    "ce", "dpace", "dpace_cumulative_confidence_only", "dpace_continuation_value_only", "kl", "tv",
    "lk_alpha", "lk_lambda",
]  # fmt: skip
LayerType = Literal["full_attention", "sliding_attention"]


class BackboneOptions(DecoderOptions):
    """Options of the block-diffusion backbone. What is left out is taken from the target."""

    num_layers: int = Field(5, ge=1, le=999, description="decoder layers of the draft")
    layers: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="the captured layers, 0-based outputs; by default num_layers of them, evenly "
        "spaced from 1 to L-3 (L/2 for a draft of one layer)",
    )
    block_size: int = Field(
        16, ge=2, le=9999, description="tokens of a block: the last known one and those drafted"
    )
    num_anchors: Size = Field(512, description="blocks drawn per sample and step")
    loss_decay_gamma: float | None = Field(
        7.0,
        gt=0,
        le=1e6,
        description="offset k of a block weighs exp(-(k-1)/gamma); none weighs all alike",
    )
    layer_types: tuple[LayerType, ...] | None = Field(
        None,
        description="full_attention or sliding_attention per draft layer; by default all full, or "
        "all sliding where sliding_window is set",
    )
    sliding_window: Size | None = Field(
        None, description="positions that a sliding layer sees, its own included"
    )
    is_causal: bool | None = Field(
        None, description="causal attention inside a block; by default in sliding layers only"
    )
    mask_token_id: int | None = Field(
        None,
        ge=0,
        le=10**7,
        description="the token that stands for one to be drafted; by default the tokenizer's mask "
        "token, else an unused row of the embedding, else its pad, end or unknown token",
    )
    warm_start: Free[str | None] = Field(
        None,
        description="folder of an exported or published draft to start from; its shape, captured "
        "layers and mask token are taken over",
    )
    num_drafts: Free[Size | None] = Field(
        None,
        description="tokens proposed per round when decoding; by default, and at most, "
        "block_size - 1",
    )

    @property
    def distils(self) -> bool:
        """Whether the loss reads the target's distribution, and so its last hidden states."""
        return False


class DFlashOptions(BackboneOptions):
    """Options of the algorithm `dflash`."""

    loss: Loss = Field(
        "ce",
        description="ce: decayed cross entropy; dpace: weighted by the draft's own confidence "
        "(arXiv 2605.18810), whole or one of its two factors; the decay does not apply to dpace; "
        "kl, tv: divergence and distance from the target's distribution; lk_alpha: -log acceptance; "
        "lk_lambda: a blend of kl and tv (arXiv 2602.23881)",
    )
    dpace_alpha: float = Field(
        0.5, ge=0, le=1, description="dpace: confidence is (1 - alpha) p + alpha"
    )

    @property
    def distils(self) -> bool:
        return self.loss in ("kl", "tv", "lk_alpha", "lk_lambda")
