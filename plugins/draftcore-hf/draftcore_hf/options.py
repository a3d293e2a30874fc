"""What the section `target` of a run takes of a target by transformers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftcore.contracts.offers import Free


class TargetOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Free[str] = Field(description="a folder or a Hugging Face model id")
    revision: Free[str | None] = Field(None, description="branch, tag or commit of a model id")
    trust_remote_code: Free[bool] = Field(False, description="run Python that comes with the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute type; auto is what the target's config says"
    )
    device: Free[str] = Field("auto", description="cpu, cuda, cuda:1; auto: cuda if there is one")
    tensor_parallel: Free[int] = Field(
        1, ge=1, le=64, description="devices that share the target in each process that captures"
    )
