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
        "target",
        description="target: start from the MTP layer in the target's files; fresh: from random "
        "weights, also for a target that has none",
    )
    steps: int = Field(
        3, ge=1, le=99, description="steps K of the chain: the layer is applied so often"
    )
    beta: float = Field(0.6, gt=0, le=1, description="step k weighs beta^k, of a sum of 1")
    chain: Literal["served", "rerun"] = Field(
        "served",
        description="served: a step is a row at the next position, which sees the rows of the first "
        "step and its own steps before, as servers decode; rerun: every step runs all rows anew, "
        "as FastMTP and speculators train",
    )
    warm_start: Free[str | None] = Field(
        None, description="folder of an export to start from, in place of the target's own layer"
    )
    num_drafts: Free[Size] = Field(3, description="tokens proposed per round when decoding")
