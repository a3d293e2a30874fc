"""What a run may set under `algorithm.options` for DFlash2; unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from draftcore_dflash.options import BackboneOptions
from draftcore_nn.options import Size
from pydantic import Field


class DFlash2Options(BackboneOptions):
    """Options of the algorithm `dflash2`: the backbone's, the convolutions' and the selector's."""

    conv_kernel_size: Size = Field(
        2, description="rows that a convolution reads, its own included; at most block_size"
    )
    conv_group_size: Size = Field(
        16, description="channels that share what a convolution takes from its input"
    )
    selector_rank: Size = Field(256, description="rank of the selector's scores of token pairs")
    selector_top_k: Size = Field(
        16, description="best tokens of a row that the selector chooses among"
    )
    labels: Literal["data", "teacher"] = Field(
        "data",
        description="data: cross entropy with the data's tokens; teacher: divergence from the "
        "target's distribution, whose most probable token the selector learns",
    )
    missing: Literal["skip", "replace"] = Field(
        "skip",
        description="where the label is not among the best tokens of a row the selector learns "
        "nothing, or the label takes the place of the last of them",
    )
    selector_loss_alpha: float = Field(
        1.0, ge=0, le=1e3, description="weight of the selector's loss"
    )
    selector_warmup: float = Field(
        0.0005,
        ge=0,
        le=0.5,
        description="share of the run without the selector's loss; over as much again it rises to "
        "its weight",
    )
    stop_gradient: bool = Field(
        False, description="the selector's loss trains the selector alone, not the backbone"
    )

    @property
    def distils(self) -> bool:
        return self.labels == "teacher"
