"""What a run may set under `algorithm.options` for Domino; unknown keys are refused."""

from __future__ import annotations

from draftcore_dflash.options import BackboneOptions
from draftcore_nn.options import Size
from pydantic import Field


class DominoOptions(BackboneOptions):
    """Options of the algorithm `domino`: the backbone's, the head's and the schedule's."""

    gru_hidden_dim: Size = Field(1024, description="width of the GRU's state")
    emb_dim: Size = Field(256, description="rank of the correction")
    shift_label: bool = Field(
        True,
        description="row k of a block predicts the token after its position, so that the "
        "anchor's own row is of use; else the token at its position",
    )
    lambda_start: float = Field(
        1.0, ge=0, le=1, description="weight of the base loss at the first step"
    )
    lambda_ratio: float = Field(
        0.5, ge=0, le=1, description="part of the run over which that weight falls to 0"
    )
