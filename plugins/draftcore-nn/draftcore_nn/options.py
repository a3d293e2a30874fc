"""Options that change what a draft takes over from its target."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=1, le=10**6)]  # of what a draft is made of, and never more


class DecoderOptions(BaseModel):
    """Sizes of a draft's layers; those left out are the target's (`target.shape_of_target`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_attention_heads: Size | None = Field(None, description="query heads")
    num_key_value_heads: Size | None = Field(None, description="key and value heads")
    head_dim: Size | None = Field(None, ge=2, description="width of a head")
    intermediate_size: Size | None = Field(None, description="width of the MLP")
    rope_theta: float | None = Field(
        None, gt=1, le=1e12, description="base of plain rotary positions of the draft's own"
    )
