"""What a run may set under `algorithm.options` for EAGLE-3; unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from draftcore_nn.options import DecoderOptions, Size
from pydantic import Field

from draftcore.contracts.offers import Free


class BackboneOptions(DecoderOptions):
    """Options of the network and its rows. What is left out is taken from the target."""

    num_layers: Size = Field(1, description="decoder layers of the draft")
    layers: tuple[int, int, int] | None = Field(
        None, description="the three captured layers, 0-based outputs; by default 1, L/2-1 and L-4"
    )
    draft_vocab_size: Size | None = Field(
        None, description="most frequent tokens the draft may propose; all if unset"
    )
    supervise: Literal["reference", "predicted"] = Field(
        "reference",
        description="reference: row t counts if token t is to be learned, as published; "
        "predicted: if token t+2 is, the one that row t predicts",
    )
    fc_norm: bool = Field(False, description="an RMSNorm per captured layer (EAGLE-3.1)")
    warm_start: Free[str | None] = Field(
        None,
        description="folder of an exported or published draft to start from; its shape, captured "
        "layers and vocabulary mapping are taken over",
    )


class Eagle3Options(BackboneOptions):
    """Options of the algorithm `eagle3`."""

    ttt_length: int = Field(7, ge=1, le=99, description="steps K of the training-time test")
    step_decay: float = Field(0.8, gt=0, le=1, description="step k weighs step_decay^k")
    loss: Literal["kl", "lk_alpha", "lk_lambda"] = Field(
        "kl",
        description="kl: cross entropy with the teacher; lk_alpha: -log acceptance; "
        "lk_lambda: a blend of cross entropy and acceptance (arXiv 2602.23881)",
    )
    kl_scale: float = Field(
        1.0, ge=0, le=1, description="lk_lambda: weight of cross entropy at acceptance 0"
    )
    kl_decay: float = Field(
        3.0, ge=0, le=1e6, description="lk_lambda: how fast that weight falls with acceptance"
    )
    norm_output: bool = Field(
        False, description="feed back the state after the final norm (EAGLE-3.1)"
    )
    num_drafts: Free[Size] = Field(7, description="tokens proposed per round when decoding")
