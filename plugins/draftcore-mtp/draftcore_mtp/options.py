"""What a run may set under `algorithm.options` for MTP; unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from draftcore_nn.options import Size
from pydantic import BaseModel, ConfigDict, Field

from draftcore.contracts.offers import Free


class MtpOptions(BaseModel):
    """Options of the algorithm `mtp`. The layer's shape is the target's own: servers know no other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    init: Literal["target", "fresh"] = Field(
        "target", description="the MTP layer in the target's files, or a new one of random weights"
    )
    steps: int = Field(3, ge=1, le=99, description="steps K, in which the layer is applied again")
    beta: float = Field(0.6, gt=0, le=1, description="step k weighs beta^k, of a sum of 1")
    chain: Literal["served", "rerun"] = Field(
        "served",
        description="served: each step is a row at the next position, as servers decode; rerun: each "
        "step runs all rows anew at their own positions, as FastMTP and speculators train",
    )
    warm_start: Free[str | None] = Field(
        None, description="folder of an export to start from, in place of the target's own layer"
    )
    num_drafts: Free[Size] = Field(3, description="tokens proposed per round when decoding")
