"""What a run may set under `algorithm.options` for DSpark; unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from draftcore_dflash.options import BackboneOptions
from draftcore_nn.options import Size
from pydantic import Field

from draftcore.contracts.offers import Free

HeadType = Literal["vanilla", "gated", "rnn"]


class DSparkOptions(BackboneOptions):
    """Options of the algorithm `dspark`: the backbone's, those of the heads and of the three losses."""

    block_size: int = Field(
        7, ge=2, le=9999, description="rows of a block, which are as many as a round drafts"
    )
    loss_decay_gamma: float | None = Field(
        4.0,
        gt=0,
        le=1e6,
        description="row k of a block, from 0, weighs exp(-k/gamma); none weighs all alike",
    )
    num_drafts: Free[Size | None] = Field(
        None,
        description="tokens proposed per round when decoding; by default, and at most, block_size",
    )
    markov_rank: Size = Field(256, description="rank of the Markov head's correction")
    markov_head_type: HeadType = Field(
        "vanilla",
        description="the correction follows from the last token alone; gated: by how much, from the "
        "block's state; rnn: from all tokens of the block. vLLM and llama.cpp know vanilla only",
    )
    enable_confidence_head: bool = Field(
        True, description="train a head that says how probably a draft is accepted"
    )
    confidence_head_with_markov: bool = Field(
        True, description="the confidence head reads the Markov head's embedding of the last token"
    )
    ce_weight: float = Field(0.1, ge=0, le=1e6, description="share of the cross entropy")
    l1_weight: float = Field(
        0.9, ge=0, le=1e6, description="share of the L1 distance from the target's distribution"
    )
    confidence_weight: float = Field(
        1.0, ge=0, le=1e6, description="share of the confidence head's cross entropy"
    )
    confidence_threshold: Free[float] = Field(
        0.0,
        ge=0,
        le=1,
        description="a round drafts no token that is reached less probably than this, by the "
        "confidence head; 0 drafts all",
    )

    @property
    def distils(self) -> bool:
        return True
