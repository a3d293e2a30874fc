"""Options that change what a draft takes over from its target."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DecoderOptions(BaseModel):
    """Sizes of a draft's layers; those left out are the target's (`target.shape_of_target`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_attention_heads: int | None = Field(default=None, ge=1, description="query heads")
    num_key_value_heads: int | None = Field(default=None, ge=1, description="key and value heads")
    head_dim: int | None = Field(default=None, ge=2, description="width of a head")
    intermediate_size: int | None = Field(default=None, ge=1, description="width of the MLP")
