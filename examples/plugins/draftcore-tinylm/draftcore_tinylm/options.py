"""What a run may set of this target and of its rows; unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftcore.contracts.offers import Free


class TargetOptions(BaseModel):
    """The section `target` of a run with `target.name=tinylm`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Free[str] = Field(description="folder of config.json and model.safetensors")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="compute type")
    device: Free[str] = Field("auto", description="cpu, cuda, cuda:1; auto: cuda if there is one")


class RowsOptions(BaseModel):
    """The section `data` of a run with `data.name=token-rows`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: str | None = Field(None, description="JSON lines with input_ids and loss_mask")
    eval: str | None = Field(None, description="held-out rows, in the same form")
    max_length: int = Field(2048, ge=2, le=10**7, description="longest row, in tokens")
