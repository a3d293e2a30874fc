"""What a run may set under `algorithm.options` for Medusa; unknown keys are refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class MedusaOptions(BaseModel):
    """Options of the algorithm `medusa`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_heads: int = Field(default=4, ge=1, description="heads, each of which drafts one token")
    num_layers: int = Field(default=1, ge=1, description="residual layers of a head")
    decay: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="head i weighs decay**i in the loss; 1 weighs all alike",
    )
